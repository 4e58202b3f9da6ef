"""What a strategy in DDP's place would gain: the one that `lab.decisions` has for the situation.

    balanced   late ranks: all ranks share the micro-batches of each step, whose sum is DDP's: its
               protocol is played with the recorded times (`diagnose.sharing`)
    claimed    a slow rank: each rank claims its next batch, and no step waits for another
    wagma      ranks late at random: both run message by message, with the recorded times, in the
               simulated world (`lab.simulate`)
    int8       a slow link: DDP's sums with a byte for each entry: what a sum takes is divided by
               four, but for its latency; what is hidden behind the backward pass stays hidden,
               unless the gradient is too small to be sent in pieces

On another cluster (`elsewhere`) the other strategies of the verdict's situation are simulated too,
those that need learning rates of their own (with many ranks the first one alone), and so are those
of which the user asks.  Of more than `MOST_SIMULATED` ranks so many are simulated, taken by their
speeds.

A strategy works on a processor for what it sends, in every step (`_STEP_S`); rounding costs for
each entry and each message (`_ROUNDED_S`, `_MESSAGE_S`), so that small gradients, and those that
a network carries quickly, are not worth being rounded.

On devices NCCL carries what is sent, so messages take no processor; rounding, as all else that a
strategy does to weights and gradients, is passes over the device's memory (`diagnose.passes`).  The
last rounded sum waits for its tickets (`_tickets_s`).  Left out: tickets in the simulated world,
where words between hosts also take as long as NCCL's messages.

What `balanced` cannot help gains nothing in its model: its sum hides behind no backward pass, so a
slow link stays slow; a unit costs `UNIT_S` besides its computation, which is much of a step of a
few ms; and a batch that cannot be shared is one unit, so it is not offered.

**Intervals.**  A strategy's lower end also allows for communication that takes as long as DDP's
meetings; where the link is known both ends allow for 7% in place of that.  The lower end of
`balanced` allows for parts of a batch that take longer than their share of it, by a quarter.  The
upper end of `int8` is for messages that cost nothing but their latency.  On devices upper ends are
for passes that hide behind the computation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from lightning_dsgd.data.units.balancing import USUAL_PARTS
from lightning_dsgd.lab import decisions
from lightning_dsgd.lab.decisions import Choice
from lightning_dsgd.lab.diagnose import passes, sharing
from lightning_dsgd.lab.diagnose.elsewhere import LATENCY_S, link_of, some_ranks
from lightning_dsgd.lab.diagnose.remedy import (
    MODEL,
    MOST_PIECES,
    STRATEGIES,
    Remedy,
    chosen,
    drawn,
    paste_of,
    what_of,
)
from lightning_dsgd.lab.diagnose.times import PARTS, Times
from lightning_dsgd.lab.diagnose.verdict import Verdict
from lightning_dsgd.lab.epochs import CLAIMED, EQUAL
from lightning_dsgd.lab.simulate.machines import Machine, Recorded
from lightning_dsgd.primitives.quantised import LEAST_PIECE

_STEP_S: Final = 1e-3
"""What a strategy takes of each rank's step: a lane answers in half a millisecond."""
_MESSAGE_S: Final = 5e-4
"""What a message of a rounded sum takes of a core: with four ranks on two cores, whose sums have 6
messages each, such a sum took 6 ms."""
_ROUNDED_S: Final = 12e-9
"""What rounding takes of a core for each entry: once to a byte, and three times back."""
_FORETOLD: Final = 0.07
"""Beside that, for strategies on another cluster: of 74 predictions with 4 and 8 ranks 66 were
within 10% (benchmarks/pages/simulate.md)."""
_SIMULATED_STEPS: Final = 100
_LEAST_SIMULATED: Final = 12
_SIMULATED: Final = 1600
"""How many steps of all ranks together are simulated in a stretch of the run."""
MOST_SIMULATED: Final = 64
"""The most ranks that are simulated."""
_FEW_RANKS: Final = 16
_SHARING_RANKS: Final = 8
_SHARED, _LEAST_SHARED = 160, 30
"""How many steps of all ranks together, and of each, a stretch with shared micro-batches has."""
_PARTS: Final = (USUAL_PARTS, 8)
"""Into how many parts a batch may be split: by default, and finer."""
_OF_A_PART: Final = 1.25
"""How much longer than its share of a batch a part of it may take: 0.8 to 1.4 times as long was
measured on a processor, and 1.8 for a batch of 128 in a network of three wide layers."""


def strategies(times: Times, verdict: Verdict, ddp: Tensor, asked: Sequence[str]) -> list[Remedy]:
    """Returns what strategies in DDP's place would gain."""
    # Ranks validate together whatever the strategy.
    validation = times.by_step(times.parts[PARTS.index("validation")])
    own, together = times.by_step(times.own) - validation + _STEP_S, validation.max(1).values
    gains: dict[tuple[str, str, bool], list[float]] = {}  # what is simulated takes long

    def foretold(name: str, choice: Choice, passes_s: Tensor | None) -> Remedy:
        key = choice.strategy, choice.data, passes_s is not None
        if key not in gains:
            longer = own if passes_s is None else own + passes_s
            gains[key] = _gains(choice, times, ddp, longer, float(together.mean()))
        return _with_messages(_of_gains(name, choice, gains[key]), times, ddp)

    def simulated(name: str, choice: Choice, *, is_asked: bool = False) -> Remedy:
        passes_s = passes.seconds(times, choice.strategy)
        takes_some = passes_s is not None and bool(passes_s.any())
        found = hidden = foretold(name, choice, None)
        if takes_some:
            found = foretold(name, choice, passes_s)
        high = max(found.high, hidden.high)
        return replace(found, high=high, passes_s=_longest(passes_s), is_asked=is_asked)

    known = {name: chosen(name, times.num_ranks) for name in ("claimed", "wagma")}
    more = [] if times.link is None else of_situation(verdict, times.num_ranks)
    if times.num_ranks > _FEW_RANKS:  # each takes long to simulate
        more = more[:1]
    found = [
        _rounded(times, ddp),
        *(simulated(name, choice) for name, choice in known.items()),
        *(simulated(name_of(each), each) for each in more if each not in known.values()),
        *(simulated(name_of(each), each, is_asked=True) for each in map(dealt, asked)),
    ]
    if times.can_share:
        found.append(_balanced(times, ddp, is_of_home=verdict.cause == "lengths"))
    return found


def name_of(choice: Choice) -> str:
    """Returns a strategy as a user names it, and how its batches are dealt."""
    return choice.strategy + (f":data={CLAIMED}" if choice.data == CLAIMED else "")


def _balanced(times: Times, ddp: Tensor, *, is_of_home: bool) -> Remedy:
    """Plays stretches of the run with ranks that share their micro-batches."""
    passes_s = {num_units: _passes_of_units(times, num_units) for num_units in _units(times)}
    ranks = some_ranks(times.by_step(times.own), _SHARING_RANKS)
    steps = min(max(_LEAST_SHARED, _SHARED // len(ranks)), times.num_steps)
    gains: dict[int, list[float]] = {}
    hidden: dict[int, list[float]] = {}
    """The gains where passes over memory cost nothing."""
    for begin in _stretches(steps, times.num_steps):
        stretch = slice(begin, begin + steps)
        for num_units, taken_s in passes_s.items():
            work, besides_s = sharing.work_of(
                times, stretch, ranks, num_units=num_units, is_of_home=is_of_home
            )
            ddp_s, step_s = float(ddp[stretch].mean()), sharing.shared_s(work) / steps + besides_s
            longer_s = step_s + (_longest(taken_s) or 0.0)
            gains.setdefault(num_units, []).append(ddp_s / longer_s)
            hidden.setdefault(num_units, []).append(ddp_s / step_s)
    best = max(gains, key=lambda num_units: sum(gains[num_units]))
    longer = 1.0 if times.num_units > 1 else _OF_A_PART
    return Remedy(
        "balanced",
        what_of("balanced", times.num_ranks),
        paste_of("balanced", times.num_ranks, units=best if best in _PARTS[1:] else 0),
        sum(gains[best]) / len(gains[best]),
        min(gains[best]) / longer * (1 - MODEL),
        max(hidden[best]) * (1 + MODEL),
        passes_s=_longest(passes_s[best]),
    )


def _units(times: Times) -> Sequence[int]:
    """Returns into how many micro-batches a rank's batches of a step may be split."""
    return (times.num_units,) if times.num_units > 1 else _PARTS


def _passes_of_units(times: Times, num_units: int) -> Tensor | None:
    """Returns what passes over gradients take: [P].

    Where batches are accumulated, DDP adds up their gradients too, in its recorded steps.
    """
    units = 1 if times.num_units > 1 else num_units
    return passes.seconds(times, f"{decisions.BALANCED}:micro_batches={units}")


def _stretches(steps: int, num_steps: int) -> list[int]:
    """Returns where stretches of so many steps begin: first, in the middle, last."""
    return sorted({0, (num_steps - steps) // 2, num_steps - steps})


def of_situation(verdict: Verdict, num_ranks: int | None = None) -> list[Choice]:
    """Returns the strategies of the verdict's situation that need learning rates of their own."""
    situation = decisions.situation_of(verdict.cause)
    choices = situation.with_own_rates(num_ranks) if situation else ()
    return [each for each in choices if each.strategy not in decisions.NOT_COMPARED]


def _gains(choice: Choice, times: Times, ddp: Tensor, own: Tensor, besides_s: float) -> list[float]:
    """Returns what a strategy gains in stretches of the run, as simulated.

    Args:
        choice: the strategy, and how its batches are dealt
        times: the times with DDP
        ddp: what each step of DDP takes
        own: what each rank computes in each step
        besides_s: what a step takes besides
    """
    from lightning_dsgd.lab.simulate.model import run  # loads all algorithms

    own = own[:, some_ranks(own, MOST_SIMULATED)]
    num_ranks, link = own.shape[1], link_of(times)
    steps = min(max(_LEAST_SIMULATED, _SIMULATED // num_ranks), _SIMULATED_STEPS, times.num_steps)
    begins = _stretches(steps, times.num_steps)
    if num_ranks > _FEW_RANKS:  # which take long
        begins = begins[len(begins) // 2 :][:1]
    gains = []
    for begin in begins:
        seconds = tuple(map(tuple, own[begin : begin + steps].T.tolist()))
        machine = Machine(
            latency_s=link.latency_s,
            bandwidth_bytes_s=link.bytes_s,
            compute_s=0.0,
            num_params=times.num_parameters,
            recorded=Recorded(seconds),
            costs=times.costs,
        )
        of_ddp = float(ddp[begin : begin + steps].mean())
        made = run(choice.strategy, num_ranks, machine, steps, epoch_steps=steps, data=choice.data)
        gains.append(of_ddp / (1 / made.slowest_steps_per_s + besides_s))
    return gains


def _of_gains(name: str, choice: Choice, gains: list[float]) -> Remedy:
    why = choice.why.rstrip(".")
    if name not in STRATEGIES:
        why += ", with a learning rate of its own"
    return Remedy(
        name,
        why[:1].lower() + why[1:],
        f"L.Trainer(strategy={decisions.code(choice.strategy, choice.data)}, ...)",
        sum(gains) / len(gains),
        min(gains) * (1 - MODEL),
        max(gains) * (1 + MODEL),
    )


def dealt(spec: str) -> Choice:
    """Returns a strategy that a user has named, and how its batches are dealt.

    Args:
        spec: such as `wagma:overlap=true`, or `popsgd:data=claimed`
    """
    before = f":data={CLAIMED}"
    data = CLAIMED if spec.endswith(before) else EQUAL
    return Choice(decisions.THEN, spec.removesuffix(before), "You have asked", data)


def _with_messages(remedy: Remedy, times: Times, ddp: Tensor) -> Remedy:
    """Allows for what a strategy's messages take, which the recorded run does not show.

    The lower end becomes what is left if the strategy waits as long as DDP's meetings take.  Where
    the link is known both ends move by `_FORETOLD` instead: with the 3% of every model that makes
    10%, within which what was simulated came of what was measured.
    """
    if times.link is not None:
        return replace(remedy, low=remedy.low * (1 - _FORETOLD), high=remedy.high * (1 + _FORETOLD))
    step_s = float(ddp.mean())
    meetings_s = float(times.takes.sum()) / times.num_steps
    least = (1 - MODEL) * step_s / (step_s / remedy.gain + meetings_s)
    return replace(remedy, low=min(remedy.low, least))


def _longest(passes_s: Tensor | None) -> float | None:
    """Returns what passes take of the step of the rank whose memory is slowest; None: unknown."""
    return None if passes_s is None else float(passes_s.max())


# ---- sums with a byte for each entry ----


def pieces_of(times: Times) -> int:
    """Returns in how many pieces the gradient is worth being sent during the backward pass."""
    return min(MOST_PIECES, max(1, int(times.num_bytes / 4) // LEAST_PIECE))


def _rounded(times: Times, ddp: Tensor) -> Remedy:
    """Returns what a byte for each entry would gain."""
    own, pieces = times.by_step(times.own.max(1).values), pieces_of(times)
    passes_s = passes.seconds(times, chosen("int8", times.num_ranks).strategy)
    costs_s = _tickets_s(times) if times.is_on_device else _cores_s(times)
    longer = own + (_longest(passes_s) or 0.0)
    found = drawn("int8", times, ddp, longer + _int8(times, costs_s), pieces=pieces)
    best = own + _int8(times, costs_s=0.0)
    high = float(ddp.mean() / best.mean()) * (1 + MODEL)
    return replace(found, high=max(found.high, high), passes_s=_longest(passes_s))


def _cores_s(times: Times) -> float:
    """Returns what a step's sums take of a rank's core: messages over TCP, and rounding."""
    num_messages = 2 * (times.num_ranks - 1) * pieces_of(times)
    messages_s = num_messages * (_MESSAGE_S - _latency_s(times))
    return (messages_s + _ROUNDED_S * times.num_bytes / 4) * times.ranks_per_core


def _tickets_s(times: Times) -> float:
    """Returns how long the last sum waits for NCCL, whose two collectives need a ticket each.

    A ticket is 2 log2 P messages between hosts (`transport.tickets`); earlier pieces hide theirs.
    """
    return 2 * 2 * math.ceil(math.log2(times.num_ranks)) * LATENCY_S


def _int8(times: Times, costs_s: float) -> Tensor:
    """Returns what the meetings of each step would take with a byte for each entry.

    Args:
        times: the times with DDP
        costs_s: what the sums take besides what the link does
    """
    sums = times.by_step(times.takes * times.is_sum)
    others = times.by_step(times.takes * ~times.is_sum)
    busy = torch.maximum(times.busy, sums)
    latency_s = 2 * (times.num_ranks - 1) * _latency_s(times)
    carried = torch.minimum(busy, latency_s + (busy - latency_s).clamp(min=0.0) / 4)
    faster = carried + costs_s
    if pieces_of(times) == 1:
        return others + faster
    hidden = busy - sums
    # What is left hides behind the backward pass as far as it did, but for the last piece.
    return others + (faster - hidden).clamp(min=0.0).maximum(faster / 4)


def _latency_s(times: Times) -> float:
    return LATENCY_S if times.link is None else times.link.latency_s
