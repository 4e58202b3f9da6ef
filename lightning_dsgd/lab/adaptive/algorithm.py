"""A strategy that chooses itself: it begins as all-reduce, and changes where that gains time.

No paper.  An algorithm of `algorithms` does the work; this one measures, decides and replaces it.

**Who measures.**  Each rank, in its training thread: what it computes in a step, without what it
waits for others, also in other parts of the model; and how long steps took.  Where all ranks look,
they sum a piece of the weights once, and time it.

**Who decides.**  Every rank, by the same function of the same numbers (`decision`): each tells all
others its last step times in one small collective.  So nobody has to be told what was decided.

**When all look, and change.**  Where all ranks are at one point anyway:

    they stand still      an epoch's end, a validation, a save: `settle` has come to its end
    within all-reduce     after step 10, and then every 8 steps or more, as looking may take 0.5%
                          of the time: where the sum of this very step had the gradients of all
                          ranks, each has made it, and comes to its end

**How they change.**  The old algorithm settles and leaves its consensus in x, on all ranks; the new
one starts from there, on channels of its own.  The optimizer keeps its state and its rate.

**Why nobody waits for ever.**  Ranks that stand still have all come to the end of `settle`.  Within
all-reduce a rank without a batch adds nothing to a sum, so a sum with the gradients of all ranks
says that all of them made this step.  Each knows the number, and looks, or does not.  A lost rank
ends each wait, as ever.

**A checkpoint** holds what is in force, its state, and all decisions.  It is saved where all stand
still, so never within a change.  A resume with another number of ranks, or without the ranks' own
replicas, begins anew.

**Claimed batches** are the user's choice.  With data="claimed" ranks claim from the start, those of
all-reduce as many as each other, as they step together; then ranks that need not wait claim as many
as they have time for.  With data="equal" no choice claims.

What `wire_dtype` has rounded off of gradients is dropped where all-reduce is left: less than one
step of its rounding.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from lightning_dsgd.algorithm import ORDINARY, Algorithm, Conditions, Profile, Traits
from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.algorithms.allreduce import AllReduce
from lightning_dsgd.hyperparameters import at_least, setting
from lightning_dsgd.lab.adaptive.decision import State, decide
from lightning_dsgd.lab.adaptive.prediction import Seen, home_of
from lightning_dsgd.primitives.quantised import LEAST_PIECE
from lightning_dsgd.transport import Transport

FIRST: Final = 10
"""After so many steps of all-reduce all ranks look for the first time."""
EVERY: Final = 8
"""After so many more, at least, they look again."""
WINDOW: Final = 16
"""At so many of their last steps they look then."""
MOST_STEPS: Final = 256
"""After so many more, at most."""
LOOK_SHARE: Final = 0.005
"""The share of the time that looking may take within all-reduce."""
LEAST: Final = 8
"""The least steps of each rank that a look is worth."""
MOST: Final = 32
"""As many of its last steps each rank tells."""
_PIECE: Final = 1 / 16
"""The share of the weights that is summed to time it."""
_LEAST_ELEMENTS: Final = 1 << 14
_log: Final = logging.getLogger("lightning_dsgd")


@dataclass
class Adaptive(Algorithm):
    """Begins as all-reduce, measures, and changes to what ends training sooner."""

    name: ClassVar[str] = "adaptive"
    profile: ClassVar[Profile] = Profile(
        when="as what it has chosen",
        with_whom="as what it has chosen",
        sends="as what it has chosen; some numbers every 8 steps",
        memory="|g|; 3 |x| with what averages weights",
        suits="whoever does not know which ranks will be late",
    )
    overlap: bool = setting(
        default=True,
        doc="whether pieces of the gradient may travel during the backward pass, where that is "
        "worth it; set False where gradients are accumulated over several batches",
    )
    epoch_steps: int | None = at_least(
        1,
        default=None,
        doc="the steps of each rank in an epoch, where the Trainer does not tell; None means as "
        "many as there were between two points where all ranks stood still",
    )

    # ---- what it is for whoever drives it: as what is in force, or as any may be ----

    @property
    def in_force(self) -> Algorithm | None:
        """The algorithm that does the work; None before the start."""
        return vars(self).get("inner")

    @property
    def traits(self) -> Traits:
        """What is in force has; before the start no rank may count on stepping together."""
        if self.in_force is None:
            return Traits(uses_gradient=True, counts_gradients=True, takes_pieces=self.overlap)
        now = self.in_force.traits
        return Traits(
            uses_gradient=now.uses_gradient,
            lockstep=now.lockstep,
            exchange_period=now.exchange_period,
            counts_gradients=True,
            takes_pieces=now.takes_pieces,
        )

    @property
    def team_size(self) -> int:
        return self.inner.team_size

    # ---- the beginning ----

    def check(self, world_size: int, conditions: Conditions = ORDINARY) -> None:
        super().check(world_size, conditions)
        if conditions.skips_overflow:
            raise ValueError(
                'strategy="adaptive" cannot skip steps, got a loss that is scaled for fp16; use '
                'precision="bf16-mixed"'
            )

    def start(self, net: Transport, x: Tensor, conditions: Conditions = ORDINARY) -> None:
        super().start(net, x, conditions)
        if x.device.type != "cpu":
            raise ValueError(
                'strategy="adaptive" measures steps on CPUs, where the training thread sees them, '
                f'got weights on {x.device}; use strategy="allreduce", and `lightning-dsgd advise`'
            )
        self.x = x
        self.is_small = len(x) < AllReduce.num_buckets * LEAST_PIECE
        self.state = State(home_of(overlaps=self.overlap, is_small=self.is_small))
        self.decisions: list[str] = []
        self.tell: Callable[[str], None] = _log.info
        self.figures = net.sub("figures")
        self.times = _Times(net)
        self.num_steps = self.num_changes = 0
        self.change_s = self.look_s = 0.0
        self.next_look = FIRST
        self.inner = self._begun()

    def expect_epochs(self, num_steps: int) -> None:
        """Takes this for the steps of an epoch, unless the user has said how many there are."""
        self.times.longest = num_steps

    def _begun(self) -> Algorithm:
        inner, conditions = make_algorithm(self.state.choice), self.conditions
        if not inner.traits.counts_gradients:
            conditions = replace(conditions, gradient_counts=None)
        inner.start(self.net.sub(f"choice-{self.num_changes}"), self.x, conditions)
        return inner

    # ---- steps ----

    def gradient_made(self, g: Tensor, begin: int) -> None:
        self.inner.gradient_made(g, begin)

    def before_update(self, x: Tensor, g: Tensor) -> None:
        self.times.computed()
        self.inner.before_update(x, g)
        self.times.exchanged()

    def after_update(self, x: Tensor) -> None:
        self.times.computed()
        self.inner.after_update(x)
        self.num_steps += 1
        self.times.ends_step()
        if self._are_all_here():
            self._look(x, WINDOW)
            self.times.exchanged()  # a look is nobody's own work

    def _are_all_here(self) -> bool:
        """Returns whether all ranks look after this step, within an epoch."""
        inner = self.inner
        if not isinstance(inner, AllReduce) or inner.num_active < self.net.world_size:
            return False
        return inner.step >= self.next_look

    def settle(self, x: Tensor) -> None:
        self.inner.settle(x)
        self.times.stand_still()
        self._look(x, WINDOW if self.traits.lockstep else MOST)

    # ---- looking, and changing ----

    def _look(self, x: Tensor, most: int) -> None:
        """Decides on all ranks, which are here, whether to go on otherwise, and does."""
        if self.net.world_size == 1:
            return
        begin_s = self.net.now()
        seen = self._seen(x, most)
        self.look_s = self.net.now() - begin_s
        if isinstance(self.inner, AllReduce) and (seen or self.inner.step >= self.next_look):
            gap = EVERY if seen is None else math.ceil(seen.look_s / (LOOK_SHARE * seen.home_s))
            self.next_look = self.inner.step + min(max(gap, EVERY), MOST_STEPS)
        if seen is None:
            return
        before, decision = self.state, decide(seen, self.state)
        self.state = decision.state
        has_changed = self.state.choice != before.choice
        if has_changed or not self.decisions:
            verb = "takes" if has_changed else "stays with"
            self._tell(f"step {self.num_steps}: {verb} {self.state.choice}: {decision.reason}")
        if has_changed:
            self._change(x)

    def _seen(self, x: Tensor, most: int) -> Seen | None:
        """Returns what all ranks have seen together; None where some have made too few steps."""
        times = self.times
        mine = torch.zeros(8 + MOST, dtype=torch.float64)
        last = list(times.own_s)[-most:]
        has_adam = self._has_adam()
        told = (times.num_new, len(last), self.epoch_steps or times.longest, self.change_s)
        made = times.elapsed_s, times.num_elapsed, float(has_adam), self.look_s
        mine[:8] = torch.tensor([*told, *made])
        if last:
            mine[-len(last) :] = torch.tensor(last, dtype=torch.float64)
        rows = torch.stack(self.figures.all_gather(mine).wait())
        num_new, num_known = (int(rows[:, place].min()) for place in (0, 1))
        if num_new < LEAST or num_known < LEAST:
            return None
        times.num_new = 0
        num_elapsed = float(rows[:, 5].mean())
        made_s = float(rows[:, 4].max()) / num_elapsed if rows[:, 5].min() >= LEAST else 0.0
        return Seen(
            tuple(map(tuple, rows[:, -num_known:].tolist())),
            self._sum_s(x),
            epoch_steps=int(rows[:, 2].max()),
            made_s=made_s,
            change_s=float(rows[:, 3].max()),
            look_s=float(rows[:, 7].max()),
            claims=self.conditions.claims_batches,
            averages=not rows[:, 6].any(),
            overlaps=self.overlap,
            is_small=self.is_small,
        )

    def _has_adam(self) -> bool:
        optimizer = self.conditions.optimizer
        return optimizer is not None and any("betas" in each for each in optimizer.param_groups)

    def _sum_s(self, x: Tensor) -> float:
        """Returns how long a sum of all weights takes, from that of a piece; all ranks are here."""
        size = min(len(x), max(_LEAST_ELEMENTS, int(_PIECE * len(x))))
        piece, begin_s = torch.zeros(size, dtype=x.dtype), self.net.now()
        self.figures.all_reduce(piece).wait()
        mine = torch.tensor([(self.net.now() - begin_s) * len(x) / size], dtype=torch.float64)
        return max(1e-9, float(min(self.figures.all_gather(mine).wait())))

    def _change(self, x: Tensor) -> None:
        begin_s = self.net.now()
        self.inner.settle(x)
        self.inner.finish(x)
        self.num_changes += 1
        self.inner = self._begun()
        self.next_look = FIRST
        self.change_s = self.net.now() - begin_s
        self.times.stand_still()
        self.times.forget()

    def _tell(self, text: str) -> None:
        self.decisions.append(text)
        watch: Any = self.net.counters.watch
        if hasattr(watch, "decided"):
            watch.decided(text)
        if self.net.job_rank == 0:
            self.tell(f"adaptive, {text}")

    # ---- as what is in force ----

    def consensus(self, x: Tensor) -> Tensor:
        return self.inner.consensus(x)

    def held_back(self) -> Tensor | None:
        return self.inner.held_back()

    def finish(self, x: Tensor) -> None:
        self.inner.finish(x)

    def stop(self) -> None:
        self.inner.stop()

    def measure_kept(self) -> None:
        self.inner.measure_kept()

    def metrics(self) -> dict[str, float]:
        return self.inner.metrics() | {"strategy_changes": float(len(self.decisions))}

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        return {
            "choice": self.state.choice,
            "doubts": self.state.doubts,
            "left": list(self.state.left),
            "decisions": list(self.decisions),
            "num_steps": self.num_steps,
            "inner": self.inner.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.decisions, self.num_steps = list(state["decisions"]), state["num_steps"]
        self.state = State(state["choice"], state["doubts"], tuple(state["left"]))
        self.inner.stop()
        self.num_changes += 1
        self.inner = self._begun()
        self.inner.load_state_dict(state["inner"])


ALGORITHM: Final = Adaptive


class _Times:
    """What a rank has measured of its own steps.

    Args:
        net: tells the time, and how long the training thread has waited for messages

    Attributes:
        own_s: what it computed in each of its last steps
        num_new: the steps that it has made since the last look
        elapsed_s: how long the last stretch between two standstills took
        num_elapsed: the steps in that stretch, without the first, of which a part was before it
        longest: the steps of the longest stretch
    """

    def __init__(self, net: Transport) -> None:
        self._net = net
        self.own_s: deque[float] = deque(maxlen=MOST)
        self.longest = 0
        self.forget()
        self._begin_s: float | None = None
        self._since: tuple[float, float] | None = None  # and how long it had waited until then
        self._own_s = 0.0
        self._num_steps = 0
        self._is_whole = False

    def forget(self) -> None:
        """Begins to count anew: what follows is with another choice."""
        self.num_new = self.num_elapsed = 0
        self.elapsed_s = 0.0

    def computed(self) -> None:
        """Notes that the algorithm has its turn: what was until then is the rank's own."""
        now, waited_s = self._now()
        if self._begin_s is None:
            self._begin_s = now
        if self._since is not None:
            self._own_s += now - self._since[0] - (waited_s - self._since[1])
        elif not self._num_steps:
            self._is_whole = False  # the step began before this stretch

    def exchanged(self) -> None:
        """Notes that the algorithm had its turn."""
        self._since = self._now()

    def _now(self) -> tuple[float, float]:
        return self._net.now(), self._net.counters.wait_s

    def ends_step(self) -> None:
        """Notes the end of a step."""
        if self._is_whole:
            self.own_s.append(self._own_s)
        self.num_new += 1
        self._num_steps += 1
        self._since, self._own_s, self._is_whole = self._now(), 0.0, True

    def stand_still(self) -> None:
        """Notes that all ranks stand still."""
        self.num_elapsed, self.elapsed_s = 0, 0.0
        if self._begin_s is not None:
            self.elapsed_s = self._net.now() - self._begin_s
            self.num_elapsed = self._num_steps - 1
            self.longest = max(self.longest, self._num_steps)
        self._begin_s = self._since = None
        self._own_s, self._num_steps, self._is_whole = 0.0, 0, False
