"""One rank's copy of the model under an algorithm: what a strategy drives, whatever the trainer.

    weights, split by optimizer and dtype  ->  parts: a flat tensor x with an algorithm of its own
    float buffers (BatchNorm statistics)   ->  averaged over all ranks
    integer buffers                        ->  those of rank 0
    parameters that no optimizer trains    ->  averaged over all ranks, unless they are equal

Buffers are averaged at evaluation, in checkpoints and at the end; between those each rank has its
own. Averaging them more often would change nothing: running statistics are linear in what they saw,
so the mean of the ranks' comes out the same.  With `average_buffers=False`, rank 0's are evaluated
and saved.

Parameters that no optimizer trains are most often frozen, and equal on all ranks.  But a training
step may change them: the teacher of BYOL and DINO, the target network of DQN.  They are averaged
where buffers are, those that differ: each rank compares a checksum first.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_dsgd.algorithm import ORDINARY, Algorithm, Conditions
from lightning_dsgd.primitives.step_scaling import Unscaled, made_for
from lightning_dsgd.replica import early, flat
from lightning_dsgd.replica.alike import (
    average,
    averaged,
    check_alike,
    check_disjoint,
    differing,
    distance,
    exchanged,
    give,
    make_alike,
    num_bytes,
)
from lightning_dsgd.replica.held_back import apply_held_back, unclipped
from lightning_dsgd.replica.part import Part, Saved, halves_of, mean_figures, settle_together
from lightning_dsgd.replica.wide import widened
from lightning_dsgd.transport import Transport
from lightning_dsgd.transport.counters import exchanging

_MESSAGE_PER_REPLICA: Final = 8
"""A message has fewer times the replica's bytes: bfloat16 sent as fp32 with indices has six."""


class Replica:
    """This rank's model, kept in step with the others by one algorithm per part.

    Attributes:
        consensus_distance: how far the ranks were apart when the consensus was last shown:
            sqrt(mean over ranks of |x_i - x|^2) / |x|, with x the consensus

    Args:
        net: the network, with channels of its own
        module: the whole model
        optimizers: all that step it
        algorithm: a pattern, copied for each part
        conditions: what every part's algorithm is told
        average_buffers: whether float buffers are averaged with the weights
        check_finite: whether NaN and inf are looked for before they are sent
        layout: how the replica is laid out over ranks; by default this rank holds all of it
        everyone: a network of all ranks, where `net` is of those alone that hold the same shard
    """

    settles_whole: ClassVar[bool] = False  # even where one part of several fails
    goes_on: ClassVar[bool] = False  # where another rank is lost

    def __init__(
        self,
        net: Transport,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        algorithm: Algorithm,
        conditions: Conditions = ORDINARY,
        *,
        average_buffers: bool = True,
        check_finite: bool = False,
        layout: flat.Whole | None = None,
        everyone: Transport | None = None,
    ) -> None:
        self.net = net
        self._layout = flat.Whole() if layout is None else layout
        self._all_ranks = everyone
        self.module = module
        self._pattern, self._scales_steps = algorithm, algorithm.traits.scales_steps
        self._conditions = conditions
        self._average_buffers = average_buffers
        self._check_finite = check_finite
        self._num_builds = 0
        self._num_steps = 0
        self._is_finished = False
        self._has_sums = False  # of the step that comes
        self._stash: list[tuple[Tensor, Tensor]] | None = None
        self.consensus_distance = 0.0
        self._parts: dict[int, list[Part]] = {}
        self._trained: dict[int, list[int]] = {}  # identities of an optimizer's parameters
        self._to_load = Saved()
        self._optimizers = list(optimizers)
        net.expect_at_most(_MESSAGE_PER_REPLICA * num_bytes(module, optimizers))
        flat.check_module(module)
        check_disjoint(module, optimizers)
        self.check_pieces(algorithm)
        self._check_alike()
        self._fragments: dict[str, int] = {}
        for optimizer in optimizers:
            self._build(optimizer)

    # ---- making the parts ----

    @property
    def _holds_all(self) -> bool:
        """Whether this rank holds all weights, and not a shard of them."""
        return type(self._layout) is flat.Whole

    def check_pieces(self, algorithm: Algorithm) -> None:
        """Raises `ValueError` for one that takes pieces of gradients which this replica has not."""
        early.check(algorithm, self._layout, check_finite=self._check_finite)

    def _build(self, optimizer: Optimizer) -> None:
        mine = flat.trainable(optimizer)
        # In the module's order: the optimizer's may differ between ranks, if it comes from a set.
        names = {p: name for name, p in self.module.named_parameters() if p in set(mine)}
        for index, parameter in enumerate(mine):
            names.setdefault(parameter, f"optimizer parameter {index}")
        if num := self._pattern.traits.num_layer_fragments:  # each of which lies in one piece
            self._fragments |= flat.fragments_of([*names.values()], num)
            names = dict(sorted(names.items(), key=lambda item: self._fragments[item[1]]))
        flats = self._layout.flatten((name, p) for p, name in names.items())
        is_alone = len(self._optimizers) == len(flats) == 1
        self._conditions = replace(self._conditions, is_whole=is_alone and self._holds_all)
        self._parts[id(optimizer)] = [
            self._part(weights, optimizer) for weights in widened(flats, self._pattern)
        ]
        self._trained[id(optimizer)] = list(map(id, mine))

    def _part(self, weights: flat.FlatParameters, optimizer: Optimizer) -> Part:
        algorithm = self._start(weights, optimizer)
        scaling = self._start_scaling(weights, algorithm)
        takes_pieces = self._pattern.traits.takes_pieces
        return Part(weights, algorithm, scaling, optimizer, takes_pieces=takes_pieces)

    def _start(self, weights: flat.FlatParameters, optimizer: Optimizer) -> Algorithm:
        self._num_builds += 1
        algorithm = copy.copy(self._pattern)
        counts = weights.num_gradients() if algorithm.traits.counts_gradients else None
        numbers = [self._fragments[name] for name in weights.names if self._fragments]
        first = [bisect_left(numbers, f) for f in range(algorithm.traits.num_layer_fragments)]
        ends = [weights.begin_of(i) if i < len(numbers) else len(weights.x) for i in first]
        bounds = (*ends, len(weights.x)) if ends else ()
        conditions = replace(
            self._conditions,
            gradient_counts=counts,
            optimizer=optimizer,
            parameters_in=weights.parameters_in if self._holds_all else None,
            fragments=bounds,
            goes_on=self.goes_on,
            look=weights.open,
        )
        algorithm.start(self.net.sub(f"part-{self._num_builds}"), weights.x, conditions)
        return algorithm

    def _start_scaling(self, weights: flat.FlatParameters, algorithm: Algorithm) -> Unscaled:
        """Starts the scaling of the part whose algorithm was started last."""
        return made_for(algorithm, self.net.sub(f"steps-{self._num_builds}"), weights.x)

    def _parts_of(self, optimizer: Optimizer) -> list[Part]:
        """Returns an optimizer's parts; makes them anew when it trains other parameters.

        All ranks then begin with the consensus, as parameters that are frozen from now on must be
        equal.  A resume under way has restored each rank's own, and these stay.
        """
        if list(map(id, flat.trainable(optimizer))) != self._trained[id(optimizer)]:
            is_resuming = self._to_load.waits
            for part in [] if is_resuming else self.parts:
                part.weights.open()
            self._copy()
            settle_together(self.parts, wait=self.settles_whole)
            for part in self._parts[id(optimizer)]:
                if is_resuming:
                    part.stop()
                else:
                    part.finish()
            if not is_resuming:  # an optimizer may train now what a step has changed
                self._publish(self.parts)
                make_alike(self.net, self._untrained())
            self._build(optimizer)
        parts = self._parts[id(optimizer)]
        for part in parts:
            if not part.weights.is_intact():
                part.weights.refresh()
        return parts

    def _publish(self, parts: Sequence[Part]) -> None:
        """Has the module compute with x as it is now."""
        for part in parts:
            part.weights.publish()
        self._layout.reshard()

    def _close(self, parts: Sequence[Part]) -> None:
        """Has the module compute with x where an algorithm has looked at it."""
        for part in parts:
            part.weights.close()
        self._layout.reshard()

    @property
    def _everyone(self) -> Transport:
        """The network of all ranks: each has seen data of its own, whatever shard it holds."""
        return self.net if self._all_ranks is None else self._all_ranks

    @property
    def parts(self) -> list[Part]:
        """All parts, in the order of the optimizers."""
        return [part for optimizer in self._optimizers for part in self._parts[id(optimizer)]]

    def _check_alike(self) -> None:
        check_alike(self.net, self.module, self._optimizers)

    def _copy(self) -> None:
        """Copies x as it is, where training goes on after a loss: see `SurvivingReplica`."""

    @torch.no_grad()
    def synchronize(self) -> None:
        """Gives every rank the weights and buffers of rank 0, as a fresh start needs."""
        for part in self.parts:
            part.weights.open()
            self.net.broadcast(part.x, src=0).wait()
        give(self.net, self._untrained(), 0)
        give(self._everyone, self.module.buffers(), 0)
        self._publish(self.parts)
        self.settle()  # so that every algorithm begins from there
        for part in self.parts:
            part.kept.begin(part.x)

    def _untrained(self) -> list[Tensor]:
        """Returns the parameters that no optimizer trains, without their gradients' history."""
        self._layout.reshard()
        inside = {p for part in self.parts for p in part.weights.parameters}
        others = [p for p in self.module.parameters() if p not in inside]
        known = [p for p in others if not (is_lazy(p) or p.is_meta or p.is_sparse)]
        return [*map(self._layout.local, known)]

    # ---- a step ----

    @torch.no_grad()
    def before_update(self, optimizer: Optimizer) -> None:
        """Gathers the gradients where the algorithm wants them, and calls the algorithm."""
        if self._to_load.waits:
            self.follow()
            for part in self.parts:
                part.weights.open()
            self._to_load.give(self.parts)
            self._close(self.parts)
        watch = self.net.counters.watch
        with nullcontext() if watch is None else exchanging(watch, self.net.now):
            parts = self._parts_of(optimizer)
            for part in parts:
                if self._must_look(part):
                    part.weights.open()
            self._copy()
            for part in parts:
                self._before_update(part)
                part.kept.update_begins(part.weights.thinned(part.kept.every))
                if self._scales_steps:
                    part.scaling.update_begins(part.x, part.decays())
            self._close(parts)
        self._num_steps += 1  # not before: it may be made again after a loss

    def _must_look(self, part: Part) -> bool:
        """Returns whether x must be up to date before an update, whatever the algorithm does.

        A class of another package may look at x where the one of ours that it extends does not.
        """
        algorithm = part.algorithm
        is_ours = type(algorithm).__module__.partition(".")[0] == __name__.partition(".")[0]
        looks_itself = is_ours and algorithm.traits.looks_itself
        return not looks_itself or self._scales_steps or self.goes_on

    def _before_update(self, part: Part) -> None:
        traits = part.algorithm.traits
        if traits.sums_units and not self._has_sums:
            raise RuntimeError(
                f"{part.algorithm.name} makes a step with the sum of its micro-batches, got a step "
                "without one; loop over `for batches in ...steps(loader)`, compute all `batches` "
                "of a step, and then call optimizer.step() once"
            )
        if traits.sums_units or not traits.uses_gradient:
            part.algorithm.before_update(part.x, part.x[:0])
            return
        g, counts = part.gather(), part.algorithm.conditions.gradient_counts
        if counts is not None:
            counts.copy_(part.weights.num_gradients())
        if self._check_finite and not self._conditions.skips_overflow:
            part.require_finite(g, "gradient", self.net.job_rank, self._num_steps + 1)
        part.algorithm.before_update(part.x, g)
        part.weights.scatter(counts)

    @torch.no_grad()
    def after_update(self, optimizer: Optimizer) -> None:
        """Calls the algorithm with the weights that the optimizer has made."""
        watch = self.net.counters.watch
        with nullcontext() if watch is None else exchanging(watch, self.net.now):
            parts = self._parts_of(optimizer)
            for part in parts:
                part.weights.open()
            self._copy()
            if self._scales_steps:
                for part in parts:
                    part.scaling.update_ends(part.x)
                self._copy()
            for part in parts:
                if self._check_finite:
                    part.require_finite(part.x, "weight", self.net.job_rank, self._num_steps)
                part.kept.update_ends(part.weights.thinned(part.kept.every))
                part.algorithm.after_update(part.x)
            self._has_sums = False
            self._close(parts)

    @torch.no_grad()
    def follow(self) -> None:
        """Begins anew with the others, without a step, where they train other parameters."""
        for optimizer in self._optimizers:
            self._parts_of(optimizer)

    # ---- the micro-batches of a step, where the algorithm sums them ----

    @torch.no_grad()
    def add_unit(self, step: int, unit: int, scale: float = 1.0) -> None:
        """Adds the gradients in hand, of one micro-batch, to this rank's sum of a step."""
        self._check_trains_the_same()
        for part in self.parts:
            part.add_unit(step, unit, scale)
        self.drop_gradients()

    def _check_trains_the_same(self) -> None:
        for optimizer in self._optimizers:
            if list(map(id, flat.trainable(optimizer))) != self._trained[id(optimizer)]:
                raise ValueError(
                    "parameters must be frozen and unfrozen before the first micro-batch of a "
                    f"step, got other ones in its midst with strategy={self._pattern.name!r}; "
                    "change requires_grad where an epoch begins, or before the first batch of a "
                    "step"
                )

    def drop_gradients(self) -> None:
        """Drops the gradients in hand."""
        for part in self.parts:
            for parameter in part.weights.parameters:
                parameter.grad = None

    def close_step(self, step: int) -> None:
        """Has lanes sum a step over all ranks, all of whose micro-batches have been added."""
        for part in self.parts:
            part.algorithm.close_step(step)

    def take_sums(self, step: int) -> None:
        """Puts a step's means into the gradients, once they are there."""
        for part in self.parts:
            part.algorithm.await_sum(step)
        self._has_sums = True
        for part in self.parts:
            g = part.take_sum(step)
            if self._check_finite and not self._conditions.skips_overflow:
                part.require_finite(g, "gradient", self.net.job_rank, self._num_steps + 1)

    # ---- standing still ----

    @torch.no_grad()
    def settle(self) -> None:
        """Serves the others until every rank has come here.

        A rank that has made no step since the last time settles too, as others may have made some.
        While the consensus is shown, no rank makes a step.
        """
        if self._stash is None and not self._is_finished:
            for part in self.parts:
                part.weights.open()
            self._copy()
            settle_together(self.parts, wait=self.settles_whole)
            self._publish(self.parts)
            self._copy()

    @torch.no_grad()
    def finish(self, clip: Callable[[Optimizer], None] = unclipped) -> None:
        """Leaves the consensus in the module, on every rank; `clip` clips what was held back."""
        self.settle()
        for optimizer in self._optimizers:
            apply_held_back(optimizer, self._parts[id(optimizer)], clip)
        for part in self.parts:
            part.finish()
        self._is_finished = True
        for live, mean in self._consensus_of_the_rest():
            live.copy_(mean)
        self._publish(self.parts)
        self._copy()

    @torch.no_grad()
    def end_alike(self) -> None:
        """Makes the module the same on all ranks, whatever has changed it there since `finish`.

        What differs between ranks becomes its mean.
        """
        for part in self.parts:
            if not part.weights.is_intact():
                part.weights.refresh()
            part.weights.open()
        make_alike(self.net, [part.x for part in self.parts] + self._untrained())
        buffers = differing(self._everyone, list(self.module.buffers()))
        means = average(self._everyone, buffers, floats=self._average_buffers)
        for live, mean in zip(buffers, means, strict=True):
            live.copy_(mean)
        self._publish(self.parts)

    def stop(self) -> None:
        """Ends the threads beside the training; never waits for another rank."""
        for part in self.parts:
            part.stop()

    @torch.no_grad()
    def show_consensus(self) -> None:
        """Puts the consensus into the module, and this rank's own weights aside.

        Memory: |x| for the weights put aside, and |x| more while the consensus is made.
        """
        table = self._consensus()
        stash = [(live, live.clone()) for live, _ in table]
        self.consensus_distance = distance(self._everyone, stash, table[: len(self.parts)])
        self._stash = stash  # from here on no rank may be lost halfway
        for live, shared in table:
            live.copy_(shared)
        self._publish(self.parts)

    @torch.no_grad()
    def show_own(self) -> None:
        """Takes back what `show_consensus` put aside, to the bit."""
        if self._stash is None:
            return
        for live, own in self._stash:
            live.copy_(own)
        self._stash = None
        self._publish(self.parts)

    @contextmanager
    def as_own(self) -> Iterator[None]:
        """Has the module hold this rank's own weights inside, also while the consensus is shown.

        Memory: |x| more where it is shown.
        """
        stash = self._stash
        if stash is None:
            yield
            return
        shown = [(live, live.clone()) for live, _ in stash]
        self.show_own()
        try:
            yield
        finally:
            self._stash = stash
            with torch.no_grad():
                for live, shared in shown:
                    live.copy_(shared)
                self._publish(self.parts)

    @property
    def shows_consensus(self) -> bool:
        """Whether the module holds the consensus now."""
        return self._stash is not None

    @torch.no_grad()
    def own(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Returns a checkpoint with this rank's own values, also while the consensus is shown."""
        return exchanged(checkpoint, self._stash or [])

    @torch.no_grad()
    def consensus(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Returns a checkpoint with the consensus in place of this rank's values; on all ranks.

        What its "state_dict" has that does not lie in the module (weights that another callback has
        averaged over time) is averaged over the ranks.  What is frozen stays as it is, to the bit.
        """
        table = self._consensus() if self._stash is None else [(x, x) for x, _ in self._stash]
        table += [(same, same) for same in self._untrained()]  # last: those that differ come first
        return averaged(self.net, checkpoint, table)

    def _consensus(self) -> list[tuple[Tensor, Tensor]]:
        """Returns pairs of what the module holds here and what all ranks agree on."""
        self.settle()
        weights = []
        for part in self.parts:
            mean = part.algorithm.consensus(part.x)
            if self._conditions.samples is None or part.algorithm.traits.uses_gradient:
                part.kept.measure(part.algorithm.net, mean, part.algorithm.team_size)
            part.algorithm.measure_kept()
            weights.append((part.x, mean))
        weights += [(half, mean.to(half)) for half, (_, mean) in halves_of(self.parts, weights)]
        return weights + self._consensus_of_the_rest()

    def _consensus_of_the_rest(self) -> list[tuple[Tensor, Tensor]]:
        """Returns such pairs for buffers, and for untrained parameters that differ."""
        buffers = list(self.module.buffers())
        others = differing(self.net, self._untrained())
        means = average(self._everyone, buffers, floats=self._average_buffers)
        means += average(self.net, others)
        return list(zip(buffers + others, means, strict=True))

    # ---- saving ----

    def state_dict(self) -> list[dict[str, Any]]:
        """Returns what the algorithms keep, in the order of the parts."""
        own = self._stash or [(part.x, part.x) for part in self.parts]
        return [part.state_dict(x) for part, (_, x) in zip(self.parts, own, strict=False)]

    def names(self) -> list[list[str]]:
        """Returns the names of the parameters of each part."""
        return [part.weights.names for part in self.parts]

    def updates(self) -> list[dict[str, Any]]:
        """Returns what is known of all ranks' updates, for each part."""
        return [part.kept.state() for part in self.parts]

    def load_state_dict(
        self,
        states: Sequence[dict[str, Any]],
        names: Sequence[Sequence[str]],
        updates: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        """Takes over what `state_dict`, `names` and `updates` returned.

        Where other parameters are trained now, the next step does so: what was not frozen when it
        was saved may be frozen until training goes on.
        """
        self._to_load = Saved(states, names, updates)
        if self._to_load.fits(self.parts):
            self._to_load.give(self.parts)

    def carry_over(
        self, states: Sequence[dict[str, Any]], names: Sequence[Sequence[str]], num_ranks: int
    ) -> bool:
        """Takes over what another rank has held back; the states and names are that rank's.

        Returns:
            Whether the same parameters are trained here.
        """
        if [*map(list, names)] != self.names():
            return False
        for part, state in zip(self.parts, states, strict=True):
            part.algorithm.carry_over(state, num_ranks)
        return True

    def metrics(self) -> dict[str, float]:
        """Returns the share of the updates that is kept, and the algorithms' own figures."""
        return mean_figures(self.parts)
