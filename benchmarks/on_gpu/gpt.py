"""Steps of GPT-2 (124 million weights, bf16-mixed) on one rank, by every face.

One rank exchanges nothing: what is left is what a face, and the algorithm's passes over memory,
add to a step.  Each training is in a process of its own, so its peak of memory is its own, too.
`balanced` computes a batch as one micro-batch, and once as four, as it does by default.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.on_gpu import apart
from benchmarks.on_gpu.apart import Row
from benchmarks.on_gpu.place import Place, finish
from lightning_dsgd import FabricStrategy, StepTrace, decentralized
from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.hyperparameters import parse

BALANCED, WAGMA, OVERLAP = "balanced:micro_batches=1", "wagma", "wagma:overlap=true"
CELLS = (
    ("trainer", BALANCED, False),
    ("trainer", "ddp", False),
    ("trainer", WAGMA, False),
    ("plain", BALANCED, False),
    ("plain", "none", False),
    ("plain", "ddp", False),
    ("plain", WAGMA, False),
    ("trainer", BALANCED, True),
    ("trainer", "ddp", True),
    ("trainer", WAGMA, True),
    ("trainer", "auto", False),
    ("trainer", OVERLAP, False),
    ("plain", OVERLAP, False),
    ("fabric", BALANCED, False),
    ("fabric", "ddp", False),
    ("fabric", WAGMA, False),
    ("trainer", "balanced", False),
)
"""The face, the strategy, and whether StepTrace records; first what is worth most."""
LIMIT_S = 20.0, 60.0
"""Of a training; the second where sizes are tiny, on a machine that may be busy."""
WARM_UP = 5


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.before(x)).view(batch, length, 3 * self.heads, dim // self.heads)
        q, k, v = qkv.transpose(1, 2).chunk(3, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, dim))
        return x + self.mlp(self.between(x))


class GPT2(L.LightningModule):
    """GPT-2 without dropout; its loss is that of the next token."""

    def __init__(self, vocabulary: int, length: int, dim: int, depth: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.last = nn.LayerNorm(dim)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        logits = F.linear(self.last(self.blocks(x)), self.tokens.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class Clock(L.Callback):
    """Notes when the device has made the step after which timing begins, and the last one."""

    def __init__(self, last: int) -> None:
        self.last, self.num_steps = last, 0
        self.begin_s = self.end_s = 0.0

    def step(self, device: torch.device) -> None:
        self.num_steps += 1
        if self.num_steps == WARM_UP:
            finish(device)
            self.begin_s = time.perf_counter()
        if self.num_steps == self.last:
            finish(device)
            self.end_s = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.step(trainer.strategy.root_device)

    @property
    def step_ms(self) -> float:
        return 1e3 * (self.end_s - self.begin_s) / (self.last - WARM_UP)


def steps(place: Place) -> Iterator[Row]:
    """A row for each face and strategy."""
    for face, spec, is_traced in place.size(CELLS, (*CELLS[:8], CELLS[13])):
        cell = {"face": face, "strategy": spec, "step_trace": is_traced}

        def train(face: str = face, spec: str = spec, is_traced: bool = is_traced) -> list[Row]:
            return [trained(place, face, spec, is_traced=is_traced)]

        for row in apart.rows(train, place.size(*LIMIT_S), None):
            yield cell | row


def trained(place: Place, face: str, spec: str, *, is_traced: bool) -> Row:
    """Trains by one face; one step's milliseconds, and the peak of memory."""
    torch.manual_seed(0)
    sizes = place.size((50257, 1024, 768, 12, 12), (64, 16, 32, 1, 2))
    batch, clock = place.size(8, 2), Clock(WARM_UP + place.size(20, 3))
    model = GPT2(*sizes)
    tokens = torch.randint(sizes[0], (batch * clock.last, sizes[1]))
    loader = DataLoader(TensorDataset(tokens), batch)
    with tempfile.TemporaryDirectory() as folder:
        callbacks: list[Any] = [clock, *([StepTrace(folder)] if is_traced else [])]
        {"trainer": by_trainer, "plain": by_loop, "fabric": by_fabric}[face](
            place, spec, model, loader, callbacks
        )
    row: Row = {"weights": sum(p.numel() for p in model.parameters()), "step_ms": clock.step_ms}
    if place.kind == "cuda":
        row |= {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        }
    return row


def by_trainer(
    place: Place, spec: str, model: GPT2, loader: DataLoader[Any], callbacks: list[Any]
) -> None:
    from lightning_dsgd.trainer.named import strategy_of

    name, own = parse(spec)
    strategy = name if name in ("auto", "ddp") else strategy_of(name, **own)
    L.Trainer(
        accelerator="gpu" if place.kind == "cuda" else "cpu",
        devices=1,
        strategy=strategy,
        precision="bf16-mixed",
        max_epochs=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(model, loader)


def by_loop(
    place: Place, spec: str, model: GPT2, loader: DataLoader[Any], callbacks: list[Any]
) -> None:
    device = place.device()
    model.to(device)
    optimizer = model.configure_optimizers()

    def step(batches: Iterable[list[Tensor]], computed: nn.Module) -> None:
        optimizer.zero_grad()
        for [tokens] in batches:
            with torch.autocast(device.type, torch.bfloat16):
                loss = computed(tokens.to(device))
            loss.backward()
        optimizer.step()
        callbacks[0].step(device)

    if spec in ("none", "ddp"):
        computed: nn.Module = model
        if spec == "ddp":
            backend = "nccl" if place.kind == "cuda" else "gloo"
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
            computed = nn.parallel.DistributedDataParallel(model)
        for batch in loader:
            step([batch], computed)
        return
    with decentralized(model, optimizer, make_algorithm(spec)) as replica:
        if spec.startswith("balanced"):
            for batches in replica.steps(loader, accumulate=1):
                step(batches, model)
        else:
            for batch in replica.batches(loader):
                step([batch], model)


def by_fabric(
    place: Place, spec: str, model: GPT2, loader: DataLoader[Any], callbacks: list[Any]
) -> None:
    strategy: Any = spec if spec == "ddp" else FabricStrategy(make_algorithm(spec))
    accelerator = "gpu" if place.kind == "cuda" else "cpu"
    fabric = L.Fabric(accelerator=accelerator, devices=1, strategy=strategy, precision="bf16-mixed")
    fabric.launch()
    computed, optimizer = fabric.setup(model, model.configure_optimizers())
    dealt = fabric.setup_dataloaders(loader)

    def step(batches: Iterable[list[Tensor]]) -> None:
        optimizer.zero_grad()
        for [tokens] in batches:
            fabric.backward(computed(tokens.to(fabric.device)))
        optimizer.step()
        callbacks[0].step(fabric.device)

    if spec.startswith("balanced"):
        for batches in fabric.strategy.steps(dealt, accumulate=1):
            step(batches)
    else:
        for batch in dealt:
            step([batch])
