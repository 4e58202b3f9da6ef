"""DDP's mathematics without its waits: ranks share the micro-batches of a step as they have time.

    while a micro-batch u of step t is free: claim u;  G_r <- G_r + g(W_t, u)
    G <- (1/P) sum_r G_r;  W_{t+1} <- optimizer(W_t, G)

Legend: W the weights, the same on all ranks; u a unit, a micro-batch of DDP's ranks in that step;
g(W, u) its gradient, scaled as DDP would scale it; G_r the sum of the units that rank r has
computed; P ranks.

It is DDP's sum, in another order of additions.  So the weights after a step are DDP's but for
rounding, whoever was slow: DDP's learning rate, any optimizer, any schedule.  `data.units` says who
computes which unit, and why each enters the sum once.

A unit's gradient is made apart and then added to G_r, which autograd would do otherwise.  A lane
makes the sum once all units of the step are there.  It needs no training thread of any rank: what a
rank that stalls has finished is in its G_r, and the sums that it misses wait for it.

**No sum begins in a backward pass**, as one does with DDP.  A gradient of which a piece has left
this rank can no longer be dropped, so no other rank could compute that unit as well: the last unit
of a step would have no backup, and a rank that stalls in it would hold up all others.  To sum first
what has entered already would send |g| twice.

Where the others go on without a lost rank, the lane sums a copy of G_r, so that a step whose sum
breaks off loses what the lost rank had finished, and nothing else: see `data.units.losses`.

**Rounded sums.**  With a `wire_dtype` the lanes send sums rounded, and add what was rounded off to
their next sum (`primitives/quantised.py`).  At the end of training the optimizer applies what is
left.  What is rounded depends on which rank has computed which unit.

**In the order of the units.**  With `deterministic=True` each unit's gradient stays apart until the
step is closed, and then all are added in the order of the units (`primitives/in_order.py`).  So the
weights are equal to the bit, whoever was slow or lost, if a unit's gradient does not depend on the
rank that computes it.

Differs from DistributedDataParallel: which rank computes a micro-batch is not fixed, so what a rank
draws at random while it computes (dropout) is another draw; BatchNorm sees micro-batches.

Sends 2(P-1)/P |g| a step, with a `wire_dtype` fewer, with `deterministic=True` (k+1)(P-1)/P |g| for
k units a rank; a flag for each parameter; and five messages of a few bytes a unit.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from lightning_dsgd import agreement
from lightning_dsgd.algorithm import ORDINARY, Algorithm, Conditions, Profile, Traits
from lightning_dsgd.devices import Mark, port_of
from lightning_dsgd.hyperparameters import at_least, setting
from lightning_dsgd.primitives import quantised, rounding
from lightning_dsgd.primitives.in_order import sum_in_order
from lightning_dsgd.primitives.own_device import await_step
from lightning_dsgd.transport import PeerLost, Transport, TransportError

_WORDS: Final = torch.empty(0, dtype=torch.int64)
_ALL: Final = -1
"""Stands for the number of a unit in what several units are added up in."""


@dataclass
class Balanced(Algorithm):
    """Sums the gradients of all micro-batches of a step, which ranks share as they have time."""

    name: ClassVar[str] = "balanced"
    profile: ClassVar[Profile] = Profile(
        when="every step",
        with_whom="all ranks, none of which waits for a late one by more than a micro-batch",
        sends="2(P-1)/P |g|",
        memory="|g|; |g| more for each step that a rank is behind the others, up to 4; |g| more "
        "with a `wire_dtype`; |g| for each micro-batch of the step with `deterministic`",
    )
    micro_batches: int | None = at_least(
        1,
        default=None,
        doc="into how many micro-batches each batch of a loader is split; None: 4, or 1 where "
        "several batches are accumulated for a step",
    )
    backups: bool = setting(
        default=True,
        doc="whether an idle rank computes a late rank's micro-batch a second time",
    )

    wire_dtype: str = rounding.wire_dtype(of="gradient entry", least_bits=4)
    deterministic: bool = setting(
        default=False,
        doc="whether gradients are added in the order of the micro-batches, so that the weights "
        "are equal to the bit, whoever was slow; costs memory and traffic",
    )

    note = 0
    """What a face has summed with each unit that enters: see `notes`."""
    notes = 0
    """The sum of the notes of all units of the last step."""

    @property
    def traits(self) -> Traits:
        return Traits(
            uses_gradient=True,
            averages_weights=False,
            lockstep=True,
            counts_gradients=True,
            sums_units=True,
            holds_back=self.wire_dtype != "float32",
            follows_time=self.wire_dtype != "float32",
        )

    def check_hyperparameters(self) -> None:
        super().check_hyperparameters()
        if self.deterministic and self.traits.holds_back:
            raise ValueError(
                "what is rounded off depends on which rank has computed which micro-batch, got "
                f'deterministic=True with wire_dtype="{self.wire_dtype}"; leave one of both out'
            )

    def check(self, world_size: int, conditions: Conditions = ORDINARY) -> None:
        super().check(world_size, conditions)
        if self.traits.holds_back and conditions.skips_overflow:
            raise ValueError(
                "what is rounded off is kept from step to step, so gradients must have one scale, "
                f'got wire_dtype="{self.wire_dtype}" with a loss that is scaled for fp16; use '
                'precision="bf16-mixed", or leave wire_dtype out'
            )
        if self.traits.holds_back and conditions.goes_on:
            raise ValueError(
                "what a lost rank has rounded off would be lost with it, got "
                f'wire_dtype="{self.wire_dtype}" with on_loss="continue"; leave one of both out'
            )

    def start(self, net: Transport, x: Tensor, conditions: Conditions = ORDINARY) -> None:
        super().start(net, x, conditions)
        self._like, self._port = x, port_of(x.device)
        self._wire = self.wire_dtype if net.world_size > 1 else "float32"
        wide = torch.promote_types(x.dtype, torch.float32)
        # What was rounded off, or comes from a training with another number of ranks.
        self.kept = torch.zeros_like(x, dtype=wide) if self.traits.holds_back else None
        self._lock = threading.Lock()
        # By step, until it closes: G_r, or a gradient for each unit; and flags.
        self._sums: dict[int, tuple[dict[int, Tensor], Tensor]] = {}
        self._made: dict[int, tuple[Tensor, Tensor, Mark]] = {}  # by step: G and flags
        self._pool: list[tuple[Tensor, Mark]] = []
        self._views: dict[int, Sequence[Tensor]] = {}  # of each G_r, by where it lies
        self._taken: Tensor | None = None
        self._num_homes = conditions.num_homes or net.world_size
        self.made = self._last_made = -1
        self._flags: Tensor | None = None  # of the step made last
        self._half_made: tuple[int, Tensor, Mark] | None = None  # G of a step, before its flags
        self._serve_in(net)

    def _serve_in(self, net: Transport) -> None:
        self.net = net
        self._home = net.sub("home")  # where the lane answers the training thread
        self._lane = net.spawn_lane(self._serve, "summer")

    # ---- the training thread ----

    def add(
        self,
        step: int,
        unit: int,
        views_of: Callable[[Tensor], Sequence[Tensor]],
        gradients: Sequence[Tensor | None],
        scale: float = 1.0,
    ) -> None:
        """Adds a unit's gradients to G_r; one pass over them, as autograd would make it.

        Args:
            step: the step
            unit: its number in the step
            views_of: gives the parameters' places in a tensor that is laid out like x
            gradients: the unit's, by parameter
            scale: what they are multiplied by
        """
        g, flags, is_empty = self._place(step, unit if self.deterministic else _ALL)
        views = self._views.get(g.data_ptr())
        if views is None:
            views = self._views[g.data_ptr()] = views_of(g)
        there = [(v, mine) for v, mine in zip(views, gradients, strict=True) if mine is not None]
        absent = [v for v, mine in zip(views, gradients, strict=True) if mine is None]
        if is_empty and absent:
            torch._foreach_zero_(absent)
        if there:
            ours, mine = map(list, zip(*there, strict=True))
            if is_empty:
                torch._foreach_copy_(ours, mine)
                if scale != 1.0:
                    torch._foreach_mul_(ours, scale)
            else:
                torch._foreach_add_(ours, mine, alpha=scale)
        flags += torch.tensor([*(int(mine is not None) for mine in gradients), self.note])
        with contextlib.suppress(PeerLost):  # which the next wait of this rank meets
            await_step(self.net, g)  # before others are told that the unit is there

    def _place(self, step: int, number: int) -> tuple[Tensor, Tensor, bool]:
        """Returns where a unit is added, the step's flags, and whether nothing is there yet.

        The flags say how many units have a gradient, by parameter.
        """
        with self._lock:
            if step not in self._sums:
                self._give_back()  # its gradients have been stepped, and dropped
                for left in [before for before in self._sums if before < step]:
                    # of a step that all ranks have left in its midst
                    self._drop(self._sums.pop(left)[0])
                self._sums[step] = {}, self._no_flags()
            places, flags = self._sums[step]
            is_empty = number not in places
            if is_empty:
                places[number] = self._buffer()
            return places[number], flags, is_empty

    def take_sum(self, step: int) -> tuple[Tensor, Tensor]:
        """Waits for a step's mean G; it is this rank's until it adds to the next step."""
        with self._lock:
            self._give_back()
        self.await_sum(step)
        g, flags, made = self._made.pop(step)
        made.hold()
        self._port.keep(g)
        self._taken, self.notes = g, int(flags[-1])
        return g, flags[:-1]

    def await_sum(self, step: int) -> None:
        """Waits until a step's mean is there; this rank may take it then, or wait once more."""
        while self._last_made < step:
            [self._last_made] = self._home.recv(_WORDS, self.net.rank).wait().tolist()

    def before_update(self, x: Tensor, g: Tensor) -> None:
        if len(g):
            raise ValueError(
                "balanced sums the micro-batches of a step one by one, got the gradient of a whole "
                "step; train with the Trainer, Fabric or decentralized(...), or use allreduce here"
            )

    def _give_back(self) -> None:
        if self._taken is not None:
            self._pool.append((self._taken, self._port.mark()))
            self._taken = None

    def _drop(self, places: dict[int, Tensor]) -> None:
        """Gives memory back that this thread's stream has used last."""
        mark = self._port.mark()
        self._pool += [(g, mark) for g in places.values()]

    def _buffer(self) -> Tensor:
        """Returns memory for a sum, of any contents."""
        for place, (g, mark) in enumerate(self._pool):
            if mark.has_passed():  # no stream waits for another one's step
                del self._pool[place]
                return g
        like = self._like  # of which a step may be under way on another stream
        return torch.zeros(like.shape, dtype=like.dtype, device=like.device)

    def consensus(self, x: Tensor) -> Tensor:
        # All ranks hold the same.
        return self.net.broadcast(x.clone(), src=0).wait()

    def held_back(self) -> Tensor | None:
        if self.kept is None:
            return None
        mean = self.kept.clone()
        agreement.average(self.net, mean)
        mean *= self.net.world_size / self._num_homes
        return mean if mean.any() else None

    def state_dict(self) -> dict[str, Any]:
        if self.kept is None:
            return {}
        return {"kept": self.kept.clone(), "num_homes": self._num_homes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.kept is not None and "kept" in state:
            self.kept.copy_(state["kept"])

    def carry_over(self, state: dict[str, Any], num_ranks: int) -> None:
        if self.kept is not None and "kept" in state:
            # Before there were homes, a step had the batches of the ranks that saved.
            share = self._num_homes / state.get("num_homes", num_ranks)
            self.kept.add_(state["kept"].to(self.kept), alpha=share)

    def stop(self) -> None:
        self._lane.stop()

    # ---- the thread that hears that a step is closed ----

    def close_step(self, step: int) -> None:
        """Has the lane make the sum of a step, of which every unit has entered some rank's G_r."""
        self._lane.tell(torch.tensor([step]))

    # ---- where a rank is lost: the training thread, once the lane is stopped ----

    def holds(self, step: int) -> bool:
        """Returns whether this rank's G_r of a step is there, in whole."""
        return step in self._sums

    def flags_of(self, step: int) -> Tensor:
        """Returns the flags of the step made last; zeros where this rank has made another."""
        is_there = self.made == step and self._flags is not None
        return self._flags.clone() if is_there and self._flags is not None else self._no_flags()

    def make_whole(self, step: int, flags: Tensor) -> None:
        """Takes the flags of a step whose G this rank's lane has summed."""
        half = self._half_made
        assert half is not None and half[0] == step, "all lanes have summed what one has made"  # noqa: PT018
        self._keep(*half, flags)

    def go_on(self, net: Transport, num_homes: int, summed: int, kept: int) -> None:
        """Goes on among the ranks that are left.

        Args:
            net: their network, with channels of its own
            num_homes: P, which stays what it was
            summed: the last step that is summed
            kept: the step of which this rank's G_r is kept, if it is there
        """
        with contextlib.suppress(TransportError):  # with which it has failed
            self._lane.stop()
        self._num_homes, self._half_made = num_homes, None
        for step in [step for step in self._sums if step != kept]:
            self._drop(self._sums.pop(step)[0])
        for step in [step for step in self._made if step > summed]:
            self._pool.append((self._made.pop(step)[0], self._port.mark()))
        self.made = self._last_made = summed
        self._serve_in(net)

    # ---- the lane ----

    def _serve(self, net: Transport) -> None:
        while True:
            [step] = net.recv(_WORDS, net.rank).wait(math.inf).tolist()
            places, flags = self._finished(step)
            g = self._mean(net, places)
            self._half_made = step, g, self._port.mark()
            net.all_reduce(flags).wait()  # after g: so all lanes have summed g once one has these
            self._keep(*self._half_made, flags)
            self._home.send(torch.tensor([step]), net.rank)

    def _keep(self, step: int, g: Tensor, mark: Mark, flags: Tensor) -> None:
        """Keeps a step's G and flags until the training thread takes them."""
        with self._lock:
            if step in self._sums:
                self._drop(self._sums.pop(step)[0])
            self._made[step] = g, flags, mark
        self._flags, self.made = flags, step

    def _finished(self, step: int) -> tuple[dict[int, Tensor], Tensor]:
        """Returns what this rank has of a step; where others go on after a loss, it stays there."""
        with self._lock:
            if step not in self._sums:
                return {}, self._no_flags()
            if self.conditions.goes_on:
                places, flags = self._sums[step]
                return places, flags.clone()
            return self._sums.pop(step)

    def _mean(self, net: Transport, places: dict[int, Tensor]) -> Tensor:
        """Returns the mean over all ranks of what each has."""
        g = self._summand(places)
        if self.deterministic:
            sum_in_order(net, places, g)
            if not self.conditions.goes_on:
                with self._lock:
                    self._drop(places)
        elif self.kept is None:
            net.all_reduce(g).wait()
        else:
            quantised.average(net, g, self.kept, self._wire)
            if net.world_size != self._num_homes:
                g *= net.world_size / self._num_homes
            return g
        g /= self._num_homes
        return g

    def _summand(self, places: dict[int, Tensor]) -> Tensor:
        """Returns what this rank adds, in memory that the sum may overwrite."""
        mine = places.get(_ALL)
        if mine is not None and not self.conditions.goes_on:
            return mine
        with self._lock:
            g = self._buffer()
        return g.zero_() if mine is None else g.copy_(mine)  # a loss would tear it

    def _no_flags(self) -> Tensor:
        counts = self.conditions.gradient_counts
        return torch.zeros(1 if counts is None else len(counts) + 1, dtype=torch.int64)
