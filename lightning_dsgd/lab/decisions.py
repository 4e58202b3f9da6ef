"""Which strategy for which situation: the one place that decides.

README and docs/choosing.md show these tables (docs/tables.py writes them), `why` names the
choices as remedies, and the strategies' "use it for" follows from them.  To decide otherwise,
change a line here.

A choice is for one of four cases:

    same loss  DDP's loss curve and learning rate stay: the optimizer makes DDP's steps
    first      try it first, with a learning rate of its own
    then       what to compare it with
    own rate   DDP's learning rate stays; it was as good as all-reduce with that
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from lightning_dsgd.algorithms import ALL_ALGORITHMS
from lightning_dsgd.algorithms.written import as_code, class_for
from lightning_dsgd.hyperparameters import parse
from lightning_dsgd.lab.epochs import CLAIMED, EQUAL

SAME_LOSS: Final = "same loss"
FIRST: Final = "first"
THEN: Final = "then"
OWN_RATE: Final = "own rate"
DDP, BALANCED = "ddp", "balanced"
NOT_COMPARED: Final = (DDP, BALANCED)
"""Lightning's own strategy, and the one whose loss is DDP's."""


@dataclass(frozen=True)
class Choice:
    """Says what to use, and why.

    Args:
        case: "same loss", "first", "then" or "own rate"
        strategy: the strategy with its settings, as on the command line
        why: the reason, in one sentence
        data: how an epoch's batches are dealt, "equal" or "claimed"
        source: the result that backs it, in docs/results/; empty where none is needed
        least_ranks: the number of ranks from which on its settings work
    """

    case: str
    strategy: str
    why: str
    data: str = EQUAL
    source: str = ""
    least_ranks: int = 2

    @property
    def label(self) -> str:
        """What it is called in results."""
        return self.strategy + ("" if self.data == EQUAL else f", {self.data}")

    @property
    def name(self) -> str:
        """The name of the strategy."""
        return parse(self.strategy)[0]


@dataclass(frozen=True)
class Situation:
    """Describes a situation, and what to use in it.

    Args:
        short: the situation in a few words
        text: how a reader recognises it
        choices: the first one to try comes first
        measured: its name in `benchmarks target`; empty where it was not measured there
        causes: those verdicts of `why` that are this situation
        page: where docs/ tells more of it
    """

    short: str
    text: str
    choices: tuple[Choice, ...]
    measured: str = ""
    causes: tuple[str, ...] = ()
    page: str = ""

    def choice(self, case: str, num_ranks: int | None = None) -> Choice | None:
        """Returns the choice for a case, if it has one that works with so many ranks."""
        fits = [c for c in self.choices if num_ranks is None or c.least_ranks <= num_ranks]
        return next((each for each in fits if each.case == case), None)

    @property
    def first(self) -> Choice:
        """What to try first."""
        found = self.choice(FIRST)
        assert found is not None
        return found

    def with_own_rates(self, num_ranks: int | None = None) -> tuple[Choice, ...]:
        """Returns what to try with learning rates of their own; the first one comes first."""
        return tuple(
            each
            for each in self.choices
            if each.case in (FIRST, THEN) and (num_ranks is None or each.least_ranks <= num_ranks)
        )

    def from_ddp(self, num_ranks: int) -> Choice:
        """Returns what to use in place of DDP as it is: its learning rate stays, if it can."""
        return self.choice(OWN_RATE, num_ranks) or self.first


_BALANCED: Final = Choice(
    SAME_LOSS, BALANCED, "The ranks share DDP's micro-batches as they have time."
)
_EPOCHS: Final = "choosing/target_epochs.json"
_SLOW_LINK: Final = "choosing/target_epochs_slow_link.json"
_WIDE: Final = Choice(
    OWN_RATE,
    "wagma:overlap=true:group_size=8",
    "Wider groups keep ranks together, so that DDP's learning rate fits.",
    CLAIMED,
    "wagma/wide_groups.json",
    least_ranks=8,
)
_SELDOM: Final = Choice(
    THEN,
    "local_sgd:sync_period=8",
    "It sends and waits a quarter as often, with about half of DDP's rate: with DDP's own it ended "
    "18 to 31 points lower.",
)
_LATE: Final = (
    _BALANCED,
    Choice(
        FIRST,
        "wagma:overlap=true",
        "Ranks wait for each other at the end of an epoch only.",
        CLAIMED,
        _EPOCHS,
    ),
    Choice(THEN, "popsgd", "The same, in pairs: it sends less.", CLAIMED, _EPOCHS),
    _WIDE,
)

SITUATIONS: Final = {
    "alike": Situation(
        "equally fast ranks, a fast network",
        "equally fast ranks, a fast network, few nodes",
        (Choice(FIRST, DDP, "There is nothing to wait for."),),
        causes=("none",),
    ),
    "adam": Situation(
        "Adam or AdamW",
        "the optimizer is Adam, AdamW or the like, and the final loss counts",
        (
            Choice(
                FIRST,
                BALANCED,
                "It makes DDP's steps. Where weights are averaged, Adam's shrink, and training "
                "ends with a higher loss, also with `scale_steps=True`.",
            ),
        ),
        page="coming_from_ddp.md#adam",
    ),
    "unknown": Situation(
        "you do not know which, or it changes, on CPUs",
        "you do not know, or it changes, on CPUs",
        (
            Choice(
                FIRST,
                BALANCED,
                "It makes DDP's steps, whoever is late. Where `why` finds a slow link, add "
                '`wire_dtype="int8"`.',
            ),
        ),
    ),
    "random": Situation(
        "ranks late at random",
        "ranks are late at random: data loading, garbage collection, other users, uneven batches",
        _LATE,
        measured="random",
        causes=("random", "bursts"),
    ),
    "heavy-tail": Situation(
        "step times with a heavy tail",
        "step times with a heavy tail: a few steps take many times as long",
        _LATE,
        measured="heavy-tail",
    ),
    "slow-rank": Situation(
        "a rank that is always slower",
        "some ranks are always slower",
        (
            _BALANCED,
            Choice(
                FIRST,
                "popsgd",
                "A slow rank makes as many batches as it can, and no step waits for it.",
                CLAIMED,
                _EPOCHS,
            ),
            Choice(THEN, "adpsgd", "The same, with less memory.", CLAIMED, _EPOCHS),
            _WIDE,
        ),
        measured="slow-rank",
        causes=("slow", "drift"),
        page="choosing.md#a-rank-that-is-always-slower",
    ),
    "slow-link": Situation(
        "a slow link",
        "the network is slow, the ranks are equally fast",
        (
            Choice(
                FIRST,
                "wagma:overlap=true:sync_period=10:wire_dtype=int8",
                "One byte per weight travels while the ranks compute.",
                source=_SLOW_LINK,
            ),
            Choice(
                THEN,
                "hpsgd:wire_dtype=int8",
                "The same, as often as the network allows.",
                source=_SLOW_LINK,
            ),
            Choice(
                OWN_RATE,
                "allreduce:wire_dtype=int8:overlap=true",
                "One byte per entry travels during the backward pass; training is as with DDP.",
                source=_SLOW_LINK,
            ),
        ),
        measured="slow-link",
        causes=("link", "network"),
        page="../benchmarks/pages/time_to_target.md#a-slow-link",
    ),
    "many": Situation(
        "many nodes",
        "many nodes; quality was measured with up to 16 ranks",
        (
            Choice(
                FIRST,
                "wagma:overlap=true",
                "A rank talks to a small group, however many ranks there are.",
                source="choosing/target_long_random_16.json",
            ),
            Choice(
                THEN,
                "popsgd",
                "A rank talks to one other.",
                source="choosing/target_long_random_16.json",
            ),
        ),
        measured="random-16",
    ),
    "sharded": Situation(
        "a model in shards",
        "the model does not fit on one device",
        (
            Choice(
                FIRST,
                "local_sgd",
                "Replicas in shards average in every second step, and DDP's learning rate stays.",
            ),
            Choice(THEN, "wagma", "Where replicas are late: they average in changing groups."),
            _SELDOM,
        ),
        page="sharded.md",
    ),
    "memory": Situation(
        "no memory left",
        "no memory left",
        (
            Choice(
                FIRST,
                "local_sgd",
                "It needs no copy of the weights, and DDP's learning rate stays: on digits it "
                "ended 0.1 to 0.6 points lower.",
            ),
            Choice(THEN, "wagma:grace_s=Infinity", "Nor does this need a copy."),
            _SELDOM,
        ),
    ),
    "same": Situation(
        "the same weights on all ranks after every step",
        "all ranks must hold the same weights after every step",
        (
            Choice(FIRST, "allreduce", "It averages all gradients."),
            Choice(THEN, "oktopk", "It sends the largest entries alone."),
        ),
    ),
}
"""All situations, by name."""

_BESIDES: Final = {
    "eager_sgd": "gradients to be averaged, not weights, where ranks are late",
    "sgp": "`num_peers` messages per step for any P",
    "diloco": "very slow networks and long training: language models in several data centers",
    "sparse_loco": "very slow networks, few ranks and long training with Adam",
    "noloco": "very slow networks with many ranks, some late at random",
    "dpsgd": "comparison; the first of the gossip strategies",
    "allreduce": "the synchronous baseline",
    "no_sync": "measurements; the upper bound on steps per second",
} | dict.fromkeys(
    ("topk_allgather", "topk_dsa", "gtopk", "gaussian_topk"), "comparison with `oktopk`"
)
"""What a strategy is for besides the situations in which it is a choice."""


def use_for(name: str) -> str:
    """Returns what a strategy is for; empty for one that nothing here chooses."""
    chosen = [
        situation.short
        for situation in SITUATIONS.values()
        if any(each.name == name and each.case != OWN_RATE for each in situation.choices)
    ]
    return "; ".join([*chosen, *([_BESIDES[name]] if name in _BESIDES else [])])


def situation_of(cause: str) -> Situation | None:
    """Returns the situation that a verdict of `why` stands for, if it is one."""
    return next((each for each in SITUATIONS.values() if cause in each.causes), None)


def of_cause(cause: str, num_ranks: int, *, same_loss: bool = False) -> Choice | None:
    """Returns what to use in place of DDP for a verdict of `why`, if it is a situation.

    Args:
        cause: the verdict's cause
        num_ranks: how many ranks there are
        same_loss: whether it must make DDP's steps
    """
    situation = situation_of(cause)
    if situation is None:
        return None
    same = situation.choice(SAME_LOSS, num_ranks)
    return same if same_loss else situation.from_ddp(num_ranks)


def measured_as(name: str) -> Situation:
    """Returns the situation that `benchmarks target` calls so."""
    return next(each for each in SITUATIONS.values() if each.measured == name)


# ---- as code ----


def options(strategy: str, data: str) -> tuple[str, dict[str, Any]]:
    """Returns the name and all options of a strategy."""
    name, given = parse(strategy)
    return name, given | ({"data": data} if data == CLAIMED else {})


def code(strategy: str, data: str = EQUAL) -> str:
    """Returns what `Trainer(strategy=...)` is given."""
    name, given = parse(strategy)
    if not given and data == EQUAL:
        return f'"{name}"'
    kind = ALL_ALGORITHMS[name]
    arguments = ", ".join(f"{key}={as_code(value)}" for key, value in given.items())
    algorithm = f"lightning_dsgd.{kind.__name__}({arguments})" if given else f'"{name}"'
    claimed = f', data="{CLAIMED}"' if data == CLAIMED else ""
    return f"lightning_dsgd.{class_for(kind)}({algorithm}{claimed})"
