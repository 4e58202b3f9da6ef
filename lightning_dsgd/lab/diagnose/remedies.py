"""What each remedy would gain: how many times as fast the job would be, with an interval.

A remedy either takes a part away from a rank's own time, and DDP goes on as before:

    workers    loader workers: what was waited for the loader is read ahead
    ahead      loader workers do what a script does while it hands a batch over
    pinned     on devices, in its place: batches are copied from pinned memory; not where the
               trace says that they are already, as that of Lightning's Trainer can
    shared     each rank validates as much as the mean of all ranks
    freeze     Python collects no garbage while training goes on
    sorted     the batches of one step have the same length
    lighter    between batches each rank spends as little as the others, on callbacks and loggers
    mended     the late ranks are as fast as the others
    cores      each rank has a processor whenever it is ready to run

or a strategy takes DDP's place (not FSDP's), the one that `lab.decisions` has for the
situation:

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
a network carries quickly, are not worth being rounded.  Where processors are short, no strategy is
advised: what it sends would wait for them too.

`balanced` comes first where ranks are late, as it keeps DDP's loss.  What it cannot help gains
nothing in its model: its sum hides behind no backward pass, so a slow link stays slow; a unit costs
`UNIT_S` besides its computation, which is much of a step of a few ms; and a batch that cannot be
shared is one unit, so it is not offered.

The interval has 90% of what other stretches of the run give (blocks of steps are drawn again, 200
times), and 3% on both sides for what a model leaves out.  A strategy's lower end also allows for
communication that takes as long as DDP's meetings; where the link is known both ends allow for 7%
in place of that.  The lower end of `balanced` allows for parts of a batch that take longer than
their share of it, by a quarter.  The lower end of `ahead` has half of the copies left; `pinned` has
half of them left, three quarters at the lower end, and none at the upper one.  The upper end of
`int8` is for messages that cost nothing but their latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.algorithms.allreduce import AllReduce
from lightning_dsgd.data.units.balancing import USUAL_PARTS
from lightning_dsgd.lab import decisions
from lightning_dsgd.lab.decisions import Choice
from lightning_dsgd.lab.diagnose import sharing
from lightning_dsgd.lab.diagnose.elsewhere import LATENCY_S, link_of, some_ranks
from lightning_dsgd.lab.diagnose.times import PARTS, Times
from lightning_dsgd.lab.diagnose.verdict import Verdict, base
from lightning_dsgd.lab.epochs import CLAIMED, EQUAL
from lightning_dsgd.lab.simulate.machines import Machine, Recorded
from lightning_dsgd.primitives.quantised import LEAST_PIECE

MOST_PIECES: Final = AllReduce.num_buckets
WORTH: Final = 1.05
"""A remedy that makes the job this many times as fast is worth a change."""
_FETCH_S: Final = 5e-4
"""What a rank spends on a batch that a worker has ready."""
_STEP_S: Final = 1e-3
"""What a strategy takes of each rank's step: a lane answers in half a millisecond."""
_LEFT_OF_COPIES: Final = 0.5
"""The share of a copy that is left at the lower end of what is foretold; nobody has measured it."""
_MESSAGE_S: Final = 5e-4
"""What a message of a rounded sum takes of a core: with four ranks on two cores, whose sums have 6
messages each, such a sum took 6 ms."""
_ROUNDED_S: Final = 12e-9
"""What rounding takes of a core for each entry: once to a byte, and three times back."""
_BLOCK: Final = 10
_DRAWS: Final = 200
_MODEL: Final = 0.03
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
STRATEGIES: Final = {
    "balanced": "slow",
    "claimed": "slow",
    "wagma": "random",
    "int8": "network",
}
"""The remedies that take DDP's place, and the causes whose choice in `decisions` they are."""
_OF_CAUSE: Final = {
    "slow": ("balanced", "claimed"),
    "drift": ("balanced", "claimed"),
    "random": ("balanced", "wagma"),
    "bursts": ("balanced", "wagma"),
    "lengths": ("sorted", "balanced"),
    "loader": ("workers",),
    "copies": ("ahead", "pinned"),
    "validation": ("shared",),
    "callbacks": ("lighter", "balanced"),
    "processor": ("cores",),
    "gc": ("freeze", "balanced"),
    "link": ("int8",),
    "network": ("int8",),
}
"""The remedies of a cause, which come before others: the first that is worth it."""
_WHAT: Final = {
    "workers": "more loader workers",
    "ahead": "have loader workers do what hands a batch over to the device",
    "pinned": "copy batches from pinned memory, unless you do already, and let no host wait for it",
    "shared": "let all ranks validate equal shares",
    "freeze": "collect no garbage while training",
    "sorted": "put batches of like length into one step",
    "lighter": "do less between batches on the late ranks",
    "mended": "mend what makes these ranks slow, such as heat, other programs, or more work",
    "cores": "give each rank a core of its own",
}
"""What the remedies do that keep DDP, or FSDP."""
_ONLY_FOR_ITS_CAUSE: Final = ("mended", "cores")
"""Remedies that tell what would be gained, and need other machines."""


@dataclass(frozen=True)
class Remedy:
    """Tells what a remedy would gain.

    Args:
        name: its name, as at the head of this module
        what: what to do
        paste: the line to paste; empty where there is none
        gain: how many times as fast the job would be
        low: the lower end of the interval
        high: its upper end
        is_asked: whether it is a strategy of which the user has asked
    """

    name: str
    what: str
    paste: str
    gain: float
    low: float
    high: float
    is_asked: bool = False

    @property
    def is_strategy(self) -> bool:
        """Whether it is a strategy in DDP's place."""
        return self.name not in _WHAT


def chosen(name: str, num_ranks: int) -> Choice:
    """Returns the strategy that a remedy puts in DDP's place."""
    same_loss = name == decisions.BALANCED
    found = decisions.of_cause(STRATEGIES[name], num_ranks, same_loss=same_loss)
    assert found is not None
    return found


def spec_of(name: str, num_ranks: int, pieces: int = MOST_PIECES) -> str:
    """Returns the strategy that a remedy puts in DDP's place, with its settings."""
    spec = chosen(name, num_ranks).strategy
    if name != "int8" or pieces >= MOST_PIECES:
        return spec
    return spec.replace(":overlap=true", "") if pieces < 2 else f"{spec}:num_buckets={pieces}"


def paste_of(
    name: str, num_ranks: int, workers: int = 2, pieces: int = MOST_PIECES, units: int = 0
) -> str:
    """Returns the line to paste for a remedy; empty where there is none.

    Args:
        name: the remedy
        num_ranks: how many ranks there are
        workers: how many workers a loader needs
        pieces: in how many pieces a gradient is worth being sent
        units: into how many micro-batches a batch is split; 0: as the strategy has it
    """
    if name in STRATEGIES:
        spec, data = spec_of(name, num_ranks, pieces), chosen(name, num_ranks).data
        spec += f":micro_batches={units}" if units else ""
        return f"L.Trainer(strategy={decisions.code(spec, data)}, ...)"
    return {
        "workers": f"DataLoader(..., num_workers={workers}, persistent_workers=True)",
        "ahead": "DataLoader(..., collate_fn=..., num_workers=2)    # and collate_fn does it",
        "pinned": "DataLoader(..., pin_memory=True)",
        "shared": "val_dataloaders with a DistributedSampler; none with work for rank 0 alone",
        "freeze": "gc.collect(); gc.freeze(); gc.disable()    # before trainer.fit",
        "sorted": "DataLoader(..., batch_sampler=...)    # that draws batches of like length",
        "lighter": "L.Trainer(log_every_n_steps=500, ...)    # and callbacks that do less",
        "mended": "",
        "cores": "",
    }[name]


def what_of(name: str, num_ranks: int, pieces: int = MOST_PIECES) -> str:
    """Says what a remedy does."""
    if name == "int8" and pieces < 2:
        return "send one byte per entry, in one piece: the gradient is small"
    if name in STRATEGIES:
        why = chosen(name, num_ranks).why.rstrip(".")
        return why[0].lower() + why[1:]
    return _WHAT[name]


def remedies(times: Times, verdict: Verdict, asked: Sequence[str] = ()) -> list[Remedy]:
    """Returns all remedies that apply, the best first.

    Args:
        times: what was recorded, or is foretold
        verdict: what makes the job slow
        asked: strategies of which the user wants to know; they are advised to nobody
    """
    ddp = _of_ddp(times, times.own)
    found = [
        _replaced(times, ddp, "workers", _less("loader", times, at_most=_FETCH_S)),
        _replaced(times, ddp, "shared", _less("validation", times, share=True)),
        _replaced(times, ddp, "freeze", _less("gc", times)),
        _replaced(times, ddp, "lighter", _as_the_others("between", times)),
        replace(
            _replaced(times, ddp, "cores", _less("processor", times)),
            paste=_how_to_get_cores(times),
        ),
    ]
    if not times.is_on_device:
        found.append(_ahead(times, ddp))
    elif not times.pins_batches:
        found.append(_pinned(times, ddp))
    if _takes_strategies(times):
        found += _strategies(times, verdict, ddp, asked)
    if verdict.cause == "lengths":
        even = times.own.mean(1, keepdim=True).expand_as(times.own)
        found.append(_replaced(times, ddp, "sorted", even))
    if verdict.cause in ("slow", "drift", "bursts") and verdict.ranks:
        found.append(_replaced(times, ddp, "mended", _mended(times, verdict)))
    return sorted(found, key=lambda remedy: -remedy.gain)


def check_asked(times: Times, asked: Sequence[str]) -> None:
    """Raises where it cannot be told what the strategies would gain of which the user asks."""
    for spec in asked:
        algorithm = make_algorithm(dealt(spec).strategy)
        if algorithm.traits.sums_units:
            raise ValueError(
                f"--strategies must name strategies that are simulated, got {spec!r}, whose gain "
                "--json tells of every run whose batches can be shared; leave it out"
            )
        algorithm.check(times.num_ranks)
    if asked and not _takes_strategies(times):
        got = "one whose ranks wait for processors" if times.strategy == "ddp" else times.strategy
        raise ValueError(
            "--strategies needs a run of DDP whose ranks have processors of their own, got "
            f"{got}; leave --strategies out"
        )


def _takes_strategies(times: Times) -> bool:
    """Returns whether a strategy can take DDP's place; a rank of FSDP has no replica."""
    return times.strategy == "ddp" and not times.are_processors_short


def advised(found: list[Remedy], verdict: Verdict) -> Remedy | None:
    """Returns what to do first; None: stay with what is in use.

    The remedy of the cause itself comes first, if it is worth it: most of them keep DDP.  Then come
    all others, the best first.  Where none of them is worth it, as with late ranks of FSDP, it is
    to mend these ranks.
    """
    if verdict.cause == "none":
        return None
    worth = [
        remedy
        for remedy in found
        if remedy.gain >= WORTH and remedy.low > 1.0 and not remedy.is_asked
    ]
    by_name = {remedy.name: remedy for remedy in worth}
    labels = map(_name_of, _of_situation(verdict))
    names = (*_OF_CAUSE.get(verdict.cause, ()), *labels)
    own = [by_name[name] for name in names if name in by_name]
    others = [remedy for remedy in worth if remedy.name not in _ONLY_FOR_ITS_CAUSE]
    last = [remedy for remedy in worth if remedy.name == "mended"]
    return next(iter([*own, *others, *last]), None)


# ---- DDP with a part taken away ----


def _of_ddp(times: Times, own: Tensor) -> Tensor:
    """Returns what each step of DDP takes: [S]."""
    return times.by_step(own.max(1).values + times.takes)


def _less(part: str, times: Times, at_most: float = 0.0, share: bool = False) -> Tensor:
    spent = times.parts[PARTS.index(part)]
    left = spent.mean(1, keepdim=True).expand_as(spent) if share else spent.clamp(max=at_most)
    return times.own - spent + left


def _as_the_others(part: str, times: Times) -> Tensor:
    spent = times.parts[PARTS.index(part)]
    return times.own - (spent - base(spent)[:, None]).clamp(min=0.0)


def _mended(times: Times, verdict: Verdict) -> Tensor:
    own = times.own.clone()
    usual = base(times.own)[:, None]
    late = list(verdict.ranks)
    own[:, late] = torch.minimum(own[:, late], usual)
    return own


def _replaced(times: Times, ddp: Tensor, name: str, own: Tensor) -> Remedy:
    workers = 2
    if name == "workers":  # so many that a batch is read while the ranks compute
        loader = float(times.by_step(times.parts[PARTS.index("loader")]).mean(0).max())
        workers = max(2, 1 + int(loader / max(1e-6, float(_of_ddp(times, own).mean()))))
    return _drawn(name, times, ddp, _of_ddp(times, own), workers=workers)


def _ahead(times: Times, ddp: Tensor) -> Remedy:
    """Returns what copies that nobody waits for would gain; at the least half of each is left."""
    found = _replaced(times, ddp, "ahead", _less("copies", times))
    half = times.own - times.parts[PARTS.index("copies")] * _LEFT_OF_COPIES
    left = _replaced(times, ddp, "ahead", half)
    return replace(found, low=min(found.low, left.low))


def _pinned(times: Times, ddp: Tensor) -> Remedy:
    """Returns what copies from pinned memory would gain, which nobody has measured."""
    copies = times.parts[PARTS.index("copies")]
    found, least, most = (
        _replaced(times, ddp, "pinned", times.own - copies * share)
        for share in (_LEFT_OF_COPIES, 0.5 * _LEFT_OF_COPIES, 1.0)
    )
    return replace(found, low=min(found.low, least.low), high=max(found.high, most.high))


def _how_to_get_cores(times: Times) -> str:
    """Says what to change where processors are short."""
    about = times.about
    cores, threads = int(about.get("cores") or 0), int(about.get("threads") or 1)
    here = [each.get("host") for each in times.abouts].count(about.get("host"))
    if threads > 1 and here * threads > cores:
        fewer = max(1, cores // here)
        return (
            f"OMP_NUM_THREADS={fewer}    # in the ranks' environment: {here} ranks with {threads} "
            f"threads each share {cores} cores"
        )
    if here > cores > 0:
        return (
            f"more cores, fewer ranks on a machine, or nothing else there: {here} ranks share "
            f"{cores} cores"
        )
    return "stop what else runs on the ranks' machines, such as loader workers and other jobs"


def pieces_of(times: Times) -> int:
    """Returns in how many pieces the gradient is worth being sent during the backward pass."""
    return min(MOST_PIECES, max(1, int(times.num_bytes / 4) // LEAST_PIECE))


def _rounded(times: Times, ddp: Tensor) -> Remedy:
    """Returns what a byte for each entry would gain."""
    own, pieces = times.by_step(times.own.max(1).values), pieces_of(times)
    found = _drawn("int8", times, ddp, own + _int8(times), pieces=pieces)
    best = own + _int8(times, message_s=_latency_s(times), entry_s=0.0)
    high = float(ddp.mean() / best.mean()) * (1 + _MODEL)
    return replace(found, high=max(found.high, high))


def _int8(times: Times, message_s: float = _MESSAGE_S, entry_s: float = _ROUNDED_S) -> Tensor:
    """Returns what the meetings of each step would take with a byte for each entry.

    Args:
        times: the times with DDP
        message_s: what a message takes of a rank's time
        entry_s: what an entry takes of a rank's time
    """
    sums = times.by_step(times.takes * times.is_sum)
    others = times.by_step(times.takes * ~times.is_sum)
    busy = torch.maximum(times.busy, sums)
    num_messages = 2 * (times.num_ranks - 1)
    latency_s = num_messages * _latency_s(times)
    carried = torch.minimum(busy, latency_s + (busy - latency_s).clamp(min=0.0) / 4)
    costs_s = num_messages * (message_s - _latency_s(times)) * pieces_of(times)
    costs_s += entry_s * times.num_bytes / 4
    faster = carried + costs_s * times.ranks_per_core
    if pieces_of(times) == 1:
        return others + faster
    hidden = busy - sums
    # What is left hides behind the backward pass as far as it did, but for the last piece.
    return others + (faster - hidden).clamp(min=0.0).maximum(faster / 4)


def _latency_s(times: Times) -> float:
    return LATENCY_S if times.link is None else times.link.latency_s


# ---- strategies ----


def _strategies(times: Times, verdict: Verdict, ddp: Tensor, asked: Sequence[str]) -> list[Remedy]:
    """Returns what strategies in DDP's place would gain."""
    # Ranks validate together whatever the strategy.
    validation = times.by_step(times.parts[PARTS.index("validation")])
    own, together = times.by_step(times.own) - validation + _STEP_S, validation.max(1).values
    gains: dict[tuple[str, str], list[float]] = {}  # of what is simulated, which takes long

    def simulated(name: str, choice: Choice, *, is_asked: bool = False) -> Remedy:
        key = choice.strategy, choice.data
        if key not in gains:
            gains[key] = _gains(choice, times, ddp, own, float(together.mean()))
        found = _of_gains(name, choice, gains[key])
        return replace(_with_messages(found, times, ddp), is_asked=is_asked)

    known = {name: chosen(name, times.num_ranks) for name in ("claimed", "wagma")}
    more = [] if times.link is None else _of_situation(verdict, times.num_ranks)
    if times.num_ranks > _FEW_RANKS:  # each takes long to simulate
        more = more[:1]
    found = [
        _rounded(times, ddp),
        *(simulated(name, choice) for name, choice in known.items()),
        *(simulated(_name_of(each), each) for each in more if each not in known.values()),
        *(simulated(_name_of(each), each, is_asked=True) for each in map(dealt, asked)),
    ]
    if times.can_share:
        found.append(_balanced(times, ddp, is_of_home=verdict.cause == "lengths"))
    return found


def _name_of(choice: Choice) -> str:
    return choice.strategy + (f":data={CLAIMED}" if choice.data == CLAIMED else "")


def _balanced(times: Times, ddp: Tensor, *, is_of_home: bool) -> Remedy:
    """Plays stretches of the run with ranks that share their micro-batches."""
    ranks = some_ranks(times.by_step(times.own), _SHARING_RANKS)
    steps = min(max(_LEAST_SHARED, _SHARED // len(ranks)), times.num_steps)
    gains: dict[int, list[float]] = {}
    accumulates = times.num_units > 1
    for begin in _stretches(steps, times.num_steps):
        stretch = slice(begin, begin + steps)
        for num_units in (times.num_units,) if accumulates else _PARTS:
            work, besides_s = sharing.work_of(
                times, stretch, ranks, num_units=num_units, is_of_home=is_of_home
            )
            step_s = sharing.shared_s(work) / steps + besides_s
            gains.setdefault(num_units, []).append(float(ddp[stretch].mean()) / step_s)
    best = max(gains, key=lambda num_units: sum(gains[num_units]))
    longer = 1.0 if accumulates else _OF_A_PART
    return Remedy(
        "balanced",
        what_of("balanced", times.num_ranks),
        paste_of("balanced", times.num_ranks, units=best if best in _PARTS[1:] else 0),
        sum(gains[best]) / len(gains[best]),
        min(gains[best]) / longer * (1 - _MODEL),
        max(gains[best]) * (1 + _MODEL),
    )


def _stretches(steps: int, num_steps: int) -> list[int]:
    """Returns where stretches of so many steps begin: first, in the middle, last."""
    return sorted({0, (num_steps - steps) // 2, num_steps - steps})


def _of_situation(verdict: Verdict, num_ranks: int | None = None) -> list[Choice]:
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
    parameters = int(times.about.get("parameters") or times.num_bytes / 4) or 1
    gains = []
    for begin in begins:
        seconds = tuple(map(tuple, own[begin : begin + steps].T.tolist()))
        machine = Machine(
            latency_s=link.latency_s,
            bandwidth_bytes_s=link.bytes_s,
            compute_s=0.0,
            num_params=parameters,
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
        min(gains) * (1 - _MODEL),
        max(gains) * (1 + _MODEL),
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
    least = (1 - _MODEL) * step_s / (step_s / remedy.gain + meetings_s)
    return replace(remedy, low=min(remedy.low, least))


# ---- intervals ----


def _drawn(name: str, times: Times, ddp: Tensor, other: Tensor, **pasted: int) -> Remedy:
    """Compares two times of each step, and draws blocks of steps anew for the interval."""
    num_steps, source = len(ddp), torch.Generator().manual_seed(0)
    long = min(_BLOCK, num_steps)
    begins = torch.randint(num_steps, (_DRAWS, -(-num_steps // long), 1), generator=source)
    steps = ((begins + torch.arange(long)) % num_steps).flatten(1)[:, :num_steps]
    ratios = ddp[steps].mean(-1) / other[steps].mean(-1)
    low, high = ratios.quantile(torch.tensor([0.05, 0.95], dtype=torch.float64)).tolist()
    gain = float(ddp.mean() / other.mean())
    return Remedy(
        name,
        what_of(name, times.num_ranks, pasted.get("pieces", MOST_PIECES)),
        paste_of(name, times.num_ranks, **pasted),
        gain,
        low * (1 - _MODEL),
        high * (1 + _MODEL),
    )
