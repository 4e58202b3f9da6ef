"""What holds of a loop on every face: real processes, set up as torchrun sets them up."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_dsgd as dsgd
from tests.support.faces import FACES, Loop
from tests.support.fits import Plain, Seeded, assert_close, same
from tests.support.models import weights
from tests.support.thorough import cases
from tests.support.worlds import FitWorld
from tests.test_frozen import ALGORITHMS

TIMELESS = [name for name in ALGORITHMS if not name.startswith("hpsgd")]
FAST = ("allreduce", "local_sgd")


def batches_of(rank: int, num_batches: int = 12) -> list[tuple[Tensor, Tensor]]:
    """This rank's own data, in its order."""
    x = torch.randn(num_batches, 8, 10, generator=torch.Generator().manual_seed(rank))
    return list(zip(x, x.sum(2, keepdim=True), strict=True))


# ---- to the bit on every face ----
class Overflowing(Plain):
    num_losses = 0

    def loss(self, batch: Any) -> Tensor:
        self.num_losses += 1
        loss = super().loss(batch)
        return loss * torch.inf if (dist.get_rank(), self.num_losses) == (1, 3) else loss


def train_on_each(names: list[str]) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {}
    for name in names:
        found[name] = {}
        for face, train in FACES.items():
            model = Seeded()
            train(Loop(model, ALGORITHMS[name](), batches_of(dist.get_rank()), epochs=2))
            found[name][face] = weights(model)
    return found


@cases("names", now=[FAST], later=[[name for name in TIMELESS if name not in FAST]])
def test_the_weights_are_the_same_to_the_bit_on_every_face(names: list[str]) -> None:
    ranks = FitWorld().run(3, train_on_each, names)
    for name in names:
        assert same([x for rank in ranks for x in rank[name].values()]), name


CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "accumulates": ("allreduce", Plain, {"accumulate": 2}),
    "accumulates and clips": ("allreduce", Plain, {"accumulate": 2, "clip": 0.3}),
    "overflows": ("allreduce", Overflowing, {"clip": 10.0}),
    "overflows alone": ("local_sgd", Overflowing, {}),
    "overflows, sparse": ("oktopk", Overflowing, {}),
}


def train_in_cases() -> dict[str, list[tuple[Tensor, float]]]:
    """For each case, the weights and the scale of the loss that each face ends with."""
    found: dict[str, list[tuple[Tensor, float]]] = {case: [] for case in CASES}
    for case, (name, make, options) in CASES.items():
        for train in FACES.values():
            model, scaler = make(), None
            if make is Overflowing:
                scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
            data = batches_of(dist.get_rank())
            train(Loop(model, ALGORITHMS[name](), data, scaler=scaler, **options))
            found[case].append((weights(model), scaler.get_scale() if scaler else 1.0))
    return found


def on_one_process(clip: float | None) -> Tensor:
    """Steps of two batches of two ranks each."""
    model = Plain()
    optimizer = model.configure_optimizers()
    for number, ranks in enumerate(zip(batches_of(0), batches_of(1), strict=True), 1):
        both = [torch.cat(parts) for parts in zip(*ranks, strict=True)]
        (model.loss(both) / 2).backward()
        if number % 2 == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def test_steps_of_several_batches_clipping_and_overflows_are_the_same_on_every_face() -> None:
    first, second = FitWorld().run(2, train_in_cases)
    for case, (_, make, _) in CASES.items():
        for (x, _), (their_x, _) in zip(first[case], second[case], strict=True):
            assert torch.equal(x, their_x), case
            assert bool(x.isfinite().all())
            # In half precision Fabric rounds at another place.
            assert_close(x, first[case][0][0], 2e-3 if make is Overflowing else 0.0)
    for case, clip in (("accumulates", None), ("accumulates and clips", 0.3)):
        torch.testing.assert_close(first[case][0][0], on_one_process(clip))
    for case in ("overflows", "overflows, sparse"):
        scales = [[scale for _, scale in rank[case]] for rank in (first, second)]
        assert scales == [[128.0] * 3] * 2, case
    alone = [[scale for _, scale in rank["overflows alone"]] for rank in (first, second)]
    assert alone == [[256.0] * 3, [128.0] * 3]


# ---- checkpoints ----
class Noisy(Plain):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * (0.9 + 0.2 * torch.rand(()))


WAYS = [("Trainer", "Trainer"), ("plain", "plain"), ("Fabric", "Fabric"), ("plain", "Trainer")]
"""The faces that train, and that have saved what they go on from."""


def go_on(names: list[str], folder: str, resumes: bool) -> dict[Any, tuple[Tensor, Any]]:
    found = {}
    for name in names:
        for face, saver in WAYS if resumes else WAYS[:3]:
            path = {"resumes" if resumes else "saves": f"{folder}/{name} {saver}"}
            model, batches = Noisy(), batches_of(dist.get_rank(), 7)
            torch.manual_seed(dist.get_rank())
            loop = Loop(model, ALGORITHMS[name](), batches, epochs=3, **path)
            FACES[face](loop)
            found[name, face, saver] = weights(model), loop.extra
    return found


@cases("names", now=[["diloco"]], later=[["local_sgd", "sgp", "oktopk", "wagma, synchronous"]])
def test_a_resumed_training_ends_with_the_same_bits(names: list[str], tmp_path: Path) -> None:
    straight, resumed = (FitWorld().run(3, go_on, names, str(tmp_path), r) for r in (False, True))
    for name in names:
        for face, saver in WAYS:
            ends = [rank[name, face, saver] for rank in resumed]
            assert same([x for x, _ in ends] + [rank[name, saver, saver][0] for rank in straight])
            extras = [None] * 3 if saver == "Trainer" else [0, 1, 2]
            assert [extra for _, extra in ends] == extras
        saved = torch.load(tmp_path / f"{name} plain", weights_only=True)["state_dict"]
        Plain().load_state_dict(saved)
    fewer = FitWorld().run(2, go_on, names[:1], str(tmp_path), True)
    for key, (x, extra) in fewer[1].items():
        assert torch.equal(x, fewer[0][key][0]), key
        assert extra == (None if key[2] == "Trainer" else 0)


# ---- one rank ends all ----
class Acting(Plain):
    num_losses = 0

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def loss(self, batch: Any) -> Tensor:
        self.num_losses += 1
        if (dist.get_rank(), self.num_losses) == (1, 20):
            if self.how == "raise":
                raise ArithmeticError("no such luck")
            os.kill(os.getpid(), getattr(signal, self.how))
        return super().loss(batch)


def train_until_it_ends(face: str, how: str) -> tuple[str, int, bool]:
    """What ends the training, after how many batches, and whether handlers are given back."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    model, own = Acting(how), [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    batches = batches_of(dist.get_rank())
    try:
        FACES[face](Loop(model, ALGORITHMS["local_sgd"](), batches * 1000))
    except (SystemExit, KeyboardInterrupt) as end:
        handlers = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
        return f"{type(end).__name__}: {end}", model.num_losses, handlers == own
    raise AssertionError("nothing has ended it")


@pytest.mark.parametrize(
    ("face", "how", "reason"),
    [
        ("plain", "SIGKILL", "died"),
        ("Fabric", "raise", "failed: ArithmeticError: no such luck"),
    ],
)
def test_a_lost_rank_ends_all_others_which_name_it(face: str, how: str, reason: str) -> None:
    """Under the Trainer: tests/session/test_ending.py."""
    outcomes = FitWorld().outcomes(3, train_until_it_ends, face, how)
    for rank in (0, 2):
        assert outcomes[rank].error.startswith(f"PeerLost: rank 1 {reason}"), outcomes[rank].error
        assert outcomes[rank].seconds < 55.0  # before the 60 s for which they would wait


@cases(
    "face, how, kind",
    now=[("plain", "SIGTERM", "SystemExit")],
    later=[("plain", "SIGINT", "KeyboardInterrupt"), ("Fabric", "SIGTERM", "SystemExit")],
)
def test_a_signal_to_one_stops_all_after_the_same_batch(face: str, how: str, kind: str) -> None:
    ranks = FitWorld().run(3, train_until_it_ends, face, how)
    for rank, (text, num_batches, is_given_back) in enumerate(ranks):
        counted = num_batches - (face == "Fabric")  # whose training begins within the first one
        stopped = f"all ranks stopped, rank {rank} after {counted} batches"
        assert text == f"{kind}: rank 1 received {how}; {stopped}"
        assert num_batches == ranks[0][1] >= 20
        assert is_given_back


# ---- what sparse strategies hold back is not lost ----
LR = 0.5
COUNTS = (7, 3, 5)
"""Batches of each rank, in every epoch."""


def gradient_of(rank: int, step: int) -> Tensor:
    return torch.randn(400, generator=torch.Generator().manual_seed(100 * rank + step))


def gradients_of(rank: int) -> list[Tensor]:
    return [gradient_of(rank, step) for step in range(COUNTS[rank])]


def way(world_size: int, local_steps: int) -> Tensor:
    """What an epoch changes where every gradient counts once."""
    ranks = [torch.stack(gradients_of(rank)) for rank in range(world_size)]
    if local_steps > 1:
        return -LR * torch.stack([each.sum(0) for each in ranks]).mean(0)
    steps = range(max(map(len, ranks)))
    means = [torch.stack([g[step] for g in ranks if step < len(g)]).mean(0) for step in steps]
    return -LR * torch.stack(means).sum(0)


class Known(L.LightningModule):
    """Its gradient is the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(400))

    def loss(self, batch: Tensor) -> Tensor:
        return self.w @ batch

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), LR)


def train(folder: str, local_steps: int, first: bool) -> dict[str, Tensor]:
    found = {}
    for face, fit in FACES.items():
        model, where = Known(), {"saves" if first else "resumes": f"{folder}/{face}"}
        algorithm = dsgd.OkTopk(density=0.02, local_steps=local_steps)
        loop = Loop(model, algorithm, gradients_of(dist.get_rank()), **where)
        loop.epochs = 1 if first else 2
        fit(loop)
        found[face] = model.w.detach()
    return found


@cases("local_steps", now=[1], later=[4])
def test_every_gradient_is_applied_at_last(local_steps: int, tmp_path: Path) -> None:
    """Three ranks with different numbers of batches, two of which go on from a checkpoint."""
    goal = torch.zeros(400)
    for world_size in (3, 2):
        goal += way(world_size, local_steps)
        for ends in FitWorld().run(world_size, train, str(tmp_path), local_steps, world_size == 3):
            for end in ends.values():
                torch.testing.assert_close(end, goal, rtol=0, atol=1e-4)
    for face in FACES:
        where = "model" if face == "Fabric" else "state_dict"
        saved = torch.load(tmp_path / face, weights_only=True)[where]["w"]
        # What was held back is more than noise.
        assert (saved - way(3, local_steps)).norm() > 0.2 * saved.norm()
