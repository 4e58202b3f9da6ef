"""What a rank needs more at its peak, as a strategy's page says it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_dsgd.algorithms import ALGORITHMS, make_algorithm
from lightning_dsgd.transport import collectives
from tests.support.fake_device import FakeDevice
from tests.support.thorough import cases
from tests.support.worlds import FakeWorld


def test_every_strategy_says_what_memory_it_needs() -> None:
    for name in set(ALGORITHMS) - {"no_sync", "local_sgd"}:
        assert make_algorithm(name).num_copies(8) >= 1, name


@pytest.mark.parametrize(
    ("spec", "copies"),
    [
        ("allreduce:wire_dtype=int8:overlap=true", 3),
        ("diloco:overlap_steps=2:num_fragments=4", 2.5),
        ("sgp, claimed", 3),
        ("sgp:average_momentum=true", 3),
        ("popsgd:blocking=true:average_momentum=true", 2),
        ("popsgd, on a device", 4),
        ("wagma:overlap=true, on a device", 4),
        ("wagma:grace_s=Infinity", 0),
        ("wagma:grace_s=Infinity:overlap=true", 3),
        ("wagma:overlap=true:sync_period=10:wire_dtype=int8", 7),  # during a sum
        ("topk_dsa", 2.125),
    ],
)
def test_memory_is_what_the_page_of_a_strategy_says(spec: str, copies: float) -> None:
    name, _, case = spec.partition(", ")
    cases = {"is_claimed": case == "claimed", "on_device": case == "on a device"}
    assert make_algorithm(name).num_copies(8, **cases) == copies


N, STEPS = 4096, 12


def peaks(net: Any, fake: FakeDevice, specs: list[str]) -> list[float]:
    """The copies of x that each algorithm takes on the device, beside x and the gradient."""
    collectives._CHUNK_ELEMENTS = N // 64  # what comes of a sum is small, as of large weights
    found = []
    for spec in specs:
        x, algorithm = torch.zeros(N, device=fake.device), make_algorithm(spec)
        g = torch.full_like(x, 1e-3)
        net.barrier().wait()
        before = fake.peak_bytes = fake.taken_bytes()
        algorithm.start(net.sub(spec), x)
        for step in range(STEPS):
            fake.spin(0.2 if net.rank == 1 and step % 3 == 1 else 0.03)
            algorithm.before_update(x, g)
            x -= g
            algorithm.after_update(x)
        found.append((fake.peak_bytes - before) / x.nbytes)
        algorithm.settle(x)
        algorithm.finish(x)
    return found


@cases(
    "specs",
    now=[["wagma:overlap=true:sync_period=8", "adpsgd", "popsgd"]],
    later=[["popsgd:wire_dtype=bfloat16", "adpsgd:wire_dtype=bfloat16", "adpsgd:wire_dtype=int8"]],
)
def test_memory_on_a_device_is_what_is_said(specs: list[str]) -> None:
    ranks = FakeWorld().run(4, peaks, specs)
    for k, spec in enumerate(specs):
        said, most = make_algorithm(spec).num_copies(4, on_device=True), max(r[k] for r in ranks)
        assert said - 1 < most < said + 0.25, (spec, [rank[k] for rank in ranks])
