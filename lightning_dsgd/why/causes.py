"""The usual cause of a pattern, and what to do next."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lightning_dsgd.why.records import Job
from lightning_dsgd.why.stacks import Frame, has, purpose_of, users_frame, users_frames
from lightning_dsgd.why.verdict import Verdict

_RANK: Final = re.compile(
    r"rank|is_global_zero|is_main_process|is_world_process_zero", re.IGNORECASE
)
_MEMORY: Final = re.compile(r"out of memory|OutOfMemory|MemoryError|can't allocate", re.IGNORECASE)


@dataclass(frozen=True)
class Cause:
    """Holds what is often behind a pattern, and what to try."""

    often: str
    next: str


def usual_cause(verdict: Verdict, job: Job) -> Cause:
    """Returns what is often behind a verdict."""
    culprits = [job.ranks[rank] for rank in verdict.culprits if rank in job.ranks]
    frames = culprits[0].frames if culprits else ()
    if verdict.cause in _BY_CAUSE:
        return _BY_CAUSE[verdict.cause]
    if verdict.cause == "raised":
        ending = culprits[0].ending
        if ending is not None and _MEMORY.search(ending.error):
            return Cause(
                "a batch that is larger on one rank, or a cache that grows there",
                "a smaller batch, or batches sorted and padded alike on all ranks; do not catch "
                "the error and go on, as the others wait for this rank's gradient",
            )
        if ending is not None and "finished reduction in the prior iteration" in ending.error:
            return Cause(
                "a layer that this rank did not use in the step before",
                "let all parameters take part on all ranks, or find_unused_parameters=True",
            )
        return Cause("", "mend this error first: those of the other ranks come from it")
    if verdict.is_late_only:
        return Cause("", "nothing yet: it works, and the others wait for it")
    ranks = {*verdict.culprits, *verdict.waiting}
    stacks = [job.ranks[rank].frames for rank in sorted(ranks) if rank in job.ranks]
    branch = branch_by_rank(stacks)
    if branch is not None:
        return Cause(
            f"a branch that depends on the rank ({_place(branch)} `{branch.text}`)",
            "let all ranks call what all ranks must call; keep only printing and writing in it",
        )
    return _by_stack(verdict, frames, stacks)


_BY_CAUSE: Final = {
    "left": Cause(
        "fewer batches than the others have, or a `break` or `return` that others do not reach",
        "DistributedSampler or drop_last=True; `with Join([model]):` in plain PyTorch; or a "
        'strategy that lets ranks have different numbers of batches, strategy="wagma"',
    ),
    "killed": Cause(
        "the kernel's OOM killer, or a scheduler that takes the node back",
        "`dmesg | grep -i 'killed process'`; fewer loader workers, smaller batches, or more memory",
    ),
    "terminated": Cause("the launcher, or the scheduler, has ended it", "its log says why"),
    "crashed": Cause(
        "a C extension, or a library that is not safe after a fork",
        "its stack is above; try num_workers=0, and update that library",
    ),
    "unstarted": Cause(
        "the launcher has started fewer processes than WORLD_SIZE says, or another node has not "
        "come: its address, port or firewall",
        "compare --nnodes and --nproc-per-node (or devices, num_nodes) with what runs: `pgrep -af "
        "python` on each node",
    ),
    "cycle": Cause(
        "groups that ranks use in different orders",
        "let all ranks call the collectives of their groups in one order",
    ),
}


def _by_stack(
    verdict: Verdict, frames: Sequence[Frame], stacks: Sequence[Sequence[Frame]]
) -> Cause:
    purposes = {purpose_of(each) for each in stacks}
    if verdict.cause == "disagree":
        if "a metric with sync_dist=True" in purposes:
            return Cause(
                "`self.log(..., sync_dist=True)` that not all ranks call",
                "log the same names on all ranks, or rank_zero_only=True without sync_dist",
            )
        return Cause(
            "code that calls other collectives on some ranks, as where one has fewer batches",
            "let all ranks call the same collectives in the same order",
        )
    if verdict.cause == "everyone":
        return Cause(
            "a network interface or a firewall through which the ranks do not reach each other",
            "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO; check MASTER_ADDR and its "
            "port",
        )
    if has(frames, "_try_get_data") or has(frames, "_get_data") or has(frames, "_next_data"):
        return Cause(
            "a loader whose workers are dead or wait for a lock that was held at the fork",
            'num_workers=0 to try; then multiprocessing_context="spawn", or a loader time-out',
        )
    if has(frames, "set_trace") or has(frames, "interaction") or has(frames, "cmdloop"):
        return Cause("a debugger that waits for input", "leave the debugger, or run one rank")
    if has(frames, "save_checkpoint") or has(frames, "barrier"):
        return Cause(
            "saving, or a barrier, that not all ranks call",
            "call trainer.save_checkpoint and barriers on all ranks: only rank 0 writes",
        )
    return Cause(
        "a lock, a file, or another process that this line waits for",
        "look at this line on that rank",
    )


def branch_by_rank(stacks: Iterable[Sequence[Frame]]) -> Frame | None:
    """Returns a branch around a line of a stack whose condition names the rank, if any."""
    for frames in stacks:
        for frame in users_frames(frames):
            found = _branch_around(frame)
            if found is not None:
                return found
    return None


def _branch_around(frame: Frame) -> Frame | None:
    """Returns the innermost branch around a line that depends on the rank."""
    try:
        tree = ast.parse(Path(frame.file).read_text(errors="replace"))
    except (OSError, ValueError, SyntaxError):
        return None
    found = None
    for node in ast.walk(tree):
        if not isinstance(node, ast.If | ast.While | ast.IfExp):
            continue
        is_around = node.lineno <= frame.line <= (node.end_lineno or node.lineno)
        if is_around and _RANK.search(ast.unparse(node.test)):
            line = node.test.lineno
            if found is None or line > found:
                found = line
    return None if found is None else Frame(frame.file, found, frame.function)


def _place(frame: Frame) -> str:
    return f"{Path(frame.file).name}:{frame.line}"


def place_of(frames: Sequence[Frame]) -> str:
    """Returns where a rank is in the user's code, in words."""
    frame = users_frame(frames)
    if frame is None:
        return "an unknown line"
    text = f": `{frame.text}`" if frame.text else ""
    return f"{_place(frame)} in {frame.function}{text}"
