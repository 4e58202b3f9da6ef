"""Why a fit is slow is said without an edit of its script."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_dsgd.lab.timeline.trace import read_folder
from lightning_dsgd.why import slow
from lightning_dsgd.why.slow import STEPS
from tests.lab.diagnose import made
from tests.support.thorough import cases
from tests.why.jobs import forked


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["ddp", "fully_shard"])
def test_a_slow_loader_is_named_with_what_its_remedy_gains(strategy: str, tmp_path: Path) -> None:
    job = forked(tmp_path / "run", "slow_loader", 2, STRATEGY=strategy)
    assert job.status == 0, job.said
    assert job.told == []
    assert "why: Verdict: rank" in job.said, job.said
    assert "for the data loader" in job.said
    assert "why: Next:    more loader workers" in job.said
    traces = read_folder(tmp_path / "run" / "steps")
    assert {trace.about["strategy"] for trace in traces} == {strategy}
    assert sorted(path.name for path in (tmp_path / "run" / "steps").iterdir()) == [
        "step_trace_00000.jsonl",
        "step_trace_00001.jsonl",
    ]


LOOPS = cases(
    "face, slow, says",
    now=[],
    later=[
        ("fully_shard", "late", "rank 1 computes longer than the others"),
        ("fully_shard", "loader", "rank 1 waits for the data loader"),
        ("fully_shard", "validation", "rank 0 validates longer than the others"),
        ("fsdp", "loader", "rank 1 waits for the data loader"),
        ("fsdp", "late", "rank 1 computes longer than the others"),
        ("plain", "loader", "rank 1 waits for the data loader"),
        ("fabric", "late", "rank 1 computes longer than the others"),
        ("fabric", "copies", "rank 1 waits for copies to the device"),
        ("plain", "validation", "rank 0 validates longer than the others"),
        ("plain", "saving", "rank 0 spends longer between batches"),
    ],
)


@LOOPS
@pytest.mark.timeout(300)
def test_a_loop_that_calls_nothing_of_ours_is_judged(
    face: str, slow: str, says: str, tmp_path: Path
) -> None:
    job = forked(tmp_path / "run", "slow_loop", 2, FACE=face, SLOW=slow)
    assert job.status == 0, job.said
    assert job.told == []
    assert f"why: Verdict: {says}" in job.said, job.said
    assert "why: Next:    stay" not in job.said
    assert "why: Next:    " in job.said
    in_shards = ("fully_shard", "fsdp")
    for trace in read_folder(tmp_path / "run" / "steps"):
        assert trace.about["strategy"] == (face if face in in_shards else "ddp")
        assert trace.about["face"] == ("plain" if face in in_shards else face)
        assert trace.end == "training has ended"
        assert [step.number for step in trace.steps] == list(range(1, 41))
        for step in trace.steps:
            parts = step.forward, step.backward, step.optimizer, step.sum
            assert [*map(len, parts)] == [1, 1, 1, 1]
            assert len(step.gather) == (face in in_shards)
            assert step.items == 32
        # A model in shards is recorded from its first forward pass on.
        unseen = int(face in in_shards)
        assert all(step.load for step in trace.steps[unseen:])
        is_late = trace.rank == int(slow in ("loader", "late", "copies"))
        kinds = {"loader": "load", "late": "forward", "copies": "copy"}
        kind = {"validation": "evaluate", "saving": "save", **kinds}[slow]
        spans = [span for step in trace.steps for span in getattr(step, kind)]
        long = sum(end - begin > 0.045 for begin, end in spans)
        # What follows the last step is in none.
        least = {"validation": 9, "saving": 39, "loader": 40 - unseen}.get(slow, 40)
        assert long >= least if is_late else long < 10


def recorded(folder: Path, cause: made.Cause, **about: object) -> Path:
    folder.mkdir()
    made.write(folder / STEPS, made.traces(cause, victim=1, steps=60, about=about))
    return folder


def saves(s: made.Setting, step: int, rank: int, own: made.Own) -> None:
    if rank == 0 and step % 5 == 0:
        own.saving = 0.3


def starts(s: made.Setting, step: int, rank: int, own: made.Own) -> None:
    if step % 20 == 0:
        own.start = 0.4


@pytest.mark.parametrize(
    ("face", "line"),
    [
        ("trainer", "ModelCheckpoint(every_n_train_steps=..., ...)    # a larger number"),
        ("fabric", "fabric.save(...)    # in fewer steps"),
        ("plain", "torch.save(...)    # in fewer steps"),
        ("hugging_face", "TrainingArguments(save_steps=..., ...)    # a larger number"),
    ],
)
def test_checkpoints_that_take_a_share_of_a_step_are_named(
    face: str, line: str, tmp_path: Path
) -> None:
    said = slow.diagnosed(recorded(tmp_path / "run", saves, face=face))
    # 12 saves of 300 ms in 57 steps, as the first three do not count.
    assert "         most of that is saving: 63.2 ms a step on rank 0" in said, said
    following = next(i for i, text in enumerate(said) if text.startswith("Next:"))
    assert "save checkpoints less often, or in the background" in said[following]
    assert said[following + 1].strip() == line


def test_gaps_between_epochs_are_told_with_what_their_remedy_gains(tmp_path: Path) -> None:
    said = slow.diagnosed(recorded(tmp_path / "run", starts))
    (line,) = [text for text in said if "loaders start" in text]
    found = re.fullmatch(
        r" +loaders start for (\d+\.\d) ms of a step: without that it is (\d\.\d\d) times as fast: "
        r"DataLoader\(\.\.\., persistent_workers=True\)",
        line,
    )
    assert found is not None, line
    assert float(found[1]) == pytest.approx(20, rel=0.2)
    assert float(found[2]) == pytest.approx(72 / 52, abs=0.06)
    usual = slow.diagnosed(recorded(tmp_path / "usual", made.none))
    assert not [text for text in usual if "start" in text]


@pytest.mark.parametrize("face", ["trainer", "fabric", "plain"])
def test_copies_to_the_device_are_a_cause_of_their_own(face: str, tmp_path: Path) -> None:
    said = slow.diagnosed(recorded(tmp_path / "run", made.copies, face=face))
    assert said[0].startswith("Verdict: all ranks wait for copies to the device, in 100% of"), said
    assert "ms of waiting for copies to the device, " in said[1]
    following = next(i for i, text in enumerate(said) if text.startswith("Next:"))
    assert re.match(
        r"Next:    have loader workers do what hands a batch over.*: 1\.\d\d \(1\.", said[following]
    )
    line = "DataLoader(..., collate_fn=..., num_workers=2)    # and collate_fn does it"
    assert said[following + 1].strip() == line


@pytest.mark.exhaustive
def test_no_steps_are_recorded_where_only_stuck_jobs_are_asked_for(tmp_path: Path) -> None:
    job = forked(tmp_path / "run", "slow_loader", 2, options=("--only-stuck",))
    assert job.status == 0, job.said
    assert not (tmp_path / "run" / "steps").exists()
    assert "why:" not in job.said
