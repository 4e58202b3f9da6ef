"""Why a job is slow: the verdict of `lab.diagnose` on the steps that were recorded.

`lab.diagnose` knows Lightning's Trainer.  What is added here: the lines to paste for the other
faces, the checkpoints and starts of loaders that were timed, and other clusters.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from lightning_dsgd.lab.diagnose.remedy import Remedy
    from lightning_dsgd.lab.diagnose.times import Times
    from lightning_dsgd.lab.diagnose.verdict import Verdict
    from lightning_dsgd.lab.link import Link

STEPS: Final = "steps"
"""The folder, within that of a run, of the ranks' step traces."""
_OF_RANKS: Final = "rank_*.json"
"""The files of the ranks of a run that is watched."""
_MOSTLY: Final = 0.8
"""What is between the steps is called saving if this share of it is."""
_LEAST_STARTS: Final = 0.02
"""Starts of loaders that take a smaller share of a step are not told."""
TRAINER: Final = "trainer"
_PASTE: Final = {
    "trainer": {"saving": "ModelCheckpoint(every_n_train_steps=..., ...)    # a larger number"},
    "fabric": {
        "balanced": 'Fabric(strategy="balanced", ...)    # and the loop in docs/balanced.md',
        "shared": "evaluate on all ranks: DataLoader(..., sampler=DistributedSampler(data))",
        "freeze": "gc.collect(); gc.freeze(); gc.disable()    # before the loop",
        "saving": "fabric.save(...)    # in fewer steps",
    },
    "plain": {
        "balanced": "lightning_dsgd.decentralized(model, optimizer, lightning_dsgd.Balanced())"
        "    # in place of DDP: docs/balanced.md",
        "pinned": "DataLoader(..., pin_memory=True); x.to(device, non_blocking=True)",
        "shared": "evaluate on all ranks: DataLoader(..., sampler=DistributedSampler(data))",
        "freeze": "gc.collect(); gc.freeze(); gc.disable()    # before the loop",
        "saving": "torch.save(...)    # in fewer steps",
    },
    "hugging_face": {
        "workers": "TrainingArguments(dataloader_num_workers={workers}, "
        "dataloader_persistent_workers=True, ...)",
        "pinned": "TrainingArguments(dataloader_pin_memory=True, ...)",
        "lighter": "TrainingArguments(logging_steps=500, ...)    # and callbacks that do less",
        "freeze": "gc.collect(); gc.freeze(); gc.disable()    # before trainer.train",
        "saving": "TrainingArguments(save_steps=..., ...)    # a larger number",
    },
}
"""For each face, the lines to paste that differ from those of Lightning's Trainer."""
_UNPASTED: Final = {"fabric": ("lighter",), "plain": ("lighter",), "hugging_face": ("shared",)}
"""Remedies for which a face has no line."""


@dataclass(frozen=True)
class Asked:
    """Holds what a user wants to know of a run besides.

    Args:
        ranks: of another cluster; None: as recorded
        link: of each of its ranks, as the user writes it; None: as recorded, or as measured
        strategies: whose gains are told too
        as_json: whether the report is for programs
    """

    ranks: int | None = None
    link: str | None = None
    strategies: tuple[str, ...] = ()
    as_json: bool = False


@dataclass(frozen=True)
class Pauses:
    """Holds for how long each rank saved checkpoints, and started loaders, in a step."""

    saving: tuple[float, ...]
    starts: tuple[float, ...]


def lines_of(run: Path) -> list[str]:
    """Returns why a run is slow, or why nothing is said of that."""
    try:
        return diagnosed(run)
    except (ValueError, OSError) as error:
        return [f"of the time of a step nothing is said: {why}" for why in _reasons(run, error)]


def record_of(run: Path, told: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the report of a run that was watched, for programs.

    Args:
        run: its folder
        told: what the watcher has told, which is said too where nothing is said of the steps
    """
    try:
        return _judged(run, Asked(as_json=True), told)
    except (ValueError, OSError) as error:
        record = {"verdict": None, "told": list(told), "reasons": _reasons(run, error)}
        return json.dumps(record, indent=1).splitlines()


def diagnosed(run: Path) -> list[str]:
    """Returns why a run that was watched is slow.

    Raises:
        ValueError: if too few steps were recorded, or none
    """
    return _judged(run, Asked())


def _judged(run: Path, asked: Asked, told: Sequence[dict[str, Any]] = ()) -> list[str]:
    if not any(steps_of(run).glob("step_trace_*.jsonl")):
        raise ValueError("no step of Lightning's strategy ddp, or of torch's DDP or FSDP, was seen")
    try:
        return _report(run, asked, None, told)
    except (LookupError, ArithmeticError, RuntimeError) as err:
        # A job's exit status must not be lost as ranks have recorded what nobody expects.
        raise ValueError(f"the steps could not be judged: {err!r}") from err


def report(run: Path, asked: Asked, told: Sequence[dict[str, Any]] = ()) -> list[str]:
    """Returns the lines of the report on the steps of a run.

    Args:
        run: the folder of a run that was watched, or of its ranks' step traces
        asked: what else the user wants to know
        told: what the watcher has told of the run; a report for programs has it too

    Where `is_measured` says so, all ranks of a launcher come here, and measure the other cluster's
    link.

    Raises:
        ValueError: if there are too few steps, or none, or what is asked cannot be told
    """
    from lightning_dsgd.lab.diagnose import measured  # loads torch
    from lightning_dsgd.lab.diagnose.elsewhere import LATENCY_S
    from lightning_dsgd.lab.link import Link

    link = Link.parse(asked.link, "--link", LATENCY_S) if asked.link else None
    if is_measured(asked):
        if link is not None:
            raise ValueError("--link must be left out under torchrun, whose ranks measure it")
        link, rank = measured.link()
        if rank:
            return []
    return _report(run, asked, link, told)


def _report(
    run: Path, asked: Asked, link: Link | None, told: Sequence[dict[str, Any]] = ()
) -> list[str]:
    """Returns the report; `link` is that of another cluster, if there is one."""
    # They load torch, which a watcher does without as long as it can.
    from lightning_dsgd.lab.diagnose import times, words
    from lightning_dsgd.lab.diagnose.elsewhere import elsewhere
    from lightning_dsgd.lab.diagnose.remedies import check_asked
    from lightning_dsgd.lab.diagnose.verdict import judge

    folder = steps_of(run)
    recorded = _on_one_clock(times.read(folder))
    is_elsewhere = asked.ranks is not None or link is not None
    seen = elsewhere(recorded, asked.ranks, link) if is_elsewhere else recorded
    check_asked(seen, asked.strategies)
    found, pauses = judge(seen), pauses_in(folder, recorded)
    gains = _remedies(seen, found, pauses, asked.strategies)
    if asked.as_json:
        record = words.record(seen, found, gains) | {"told": list(told)}
        return json.dumps(record, indent=1).splitlines()
    text = words.lines(seen, found, gains, recorded.num_ranks)
    if is_elsewhere:
        return text
    place = next(i for i, line in enumerate(text) if line.startswith("Next:"))
    return [*text[:place], *_details(found, pauses), *text[place:]]


def is_measured(asked: Asked) -> bool:
    """Returns whether the ranks of a launcher measure the link of another cluster.

    torchrun has started the command on all of them.  Elsewhere the launcher's variables may be left
    from the job itself, as in a pod: then they count where `--ranks` is asked for without a link.
    """
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return False
    return "TORCHELASTIC_RUN_ID" in os.environ or (asked.ranks is not None and asked.link is None)


def steps_of(run: Path) -> Path:
    """Returns the folder of the step traces of a run, which are there, or in a folder of it."""
    return run / STEPS if (run / STEPS).is_dir() else run


def next_of(run: Path) -> list[str]:
    """Returns what to do first about a run's speed, in a line or two."""
    text = diagnosed(run)
    begin = next(i for i, line in enumerate(text) if line.startswith("Next:"))
    return [text[begin], *(line for line in text[begin + 1 : begin + 2] if line[0] == " ")]


def is_watched(run: Path) -> bool:
    """Returns whether ranks that were watched have written into this folder."""
    return any(run.glob(_OF_RANKS))


def _reasons(run: Path, error: Exception) -> list[str]:
    """Returns what the ranks say where they could not record their steps, or else the error."""
    said = set()
    for path in run.glob(_OF_RANKS):
        try:
            said.add(str(json.loads(path.read_text()).get("steps", "")))
        except (OSError, ValueError):
            continue
    return sorted(said - {""}) or [str(error)]


def _on_one_clock(seen: Times) -> Times:
    """Returns times without what needs a common clock, if the ranks have none.

    A loop that is recorded without an edit compares no clocks: for that all ranks would meet.
    """
    if len({about.get("boot") for about in seen.abouts}) < 2:
        return seen
    return replace(seen, over=seen.over * 0.0)


def pauses_in(folder: Path, seen: Times) -> Pauses:
    """Returns for how long the ranks paused in the steps that were seen."""
    from lightning_dsgd.lab.timeline.trace import read_folder

    steps = set(seen.numbers.tolist())
    traces = read_folder(folder)

    def per_step(kind: str) -> tuple[float, ...]:
        return tuple(
            sum(
                end - begin for s in t.steps if s.number in steps for begin, end in getattr(s, kind)
            )
            / seen.num_steps
            for t in traces
        )

    return Pauses(per_step("save"), per_step("start"))


def _is_saving(found: Verdict, pauses: Pauses) -> bool:
    """Returns whether checkpoints are most of what ranks are at between the steps."""
    cost_s = found.costs["callbacks"] * found.step_s
    return found.cause == "callbacks" and max(pauses.saving) >= _MOSTLY * cost_s


def _details(found: Verdict, pauses: Pauses) -> list[str]:
    text = []
    if _is_saving(found, pauses):
        saves_s = max(pauses.saving)
        rank = pauses.saving.index(saves_s)
        text.append(
            f"         most of that is saving: {1e3 * saves_s:.1f} ms a step on rank {rank}"
        )
    starts_s = min(pauses.starts)
    if starts_s > _LEAST_STARTS * found.step_s:
        gain = found.step_s / (found.step_s - starts_s)
        text.append(
            f"         loaders start for {1e3 * starts_s:.1f} ms of a step: without that it is "
            f"{gain:.2f} times as fast: DataLoader(..., persistent_workers=True)"
        )
    return text


def _remedies(
    seen: Times, found: Verdict, pauses: Pauses, asked: Sequence[str] = ()
) -> list[Remedy]:
    """Returns the remedies as a user of this face would write them."""
    from lightning_dsgd.lab.diagnose.remedies import remedies

    face = str(seen.about.get("face", TRAINER))
    paste = _PASTE[face]
    written = []
    for remedy in remedies(seen, found, asked):
        if remedy.name == "lighter" and _is_saving(found, pauses):
            what = "save checkpoints less often, or in the background"
            remedy = replace(remedy, what=what, paste=paste["saving"])
        elif remedy.name in paste:
            workers = re.search(r"num_workers=(\d+)", remedy.paste)
            line = paste[remedy.name].format(workers=workers[1] if workers else "")
            remedy = replace(remedy, paste=line)
        elif face != TRAINER and remedy.is_strategy:
            if not remedy.is_asked:
                continue
            remedy = replace(remedy, paste="")
        elif remedy.name in _UNPASTED.get(face, ()):
            remedy = replace(remedy, paste="")
        written.append(remedy)
    return written
