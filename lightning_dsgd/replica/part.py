"""A part: the parameters of one optimizer and one dtype, and what there is to train them.

How many of all ranks' updates to a part its consensus contains is measured (`UpdatesKept`); what a
checkpoint has of parts waits until the same parameters are trained (`Saved`).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dsgd import devices
from lightning_dsgd.agreement import average
from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.primitives.step_scaling import Decay, Unscaled
from lightning_dsgd.replica.early import EarlyGradients
from lightning_dsgd.replica.flat import FlatParameters
from lightning_dsgd.replica.wide import WideParameters
from lightning_dsgd.transport import Diverged, Transport

T = TypeVar("T")

NUM_MEASURED: Final = 1024
"""`UpdatesKept` looks at so many entries of x, or at up to twice as many."""
_SCALING: Final = "step_scaling"
"""The key of the scaling's state in a part's state, beside the algorithm's own keys."""
_SAMPLES: Final = "is_by_samples"
"""The key that says that means are weighted by samples, as what is kept between them is too."""
_WIDE: Final = "fp32_weights"
"""The key of weights in fp32, where the parameters are in half precision."""


class Part:
    """Trains one flat tensor of a replica's weights by one algorithm.

    Args:
        weights: what is trained
        algorithm: has been started
        scaling: of its steps
        optimizer: makes them
        takes_pieces: whether the algorithm takes pieces of the gradient, or may come to
    """

    def __init__(
        self,
        weights: FlatParameters,
        algorithm: Algorithm,
        scaling: Unscaled,
        optimizer: Optimizer,
        *,
        takes_pieces: bool,
    ) -> None:
        self.weights, self.x = weights, weights.x
        self.algorithm = algorithm
        self.scaling = scaling
        self.optimizer = optimizer
        self.kept = UpdatesKept(weights.x)
        self._early = EarlyGradients(weights, lambda: self.algorithm) if takes_pieces else None

    def gather(self) -> Tensor:
        """Returns this rank's gradient, but for what the algorithm has taken already."""
        return self.weights.gather() if self._early is None else self._early.gather()

    def add_unit(self, step: int, unit: int, scale: float) -> None:
        """Adds the gradients in hand, of one micro-batch, to this rank's sum of a step."""
        gradients = [parameter.grad for parameter in self.weights.parameters]
        self.algorithm.add(step, unit, self.weights.views, gradients, scale)

    def take_sum(self, step: int) -> Tensor:
        """Waits for a step's mean, makes it the gradients, and returns it."""
        g, num_gradients = self.algorithm.take_sum(step)
        self.weights.show(g, num_gradients)
        return g

    def finish(self) -> None:
        """Leaves the consensus in x; every rank has settled."""
        self._stop_watching()
        self.algorithm.finish(self.x)

    def stop(self) -> None:
        """Ends what runs beside the training; never waits for another rank."""
        self._stop_watching()
        self.algorithm.stop()

    def _stop_watching(self) -> None:
        if self._early is not None:
            self._early.remove()

    def settle(self) -> None:
        """Serves the others until every rank has come here."""
        self.algorithm.settle(self.x)
        if self._early is not None:
            self._early.take_back()
        self.scaling.settle()

    def decays(self) -> list[Decay]:
        """Returns what AdamW and the like subtract from weights besides the step that comes.

        Only weights that have a gradient count.
        """
        decays: list[Decay] = []
        for group in self.optimizer.param_groups:
            if group.get("decoupled_weight_decay") and group["weight_decay"]:
                stepped = [p for p in group["params"] if p.grad is not None]
                decays.append((self.weights.spans(stepped), group["lr"] * group["weight_decay"]))
        return decays

    def require_finite(self, values: Tensor, what: str, rank: int, step: int) -> None:
        """Raises `Diverged`, naming parameters, where a tensor laid out like x has NaN or inf."""
        if not bool(torch.isfinite(values).all()):
            views = zip(self.weights.names, self.weights.views(values), strict=True)
            bad = [name for name, view in views if not view.isfinite().all()]
            raise Diverged(
                f"check_finite: every {what} must be finite, got NaN or inf on rank {rank} at step "
                f"{step} in {some(bad)}; look at the learning rate and the loss"
            )

    def state_dict(self, x: Tensor) -> dict[str, Any]:
        """Returns the state of the algorithm, of the scaling of steps, and x if it is wider.

        Args:
            x: this rank's own weights, also while the consensus is shown
        """
        known = self.scaling.state_dict()
        state = self.algorithm.state_dict() | ({_SCALING: known} if known else {})
        if self._is_by_samples:
            state |= {_SAMPLES: True}
        return state | ({_WIDE: x.clone()} if isinstance(self.weights, WideParameters) else {})

    @property
    def _is_by_samples(self) -> bool:
        return self.algorithm.conditions.samples is not None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned."""
        if isinstance(self.weights, WideParameters) and _WIDE in state:
            self.weights.restore(state[_WIDE].to(self.x))
        if self._is_by_samples != (_SAMPLES in state):
            kinds = ["ranks", "samples"]
            raise ValueError(
                "means must be weighted as when the checkpoint was saved, got weigh_by="
                f'"{kinds[self._is_by_samples]}" for "{kinds[_SAMPLES in state]}"; set it as it '
                "was, or remove the checkpoint's folder of replicas to go on from the consensus"
            )
        known = {k: v for k, v in state.items() if k not in (_SCALING, _SAMPLES, _WIDE)}
        self.algorithm.load_state_dict(known)
        if _SCALING in state:
            self.scaling.load_state_dict(state[_SCALING])

    def metrics(self) -> dict[str, float]:
        """Returns the share of updates kept, and the scaling's and the algorithm's figures."""
        figures: dict[str, float] = {}
        if self.kept.share is not None:
            figures["updates_kept"] = self.kept.share
        return figures | self.scaling.metrics() | self.algorithm.metrics()


class UpdatesKept:
    """Measures which share of all updates to one flat tensor of weights is kept: `updates_kept`.

        kept = <x - begin, u> / <u, u>

    Legend: x the consensus, begin what it was in the beginning, u the sum of all updates, each the
    mean over all ranks.  It is measured on one to two thousand entries of x, which a step reads
    twice.

    Where ranks step together, with the mean of their gradients, one that has run out of data makes
    no updates, but takes over what the others have come to.  So of each such team only those count
    that have made the most updates since the last consensus.

    Attributes:
        share: the share at the last consensus; None before the first consensus or update
        every: how many entries of x there are for each that is measured
    """

    share: float | None

    def __init__(self, x: Tensor) -> None:
        self._len = len(x)
        self.every = max(1, len(x) // NUM_MEASURED)
        self.begin(x)

    def begin(self, x: Tensor) -> None:
        """Begins anew from these weights."""
        self.share = None
        self._begin = self._some_of(x)
        self._updates = torch.zeros_like(self._begin)  # all ranks', until the last consensus
        self._start_counting()

    def update_begins(self, some: Tensor) -> None:
        """Notes one of `every` weights; the optimizer is about to step."""
        self._before = self._wide(some)

    def update_ends(self, some: Tensor) -> None:
        """Adds up the step that the optimizer has made."""
        self._mine += self._wide(some) - self._before
        self._num_mine += 1

    def measure(self, net: Transport, consensus: Tensor, team_size: int) -> None:
        """Measures the share, on all ranks together; teams are of consecutive ranks."""
        nums = [int(num) for num in net.all_gather(torch.tensor([self._num_mine])).wait()]
        first = net.rank // team_size * team_size
        team = nums[first : first + team_size]
        share_of_team = (self._num_mine == max(team)) / team.count(max(team))
        means = torch.stack([self._begin, self._mine * (share_of_team * len(team))])
        average(net, means.view(-1))
        self._begin, updates = means
        self._updates += updates
        self._start_counting()
        squares = float(self._updates @ self._updates)
        if squares != 0:
            way = self._some_of(consensus) - self._begin
            self.share = float(way @ self._updates) / squares

    def state(self) -> dict[str, Any]:
        """Returns what a resume needs, at a consensus."""
        return {"len": self._len, "begin": self._begin, "updates": self._updates}

    def load(self, state: dict[str, Any] | None, x: Tensor) -> None:
        """Takes a state over; begins anew without one, or with one of another layout of x."""
        self.begin(x)
        if state is not None and state["len"] == self._len:
            self._begin, self._updates = (state[k].to(self._begin) for k in ("begin", "updates"))

    def _start_counting(self) -> None:
        self._mine = torch.zeros_like(self._begin)
        self._num_mine = 0

    def _some_of(self, x: Tensor) -> Tensor:
        return self._wide(x[:: self.every])

    @staticmethod
    def _wide(some: Tensor) -> Tensor:
        wide = torch.float64 if devices.has_doubles(some.device) else torch.float32
        return some.to(wide, copy=True)


class Saved:
    """Gives each part what was saved of it, once, as soon as the same parameters are trained.

    Attributes:
        waits: whether the parts have not been given what was saved

    Args:
        states: what the parts' `state_dict` returned
        names: the names of each part's parameters
        updates: what was known of all ranks' updates; None: nothing
    """

    def __init__(
        self,
        states: Sequence[dict[str, Any]] = (),
        names: Sequence[Sequence[str]] = (),
        updates: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        given = [None] * len(states) if updates is None else updates
        self.waits = bool(states)
        self._rest = list(zip(states, names, given, strict=True))

    def fits(self, parts: Sequence[Part]) -> bool:
        """Returns whether these parts train the same parameters."""
        return [list(names) for _, names, _ in self._rest] == [p.weights.names for p in parts]

    def give(self, parts: Sequence[Part]) -> None:
        """Gives these parts what was saved; raises `ValueError` unless it fits."""
        if not self.fits(parts):
            saved = {name for _, names, _ in self._rest for name in names}
            trained = {name for part in parts for name in part.weights.names}
            if saved == trained:
                raise ValueError(
                    "parameters must be laid out as when the checkpoint was saved, got another "
                    "order; set optimizers, fragments and num_fragments as they were, or remove "
                    "its folder of replicas to go on from the consensus"
                )
            raise ValueError(
                "the parameters that are trained must be those of the checkpoint, got "
                f"{some(sorted(trained - saved))} not in it, and not "
                f"{some(sorted(saved - trained))}, which are; "
                "freeze and unfreeze before fit as when it was saved, or remove its folder of "
                "replicas to go on from the consensus"
            )
        self.waits = False
        for part, (state, _, updates) in zip(parts, self._rest, strict=True):
            part.load_state_dict(state)
            part.kept.load(updates, part.x)


def mean_figures(parts: Sequence[Part]) -> dict[str, float]:
    """Returns all figures of the parts' metrics; those that several give are means."""
    figures: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.metrics().items():
            figures.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in figures.items()}


def halves_of(parts: Sequence[Part], others: Sequence[T]) -> list[tuple[Tensor, T]]:
    """Returns the parameters in half precision, flat, each with the entry of `others` of its part.

    The algorithm's x is a copy of them in fp32.
    """
    pairs = zip((part.weights for part in parts), others, strict=True)
    return [(each.home.x, other) for each, other in pairs if isinstance(each, WideParameters)]


def some(names: Sequence[str]) -> str:
    """Returns the first names, and says how many more there are."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest or "none"


def settle_together(parts: Sequence[Part], *, wait: bool = False) -> None:
    """Settles all parts at once: another rank waits now for one of them, now for another.

    Args:
        parts: the parts to settle
        wait: waits for all parts, also where one has failed; else a failure ends the network
    """
    if len(parts) == 1:
        parts[0].settle()
        return

    streams = [devices.port_of(part.x.device).current() for part in parts]

    @torch.no_grad()  # a setting of each thread, as the stream is
    def settle(part: Part, stream: Any) -> None:
        port = devices.port_of(part.x.device)
        port.enter()
        with port.using(stream):
            part.settle()

    threads = ThreadPoolExecutor(max(1, len(parts)), "dsgd-settle")
    try:
        for settled in as_completed(
            [threads.submit(settle, *each) for each in zip(parts, streams, strict=True)]
        ):
            settled.result()
    finally:
        threads.shutdown(wait=wait)
