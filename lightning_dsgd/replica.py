"""One rank's copy of the model under an algorithm: what a strategy drives, whatever the trainer.

    weights, split by optimizer and dtype  ->  parts: a flat tensor x with an algorithm of its own
    float buffers (BatchNorm statistics)   ->  averaged over all ranks
    integer buffers                        ->  those of rank 0

Buffers are averaged at evaluation, in checkpoints and at the end; between those each rank has its
own. Averaging them more often would change nothing: running statistics are linear in what they saw,
so the mean of the ranks' comes out the same.  With `average_buffers=False`, rank 0's are evaluated
and saved.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_dsgd import flat
from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.transport import Transport


@dataclass
class Part:
    """The parameters of one optimizer and one dtype, and the algorithm that trains them."""

    weights: flat.FlatParameters
    algorithm: Algorithm

    @property
    def x(self) -> Tensor:
        """The weights, flat."""
        return self.weights.x


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
        average_buffers: whether float buffers are averaged with the weights
        check_finite: whether NaN and inf are looked for before they are sent
    """

    def __init__(
        self,
        net: Transport,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        algorithm: Algorithm,
        *,
        average_buffers: bool = True,
        check_finite: bool = False,
    ) -> None:
        self.net = net
        self.module = module
        self._pattern = algorithm
        self._average_buffers = average_buffers
        self._check_finite = check_finite
        self._num_builds = 0
        self._num_steps = 0
        self._is_finished = False
        self._stash: list[tuple[Tensor, Tensor]] | None = None
        self.consensus_distance = 0.0
        self._parts: dict[int, list[Part]] = {}
        self._trained: dict[int, list[int]] = {}  # identities of an optimizer's parameters
        self._to_load: list[tuple[dict[str, Any], Sequence[str]]] = []
        self._optimizers = list(optimizers)
        flat.check_module(module)
        self._check_disjoint()
        self._check_alike()
        for optimizer in optimizers:
            self._build(optimizer)

    # ---- making the parts ----

    def _build(self, optimizer: Optimizer) -> None:
        mine = _trainable(optimizer)
        # In the module's order: the optimizer's may differ between ranks, if it comes from a set.
        names = {p: name for name, p in self.module.named_parameters() if p in set(mine)}
        for index, parameter in enumerate(mine):
            names.setdefault(parameter, f"optimizer parameter {index}")
        parts = []
        for weights in flat.flatten((name, p) for p, name in names.items()):
            self._num_builds += 1
            algorithm = copy.copy(self._pattern)
            if algorithm.counts_gradients:
                algorithm.num_gradients = weights.num_gradients()
            algorithm.start(self.net.sub(f"part-{self._num_builds}"), weights.x)
            parts.append(Part(weights, algorithm))
        self._parts[id(optimizer)] = parts
        self._trained[id(optimizer)] = list(map(id, mine))

    def _parts_of(self, optimizer: Optimizer) -> list[Part]:
        """The parts of an optimizer; made anew when it trains other parameters than before.

        All ranks then begin with the consensus, as what is frozen from here on must be equal.  But
        not while a resume is under way, which has restored what each had.
        """
        if list(map(id, _trainable(optimizer))) != self._trained[id(optimizer)]:
            for part in self._parts[id(optimizer)]:
                part.algorithm.settle(part.x)
                if self._to_load:
                    part.algorithm.stop()
                else:
                    part.algorithm.finish(part.x)
            self._build(optimizer)
        parts = self._parts[id(optimizer)]
        for part in parts:
            if not part.weights.is_intact():
                part.weights.refresh()
        return parts

    @property
    def parts(self) -> list[Part]:
        """All parts, in the order of the optimizers."""
        return [part for optimizer in self._optimizers for part in self._parts[id(optimizer)]]

    def _check_disjoint(self) -> None:
        owner: dict[nn.Parameter, int] = {}
        for index, optimizer in enumerate(self._optimizers):
            for parameter in _parameters_of(optimizer):
                if owner.setdefault(parameter, index) != index:
                    name = next(
                        (n for n, p in self.module.named_parameters() if p is parameter), "?"
                    )
                    raise ValueError(
                        f"each parameter must belong to one optimizer, got {name!r} in the "
                        f"optimizers {owner[parameter]} and {index}; give it to one of them"
                    )

    def _check_alike(self) -> None:
        """Raises, on every rank, if their models differ in names, shapes, dtypes or optimizers."""
        entries = self._descriptions()
        digests = torch.tensor([_digest(entry) for entry in entries], dtype=torch.int64)
        columns = [theirs.tolist() for theirs in self.net.all_gather(digests).wait()]
        counts = [f"{len(column)} parameters and buffers" for column in columns]
        if len(set(counts)) == 1:
            rows = zip(*columns, strict=True)
            differing = next((i for i, row in enumerate(rows) if len(set(row)) > 1), None)
            if differing is None:
                return
            counts = everyones(self.net, entries[differing])
        raise ValueError(
            f"the model must be the same on all ranks, got {by_rank(counts)}; build it from the "
            "same arguments everywhere"
        )

    def _descriptions(self) -> list[str]:
        """One line for each parameter and buffer, with all that must be alike."""
        owner = {
            p: i for i, optimizer in enumerate(self._optimizers) for p in _trainable(optimizer)
        }
        lines = []
        for name, p in self.module.named_parameters():
            where = f"optimizer {owner[p]}" if p in owner else "no optimizer"
            lines.append(f"parameter {name!r} of {_form(p)}, trained by {where}")
        lines += [f"buffer {name!r} of {_form(b)}" for name, b in self.module.named_buffers()]
        return lines

    @torch.no_grad()
    def synchronize(self) -> None:
        """Gives every rank the weights and buffers of rank 0, as a fresh start needs."""
        for part in self.parts:
            self.net.broadcast(part.x, src=0).wait()
        others = [p.data for p in self._parameters_of_no_optimizer()]
        for tensor in [*others, *self.module.buffers()]:
            mine = tensor.detach().reshape(-1).contiguous()
            self.net.broadcast(mine.view(torch.uint8), src=0).wait()
            tensor.copy_(mine.view(tensor.shape))

    def _parameters_of_no_optimizer(self) -> list[nn.Parameter]:
        inside = {p for part in self.parts for p in part.weights.parameters}
        return [p for p in self.module.parameters() if p not in inside]

    # ---- a step ----

    @torch.no_grad()
    def before_update(self, optimizer: Optimizer) -> None:
        """Gathers the gradients where the algorithm wants them, and lets it talk."""
        self._num_steps += 1
        if self._to_load:
            self._load_late()
        for part in self._parts_of(optimizer):
            if part.algorithm.uses_gradient:
                g = part.weights.gather()
                if part.algorithm.counts_gradients:
                    part.algorithm.num_gradients = part.weights.num_gradients()
                if self._check_finite and not part.algorithm.skips_overflow:
                    self._require_finite(part, g, "gradient")
                part.algorithm.before_update(part.x, g)
                part.weights.scatter(part.algorithm.num_gradients)
            else:
                part.algorithm.before_update(part.x, part.x[:0])

    @torch.no_grad()
    def after_update(self, optimizer: Optimizer) -> None:
        """Lets the algorithm talk about the weights that the optimizer has made."""
        for part in self._parts_of(optimizer):
            if self._check_finite:
                self._require_finite(part, part.x, "weight")
            part.algorithm.after_update(part.x)

    def _require_finite(self, part: Part, flat_tensor: Tensor, what: str) -> None:
        if not bool(torch.isfinite(flat_tensor).all()):
            views = part.weights.views(flat_tensor)
            bad = [
                n for n, v in zip(part.weights.names, views, strict=True) if not v.isfinite().all()
            ]
            raise FloatingPointError(
                f"check_finite: every {what} must be finite, got NaN or inf on rank "
                f"{self.net.rank} at step {self._num_steps} in {_some(bad)}"
            )

    # ---- standing still ----

    @torch.no_grad()
    def settle(self) -> None:
        """Serves the others until every rank has come here.

        Also where this rank has made no step since the last time: others may have.  While the
        consensus is shown nobody makes one.
        """
        if self._stash is None and not self._is_finished:
            _settle_together(self.parts)

    @torch.no_grad()
    def finish(self) -> None:
        """Leaves the consensus in the module, the same on every rank."""
        self.settle()
        for part in self.parts:
            part.algorithm.finish(part.x)
        self._is_finished = True
        for buffer, mean in self._consensus_buffers():
            buffer.copy_(mean)

    def stop(self) -> None:
        """Ends what runs beside the training; never waits for another rank."""
        for part in self.parts:
            part.algorithm.stop()

    @torch.no_grad()
    def show_consensus(self) -> None:
        """Puts the consensus into the module and this rank's own weights aside.

        Memory: |x| for the weights put aside, and |x| more while the consensus is made.
        """
        table = self._consensus()
        self._stash = [(live, live.clone()) for live, _ in table]
        for live, shared in table:
            live.copy_(shared)
        self.consensus_distance = self._distance(table[: len(self.parts)])

    @torch.no_grad()
    def show_own(self) -> None:
        """Takes back what `show_consensus` put aside, to the bit."""
        for live, own in self._stash or ():
            live.copy_(own)
        self._stash = None

    @property
    def shows_consensus(self) -> bool:
        """Whether the module holds the consensus now."""
        return self._stash is not None

    @torch.no_grad()
    def own(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint with this rank's own values, also while the consensus is shown."""
        return _exchanged(checkpoint, self._stash or [])

    @torch.no_grad()
    def consensus(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint with the consensus in place of this rank's values; on all ranks together.

        What its "state_dict" has that does not lie in the module (weights that another callback has
        averaged over time) is averaged over the ranks.  Parameters of no optimizer stay as they
        are, to the bit.
        """
        if self._stash is None:
            table = self._consensus()
        else:
            table = [(live, live) for live, _ in self._stash]
        table += [(p.data, p.data) for p in self._parameters_of_no_optimizer()]
        foreign = {
            key: value
            for key, value in checkpoint["state_dict"].items()
            if isinstance(value, Tensor) and _find(value, table) is None
        }
        means = dict(zip(foreign, _average(self.net, list(foreign.values())), strict=True))
        exchanged = _exchanged(checkpoint, table)
        exchanged["state_dict"].update(means)
        return exchanged

    def _distance(self, table: Sequence[tuple[Tensor, Tensor]]) -> float:
        stash = self._stash or []
        squares = torch.zeros(2, dtype=torch.float64)
        for (_, own), (_, shared) in zip(stash, table, strict=False):
            squares[0] += (own - shared).norm().double().cpu() ** 2
            squares[1] += shared.norm().double().cpu() ** 2
        self.net.all_reduce(squares).wait()
        return float((squares[0] / squares[1].clamp(min=1e-300)).sqrt())

    def _consensus(self) -> list[tuple[Tensor, Tensor]]:
        """Pairs of what the module holds here and what all ranks agree on."""
        self.settle()
        weights = [(part.x, part.algorithm.consensus(part.x)) for part in self.parts]
        return weights + self._consensus_buffers()

    def _consensus_buffers(self) -> list[tuple[Tensor, Tensor]]:
        buffers = list(self.module.buffers())
        means = _average(self.net, buffers, floats=self._average_buffers)
        return list(zip(buffers, means, strict=True))

    # ---- saving ----

    def state_dict(self) -> list[dict[str, Any]]:
        """What the algorithms keep, in the order of the parts."""
        return [part.algorithm.state_dict() for part in self.parts]

    def names(self) -> list[list[str]]:
        """Of the parameters of each part."""
        return [part.weights.names for part in self.parts]

    def load_state_dict(
        self, states: Sequence[dict[str, Any]], names: Sequence[Sequence[str]]
    ) -> None:
        """Takes over what `state_dict` gave, beside what `names` did.

        At the next step, if other parameters are trained now than then: what had been unfrozen when
        it was saved may be frozen until training goes on.
        """
        self._to_load = list(zip(states, names, strict=True))
        if self._is_as_saved():
            self._load()

    def _is_as_saved(self) -> bool:
        return [list(names) for _, names in self._to_load] == self.names()

    def _load(self) -> None:
        states, self._to_load = self._to_load, []
        for part, (state, _) in zip(self.parts, states, strict=True):
            part.algorithm.load_state_dict(state)

    def _load_late(self) -> None:
        for optimizer in self._optimizers:
            self._parts_of(optimizer)
        if not self._is_as_saved():
            saved = {name for _, names in self._to_load for name in names}
            trained = {name for names in self.names() for name in names}
            raise ValueError(
                "the parameters that are trained must be those of the checkpoint, got "
                f"{_some(sorted(trained - saved))} not in it, and not "
                f"{_some(sorted(saved - trained))}, which are; "
                "freeze and unfreeze before fit as when it was saved, or remove its folder of "
                "replicas to go on from the consensus"
            )
        self._load()

    def metrics(self) -> dict[str, float]:
        """The algorithms' own figures; the mean over the parts where several give the same."""
        figures: dict[str, list[float]] = {}
        for part in self.parts:
            for name, value in part.algorithm.metrics().items():
                figures.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in figures.items()}


def _settle_together(parts: Sequence[Part]) -> None:
    """All parts at once: a rank that still trains waits now for one of ours, now for another."""
    if len(parts) == 1:
        parts[0].algorithm.settle(parts[0].x)
        return

    @torch.no_grad()  # a setting of each thread
    def settle(part: Part) -> None:
        part.algorithm.settle(part.x)

    threads = ThreadPoolExecutor(max(1, len(parts)), "dsgd-settle")
    try:
        for settled in as_completed([threads.submit(settle, part) for part in parts]):
            settled.result()
    finally:
        threads.shutdown(wait=False)  # a failure ends the network, and so what is left of them


def _some(names: Sequence[str]) -> str:
    """The first of them, and how many there are."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest or "none"


def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _trainable(optimizer: Optimizer) -> list[nn.Parameter]:
    """Those that an algorithm is for: frozen ones are equal on all ranks, and stay so."""
    return [p for p in _parameters_of(optimizer) if p.requires_grad]


def everyones(net: Transport, text: str) -> list[str]:
    """The texts of all ranks."""
    mine = torch.tensor(list(text.encode()), dtype=torch.uint8)
    return [bytes(theirs.tolist()).decode() for theirs in net.all_gather(mine).wait()]


def by_rank(values: Sequence[str]) -> str:
    """What which ranks have: "this on ranks 0 and 2, that on rank 1"."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return ", ".join(
        f"{value} on " + (f"ranks {', '.join(others)} and {last}" if others else f"rank {last}")
        for value, (*others, last) in ranks.items()
    )


def _form(tensor: Tensor) -> str:
    shape = "no shape yet" if is_lazy(tensor) else f"shape {tuple(tensor.shape)}"
    return f"{shape} and {tensor.dtype}"


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "little")


def _average(net: Transport, tensors: Sequence[Tensor], *, floats: bool = True) -> list[Tensor]:
    """The means of float tensors over the ranks; rank 0's of others, of all without `floats`."""
    results: list[Tensor] = [torch.empty(0)] * len(tensors)
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.dtype, tensor.device), []).append(index)
    for (dtype, _), indices in groups.items():
        packed = torch.cat([tensors[i].detach().reshape(-1) for i in indices])
        if floats and (dtype.is_complex or dtype.is_floating_point) and dtype.itemsize > 1:
            numbers = torch.view_as_real(packed).view(-1) if dtype.is_complex else packed
            net.all_reduce(numbers).wait()
            numbers /= net.world_size
        else:  # as bytes: a buffer may be of a dtype that no transport knows
            net.broadcast(packed.view(torch.uint8), src=0).wait()
        for i, piece in zip(
            indices, torch.split(packed, [tensors[i].numel() for i in indices]), strict=True
        ):
            results[i] = piece.view(tensors[i].shape)
    return results


def _exchanged(state: dict[str, Any], table: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """The same state with every tensor that lies in a live one taken from its counterpart.

    Looks into mappings of names: other callbacks keep the weights under names of their own.
    """
    result = copy.copy(state)  # with its type and the versions that torch keeps beside a state_dict
    for key, value in state.items():
        if isinstance(value, Tensor):
            found = _find(value, table)
            result[key] = value if found is None else found
        elif isinstance(value, dict) and all(isinstance(name, str) for name in value):
            result[key] = _exchanged(value, table)
    return result


def _find(value: Tensor, table: Iterable[tuple[Tensor, Tensor]]) -> Tensor | None:
    """The counterpart of a tensor that is a live one or a view of its memory."""
    for live, other in table:
        if value.untyped_storage().data_ptr() == live.untyped_storage().data_ptr() and live.numel():
            if other.is_contiguous() and live.is_contiguous():
                offset = value.storage_offset() - live.storage_offset() + other.storage_offset()
                return other.as_strided(value.size(), value.stride(), offset)
            return other.reshape(value.shape)
    return None
