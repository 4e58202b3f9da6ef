"""From traces to times: what each rank did before each meeting of all ranks.

Legend: P ranks, S steps, N meetings, F parts of a rank's own time.

A rank that was ready to run and waited for a processor did nothing of what it was at: that time is
a part of its own, "processor", and all other parts before the same meeting are shorter by their
share of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from lightning_dsgd.lab.drawing.spans import union
from lightning_dsgd.lab.link import Link
from lightning_dsgd.lab.simulate.processors import Costs, usual_costs
from lightning_dsgd.lab.timeline.processors import GUESSED
from lightning_dsgd.lab.timeline.recorder import FSDP, SHARDED
from lightning_dsgd.lab.timeline.trace import Step, Trace, missing_ranks, read_folder

PARTS: Final = (
    *("loader", "copies", "forward", "backward", "optimizer", "validation", "gc", "between"),
    "processor",
)
LEAST_STEPS: Final = 20
_WARM_UP: Final = 3
"""The first steps, which are left out."""
_MOST_STEPS: Final = 4000
"""The last steps of a long run, which are looked at."""
_NEAR_S: Final = 1e-4
_IN_SHARDS: Final = (SHARDED, FSDP)
_SHORT: Final = 0.05
"""A rank that waits for a processor for this share of its own time is short of them."""
_UNKNOWN_SHARE: Final = 2.0
"""How many ranks are taken to share a core where the trace does not say how many there are."""
_KINDS: Final = ("load", "copy", "forward", "backward", "optimizer", "evaluate")
"""What a record calls the first parts, those of a rank's own time that are recorded as spans."""
Spans = list[tuple[float, float]]


@dataclass(frozen=True)
class Times:
    """Holds the times of one run, in seconds.

    Args:
        own: what each rank did before each meeting: [N, P]
        parts: of that, the parts: [F, N, P]
        takes: what each meeting took once all ranks had come: [N]
        over: when each meeting was over for each rank, after it was for the first: [N, P]
        step: the step, as an index, in which each meeting was: [N]
        is_sum: whether a meeting was a sum of the gradient, or gathered weights: [N]
        items: how many numbers each rank's batch had: [S, P]
        numbers: the numbers of the steps: [S]
        busy: how long the sums of each step took, those that nobody waited for included: [S]
        num_bytes: what was summed in a step
        pieces: the pieces of the gradient that were summed in each step: for how long each one had
            been ready on all ranks when the last one was, and its bytes
        abouts: the first line of each rank's trace
        running: how many threads wanted to run, in the mean, as each rank has seen; None: unknown
        link: what the sums are foretold for; None: they are those that were recorded
    """

    own: Tensor
    parts: Tensor
    takes: Tensor
    over: Tensor
    step: Tensor
    is_sum: Tensor
    items: Tensor
    numbers: Tensor
    busy: Tensor
    num_bytes: float
    pieces: tuple[tuple[tuple[float, float], ...], ...]
    abouts: tuple[dict[str, Any], ...]
    running: tuple[float | None, ...]
    link: Link | None = None

    @property
    def about(self) -> dict[str, Any]:
        """The first line of rank 0's trace."""
        return self.abouts[0]

    @property
    def strategy(self) -> str:
        """What the run was trained with, as a user writes it."""
        strategy = str(self.about.get("strategy"))
        return strategy if strategy in _IN_SHARDS else "ddp"

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return self.own.shape[1]

    @property
    def num_steps(self) -> int:
        """How many steps there are."""
        return len(self.numbers)

    @property
    def is_on_device(self) -> bool:
        """Whether the times are those of the ranks' devices, and not of their hosts."""
        return self.about.get("clock") == "device"

    @property
    def num_parameters(self) -> int:
        """How many parameters are trained."""
        return int(self.about.get("parameters") or self.num_bytes / 4) or 1

    @property
    def memory_bytes_s(self) -> list[float] | None:
        """The bytes a second of each rank's device's memory; None: a trace does not say."""
        rates = [float(about.get("memory_bytes_s") or 0) for about in self.abouts]
        return rates if min(rates) > 0 else None

    @property
    def num_units(self) -> int:
        """How many batches of each rank are accumulated for a step; 0: the trace does not say."""
        return int(self.about.get("accumulates") or 0)

    @property
    def can_share(self) -> bool:
        """Whether any rank could load a part of another's batch, as far as the trace says."""
        return bool(self.about.get("can_share", True))

    @property
    def pins_batches(self) -> bool:
        """Whether batches are copied from pinned memory already, as far as the trace says."""
        return bool(self.about.get("pins", False))

    @property
    def hosts(self) -> list[str]:
        """The machine of each rank; where the trace does not say, a rank has one of its own."""
        return [str(about.get("host", rank)) for rank, about in enumerate(self.abouts)]

    @property
    def are_processors_short(self) -> bool:
        """Whether most ranks share a machine with a rank that waits for processors."""
        own_s, waited_s = self.own.sum(0), self.parts[PARTS.index("processor")].sum(0)
        hosts = self.hosts
        short = {
            host
            for host, own, waited in zip(hosts, own_s.tolist(), waited_s.tolist(), strict=True)
            if waited > _SHORT * own
        }
        return 2 * sum(host in short for host in hosts) > self.num_ranks

    @property
    def ranks_per_core(self) -> float:
        """How many ranks share a core, on the machine where most do; 1 where each has one."""
        hosts = self.hosts
        shares = [
            hosts.count(host) / about["cores"] if about.get("cores") else _UNKNOWN_SHARE
            for host, about in zip(hosts, self.abouts, strict=True)
        ]
        return max(1.0, *shares)

    @property
    def costs(self) -> Costs | None:
        """What messages take of the cores, where ranks share cores; None elsewhere.

        On devices they take none.
        """
        if self.ranks_per_core <= 1 or self.is_on_device:
            return None
        hosts = self.hosts
        here = max(hosts.count(host) for host in hosts)
        return usual_costs(max(1, round(here / self.ranks_per_core)), here)

    def by_step(self, of_meetings: Tensor) -> Tensor:
        """Adds up what belongs to meetings, over each step: [N, ...] to [S, ...]."""
        sums = torch.zeros(self.num_steps, *of_meetings.shape[1:], dtype=torch.float64)
        return sums.index_add(0, self.step, of_meetings.double())


def read(folder: Path) -> Times:
    """Reads the traces in this folder.

    Raises:
        ValueError: if they are not those of DDP or FSDP, or too short
    """
    traces = read_folder(folder)
    about = traces[0].about
    if "sums" not in about:
        raise ValueError(
            f"the trace in {folder} must be of torch's DDP or FSDP, got one of strategy "
            f'{about.get("strategy")!r}; record a short run with strategy="ddp" and StepTrace, or '
            "draw this one with `lightning-dsgd timeline`"
        )
    if about.get("strategy") in _IN_SHARDS and about.get("clock") == "device":
        raise ValueError(
            f"the trace in {folder} must be of DDP, or of FSDP on CPUs, got {about['strategy']} on "
            f"{about.get('device')}, where ranks wait in gathers that are not timed; draw it with "
            "`lightning-dsgd timeline`"
        )
    absent = missing_ranks(traces)
    if absent:
        raise ValueError(
            f"the trace in {folder} must have a file of every rank, got none of ranks "
            f"{', '.join(map(str, absent))}; copy them there"
        )
    if traces[0].world_size < 2:
        raise ValueError(f"the trace in {folder} must be of two ranks or more, got one rank")
    return times_of(traces)


def times_of(traces: Sequence[Trace]) -> Times:
    """Returns the times of one run of DDP.

    Raises:
        ValueError: if it is too short
    """
    shared = set.intersection(*({step.number for step in trace.steps} for trace in traces))
    numbers = sorted(shared)[_WARM_UP:][-_MOST_STEPS:]
    if len(numbers) < LEAST_STEPS:
        raise ValueError(
            f"a trace must have {LEAST_STEPS + _WARM_UP} steps of every rank, got {len(shared)}; "
            "train for longer"
        )
    chosen = set(numbers)
    by_rank = [[step for step in trace.steps if step.number in chosen] for trace in traces]
    meetings_of = _on_device if traces[0].about.get("clock") == "device" else _on_host
    met = [[meetings_of(step) for step in steps] for steps in by_rank]
    counts = [min(map(len, of_step)) for of_step in zip(*met, strict=True)]
    if sum(counts) == 0:
        raise ValueError("a trace must have sums of gradients, got none; train with DDP")
    # Where ranks met a different number of times, the last meetings are common to all.
    common = [_last_of(m, counts) for m in met]
    alone = [_last_of(m, counts, is_left=True) for m in met]
    flat = [[meeting for of_step in of_rank for meeting in of_step] for of_rank in common]
    spans = torch.tensor(flat, dtype=torch.float64)  # [P, N, 2]
    begin, end = spans[..., 0].T, spans[..., 1].T
    first = torch.tensor([[steps[0].begin_s for steps in by_rank]], dtype=torch.float64)
    since = torch.cat([first, end[:-1]])
    own, parts = [], []
    running = [_running(steps) for steps in by_rank]
    for rank, steps in enumerate(by_rank):
        waits = _Cumulative([meeting for of_step in alone[rank] for meeting in of_step])
        garbage = union(span for step in steps for span in step.gc)
        mine = begin[:, rank] - since[:, rank] - waits.within(since[:, rank], begin[:, rank])
        own.append(mine.clamp(min=0.0))
        known = [
            _Cumulative(_without(union(spans), garbage)).within(since[:, rank], begin[:, rank])
            for spans in _parts(steps, is_on_host=meetings_of is _on_host)
        ]
        known.append(_Cumulative(garbage).within(since[:, rank], begin[:, rank]))
        rest = own[-1] - torch.stack(known).sum(0)
        waited = torch.zeros_like(own[-1])
        if meetings_of is _on_host and _counts(traces[rank].about, running[rank]):
            waited = torch.tensor(_waited(steps, counts), dtype=torch.float64).minimum(own[-1])
        left = 1.0 - waited / own[-1].clamp(min=1e-12)
        parts.append(torch.stack([*(left * part for part in (*known, rest.clamp(min=0))), waited]))
    index = torch.tensor([i for i, k in enumerate(counts) for _ in range(k)])
    of_sums = [_are_sums(step, m) for step, m in zip(by_rank[0], common[0], strict=True)]
    return Times(
        own=torch.stack(own, 1),
        parts=torch.stack(parts, 2),
        takes=(end - begin).min(1).values.clamp(min=0.0),
        over=end - end.min(1, keepdim=True).values,
        step=index,
        is_sum=torch.tensor([is_sum for of_step in of_sums for is_sum in of_step]),
        items=torch.tensor([[s.items for s in steps] for steps in by_rank]).T.double(),
        numbers=torch.tensor(numbers),
        busy=torch.tensor([_busy(of_step) for of_step in zip(*by_rank, strict=True)]).double(),
        num_bytes=float(sum(num_bytes for *_, num_bytes in by_rank[0][-1].sum)),
        pieces=tuple(_pieces(of_step) for of_step in zip(*by_rank, strict=True)),
        abouts=tuple(trace.about for trace in traces),
        running=tuple(running),
    )


def _last_of(met: list[Spans], counts: list[int], is_left: bool = False) -> list[Spans]:
    """Returns so many last meetings of each step, or those that are left."""
    pairs = [(of_step, len(of_step) - k) for of_step, k in zip(met, counts, strict=True)]
    return [of_step[:at] if is_left else of_step[at:] for of_step, at in pairs]


def _on_host(step: Step) -> Spans:
    return sorted(step.exchange)


def _running(steps: Sequence[Step]) -> float | None:
    """Returns how many threads wanted to run, in the mean, besides the one that asked."""
    seen = [step.running for step in steps if step.running is not None]
    return sum(seen) / len(seen) if seen else None


def _counts(about: dict[str, Any], running: float | None) -> bool:
    """Returns whether what a rank has counted is waiting for processors, and not sleep."""
    if about.get("processors") != GUESSED:
        return True
    return running is not None and running >= about.get("cores", 1)


def _waited(steps: Sequence[Step], counts: Sequence[int]) -> list[float]:
    """Returns how long a rank waited for a processor before each of the common meetings."""
    waited: list[float] = []
    since_s = 0.0  # before meetings that not all ranks had
    for step, count in zip(steps, counts, strict=True):
        short = step.short or (0.0,) * len(step.exchange)
        in_order = [s for _, s in sorted(zip(step.exchange, short, strict=True))]
        place_of_first = len(in_order) - count
        for place, s in enumerate(in_order):
            since_s += s
            if place >= place_of_first:
                waited.append(since_s)
                since_s = 0.0
    return waited


def _on_device(step: Step) -> Spans:
    """A device waits in its last sum, and for buffers; the host's waits are not the job's."""
    sums = [(step.sum[-1][0], max(over for _, over, _ in step.sum))] if step.sum else []
    return sorted([*step.device.get("meet", ()), *sums])


def _are_sums(step: Step, meetings: Spans) -> list[bool]:
    """Returns whether each meeting is that of the sums; the last one, where none was seen."""
    over_s = [over for _, over, _ in (*step.sum, *step.gather)]
    if not over_s:
        return [place == len(meetings) - 1 for place in range(len(meetings))]
    return [any(begin - _NEAR_S <= s <= end + _NEAR_S for s in over_s) for begin, end in meetings]


def _parts(steps: Sequence[Step], *, is_on_host: bool) -> Iterable[Spans]:
    """Yields when a rank was at each of the first PARTS.

    A device waits for the loader while it is at nothing else: what its host reads while it computes
    costs nothing.
    """
    if is_on_host:
        for kind in _KINDS:
            yield [span for step in steps for span in getattr(step, kind)]
        return
    on_device = [
        [span for step in steps for span in step.device.get(kind, ())] for kind in _KINDS[1:]
    ]
    busy = union(span for spans in on_device for span in spans)
    yield _without(union(span for step in steps for span in step.load), busy)
    yield from on_device


def _busy(of_step: Sequence[Step]) -> float:
    """Returns how long the sums of one step took, one after the other, once all were ready."""
    total_s, free_s = 0.0, float("-inf")
    if len({len(step.sum) for step in of_step}) > 1:
        return 0.0
    for of_piece in zip(*(step.sum for step in of_step), strict=True):
        begin_s = max(free_s, *(ready for ready, _, _ in of_piece))
        free_s = max(begin_s, min(over for _, over, _ in of_piece))
        total_s += free_s - begin_s
    return total_s


def _pieces(of_step: Sequence[Step]) -> tuple[tuple[float, float], ...]:
    """Returns for how long each piece of one step waited for the last one, and its bytes."""
    if len({len(step.sum) for step in of_step}) > 1:
        return ()
    of_pieces = zip(*(step.sum for step in of_step), strict=True)
    ready_s = [max(s for s, _, _ in of_ranks) for of_ranks in of_pieces]
    last_s = max(ready_s, default=0.0)
    sizes = (float(num_bytes) for *_, num_bytes in of_step[0].sum)
    return tuple((last_s - s, size) for s, size in zip(ready_s, sizes, strict=True))


class _Cumulative:
    """Knows how much of the time up to a moment some spans cover."""

    def __init__(self, spans: Spans) -> None:
        spans = spans or [(0.0, 0.0)]
        bounds = torch.tensor(spans, dtype=torch.float64)
        self._begin, self._long = bounds[:, 0].contiguous(), bounds[:, 1] - bounds[:, 0]
        self._before = self._long.cumsum(0) - self._long

    def within(self, since: Tensor, until: Tensor) -> Tensor:
        """Returns how much of the times from `since` to `until` is covered."""
        return self._up_to(until) - self._up_to(since)

    def _up_to(self, moments: Tensor) -> Tensor:
        k = (torch.searchsorted(self._begin, moments.contiguous(), right=True) - 1).clamp(min=0)
        since = (moments - self._begin[k]).clamp(min=0.0)
        return self._before[k] + torch.minimum(since, self._long[k])


def _without(spans: Spans, cut: Spans) -> Spans:
    """Returns what is left of spans; both are in order."""
    left, at = [], 0
    for begin, end in spans:
        while at < len(cut) and cut[at][1] <= begin:
            at += 1
        for cut_begin, cut_end in cut[at:]:
            if cut_begin >= end:
                break
            if cut_begin > begin:
                left.append((begin, cut_begin))
            begin = max(begin, cut_end)
        if end > begin:
            left.append((begin, end))
    return left
