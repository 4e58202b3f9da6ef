"""A replica that begins anew where a rank is lost, comes or leaves (`on_loss="continue"`).

    x, before an algorithm may tear it    ->  Copies
    who gets what from whom               ->  Circle
    the consensus, and all begin again    ->  SurvivingReplica.change_view

Threads: the training thread alone, but where several parts settle: see `replica`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.devices import port_of
from lightning_dsgd.replica import alike
from lightning_dsgd.replica.flat import FlatParameters
from lightning_dsgd.replica.part import halves_of
from lightning_dsgd.replica.replica import Replica
from lightning_dsgd.transport import Transport, TransportError
from lightning_dsgd.transport.endpoint import Endpoint
from lightning_dsgd.transport.view import View


class Copies:
    """Keeps a copy of each x, made before an algorithm last got x.  Memory: |x|."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def keep(self, xs: Sequence[Tensor]) -> None:
        """Copies these tensors, whose values are whole."""
        if [x.data_ptr() for x in xs] != [x.data_ptr() for x, _ in self._pairs]:
            self._pairs = [(x, torch.empty_like(x)) for x in xs]
        for (_, kept), x in zip(self._pairs, xs, strict=True):
            kept.copy_(x)

    def put_back(self) -> None:
        """Puts the copies back into the tensors, whose values a loss may have torn."""
        for x, kept in self._pairs:
            x.copy_(kept)


class Circle:
    """Holds ranks that are to have the same values where a view begins.

    Attributes:
        net: the network of all of them
        old: the network of those that are not new, which take the mean; None on a new one
        giver: the first that is not new, which gives the new ones that mean; -1: none is new

    Args:
        net: the network of all of them
        new: those that are new; one at least is not
    """

    def __init__(self, net: Endpoint, new: Collection[int] = ()) -> None:
        self.net = net
        self.old: Transport | None = net
        self.giver = -1
        if new:
            old = [rank for rank in range(net.world_size) if rank not in new]
            self.giver = old[0]
            self.old = None if net.rank in new else View(net.sub("old"), old)

    def give(self, tensors: list[Tensor]) -> None:
        """Gives the new ranks these tensors, where some are new."""
        if self.giver >= 0:
            alike.give(self.net, tensors, self.giver)


class SurvivingReplica(Replica):
    """Keeps a copy of x, from which it can begin anew.

    Args:
        *args: see `Replica`
        is_newcomer: whether this rank comes to others that train; no algorithm begins before the
            first `change_view`, which gives this rank what the others have
        **options: see `Replica`
    """

    settles_whole: ClassVar[bool] = True
    goes_on: ClassVar[bool] = True

    def __init__(self, *args: Any, is_newcomer: bool = False, **options: Any) -> None:
        self._is_new = is_newcomer
        self._copies = Copies()
        super().__init__(*args, **options)

    def _check_alike(self) -> None:
        if not self._is_new:  # the others look at its `description`
            super()._check_alike()

    def description(self) -> str:
        """Returns a text that is equal for models with equal parameters, buffers and optimizers."""
        return alike.description(self.module, self._optimizers)

    def _start(self, weights: FlatParameters, optimizer: Optimizer) -> Algorithm:
        if self._is_new:  # until it knows with whom it begins
            return copy.copy(self._pattern)
        return super()._start(weights, optimizer)

    def stop(self) -> None:
        """Ends the threads beside the training; never waits for another rank."""
        if not self._is_new:
            super().stop()

    def _copy(self) -> None:
        self._copies.keep([part.x for part in self.parts])

    @torch.no_grad()
    def change_view(self, circle: Circle, everyone: Circle | None = None) -> None:
        """Begins anew among the ranks of a circle, from their consensus, after another was lost.

        This rank may be in the midst of a sum that has torn x, at a step boundary, showing the
        consensus, or done.  x is put back to the copy that was made before an algorithm last got
        x, with the optimizer's step in it if that was made.  What was under way between the ranks
        is lost; what a rank has held back is carried over (`Algorithm.carry_over`).  Then weights,
        buffers, and what no optimizer trains become the mean over the ranks, the same to the bit,
        and each algorithm starts again.  Once a rank has finished, all take its weights.

        Newcomers take no part in that, and get the mean.

        May be called again if it has raised `PeerLost`, with the circles of the view after that.

        Args:
            circle: all ranks of the view; with shards, those with the same shard
            everyone: all ranks of the view, where the circle has some of them; they share buffers
        """
        is_shown = self._stash is not None
        self.show_own()
        self.net, self._all_ranks = circle.net, None if everyone is None else everyone.net
        self._num_builds = 0  # a change that was begun in vain has made some on some ranks
        self.stop_lanes()
        for device in {part.x.device for part in self.parts}:
            port_of(device).finish()  # a message may be on its way up to an x
        is_new = self._is_new or circle.old is None  # which may have been given a mean before
        if not is_new:
            self._copies.put_back()
        weights, buffers = self._weights(), [*self.module.buffers()]
        if everyone is None:
            self._share_in(circle, weights + buffers)
        else:
            self._share_in(circle, weights)
            self._share_in(everyone, buffers)
        self._publish(self.parts)
        self._copy()
        self._is_new = False
        for part in self.parts:
            if self._sums_units:  # which goes on with what it has, in `share_sums`
                if is_new:
                    part.algorithm = self._start(part.weights, part.optimizer)
                    part.scaling = self._start_scaling(part.weights, part.algorithm)
                part.kept.begin(part.x)
                continue
            state = {} if is_new else part.algorithm.state_dict()
            scaled = part.scaling.state_dict()
            part.algorithm = self._start(part.weights, part.optimizer)
            part.scaling = self._start_scaling(part.weights, part.algorithm)
            if not is_new:
                part.algorithm.carry_over(state, (circle.old or circle.net).world_size)
                part.scaling.load_state_dict(scaled)
            part.kept.begin(part.x)
            if self._is_finished:
                part.algorithm.stop()
        if is_shown:
            self.show_as_shared()

    # ---- the sums of micro-batches, where the algorithm makes them ----

    @property
    def _sums_units(self) -> bool:
        """Whether all ranks have the same weights in the same step, so that nothing is averaged."""
        return self._pattern.traits.sums_units

    @property
    def _summing(self) -> list[Any]:
        """The algorithm of each part, which sums micro-batches."""
        return [part.algorithm for part in self.parts]

    @property
    def made(self) -> int:
        """The last step whose sum this rank has, or has had."""
        return int(min(algorithm.made for algorithm in self._summing))

    def holds(self, step: int) -> bool:
        """Returns whether this rank's sum of a step, of its own units, is there."""
        return all(algorithm.holds(step) for algorithm in self._summing)

    def share_sums(self, summed: int, has: Sequence[bool], num_homes: int, kept: int) -> None:
        """Gives all ranks the sums that any of them has, and goes on; after `change_view`.

        Args:
            summed: the last step that is summed
            has: which ranks have that sum
            num_homes: how many ranks' batches make a step
            kept: the step of which this rank keeps the sum of its own units
        """
        self._conditions = replace(self._conditions, num_homes=num_homes)
        for number, part in enumerate(self.parts):
            algorithm: Any = part.algorithm
            if not all(has):
                flags = self.net.broadcast(algorithm.flags_of(summed), src=has.index(True)).wait()
                if algorithm.made < summed:
                    algorithm.make_whole(summed, flags)
            algorithm.go_on(self.net.sub(f"sums-{number}"), num_homes, summed, kept)
            if self._is_finished:
                algorithm.stop()

    @torch.no_grad()
    def average(self) -> None:
        """Gives all ranks the mean, where they are settled; `change_view` comes next.

        Each rank holds a whole replica: others of one do not leave.
        """
        self._share(self.net, [*self._weights(), *self.module.buffers()])
        self._copy()

    def _share_in(self, circle: Circle, tensors: list[Tensor]) -> None:
        """Gives all ranks of a circle the mean of those that are not new."""
        if circle.old is not None:
            self._share(circle.old, tensors)
        circle.give(tensors)

    def _weights(self) -> list[Tensor]:
        return [part.x for part in self.parts] + self._untrained()

    def stop_lanes(self) -> None:
        """Ends the threads beside the training, which may have failed with a rank."""
        for part in [] if self._is_new else self.parts:
            with contextlib.suppress(TransportError):
                part.algorithm.stop()

    def _share(self, net: Transport, tensors: list[Tensor]) -> None:
        """Gives all ranks the mean, or a finished rank's weights, as others may have left."""
        flags = net.all_gather(torch.tensor([int(self._is_finished)])).wait()
        done = [rank for rank, flag in enumerate(flags) if flag]
        if done:
            alike.give(net, tensors, done[0])
            return
        if self._sums_units:
            alike.make_alike(net, tensors[len(self.parts) :])  # ranks may be in different steps
            return
        for live, mean in zip(tensors, alike.average(net, tensors), strict=True):
            live.copy_(mean)

    @torch.no_grad()
    def show_as_shared(self) -> None:
        """Does what `show_consensus` does, where all ranks hold the consensus already."""
        if self._stash is None:
            live = [part.x for part in self.parts]
            live += [half for half, _ in halves_of(self.parts, live)]
            live += [*self.module.buffers(), *self._untrained()]
            self._stash = [(tensor, tensor.clone()) for tensor in live]
            self.consensus_distance = 0.0

    def finish_as_shared(self) -> None:
        """Does what `finish` does, where all ranks hold the consensus already."""
        self._is_finished = True
        self.stop()
