"""What holds of a model in shards, in plain PyTorch: 2 replicas x 2 shards in real processes."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lightning_dsgd as dsgd
from lightning_dsgd import decentralized
from lightning_dsgd.sharded import shards
from lightning_dsgd.sharded.mesh_sharding import MeshSharding
from lightning_dsgd.transport.native import NativeCollective
from tests.support.fits import run
from tests.support.heard import Heard
from tests.support.thorough import cases
from tests.support.torchrun import run_forked_by_torchrun
from tests.support.worlds import NativeWorld, ParentWorld

exhaustive = pytest.mark.exhaustive

ALGORITHMS: dict[str, Any] = {
    "local_sgd": lambda: dsgd.LocalSGD(sync_period=3),
    "diloco": lambda: dsgd.DiLoCo(sync_period=3, outer_lr=1.0, outer_momentum=0.5),
    "dpsgd": dsgd.DPSGD,
    "sgp": dsgd.SGP,
    "sgp, overlap": lambda: dsgd.SGP(overlap=1),
    # Without a bound it makes as many steps as fit into a sum, which depends on the machine.
    "hpsgd": lambda: dsgd.HPSGD(max_local_steps=2),
    "adpsgd": dsgd.ADPSGD,
    "popsgd": dsgd.PopSGD,
}


def make_mesh(num_replicas: int = 2) -> Any:
    shape = (num_replicas, dist.get_world_size() // num_replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))


class Network(nn.Module):
    """With layers whose sizes two ranks cannot share evenly, and one that has a row alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh())
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


def make(mesh: Any, kind: str = "adamw", **options: Any) -> tuple[nn.Module, Any]:
    model = Network()
    fully_shard(model.layers, mesh=mesh["shard"], **options)
    fully_shard(model, mesh=mesh["shard"], **options)
    return model, optimizer_of(model, kind)


def optimizer_of(model: nn.Module, kind: str) -> Any:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), 0.01)


def replica_of(model: nn.Module, optimizer: Any, algorithm: Any, mesh: Any) -> decentralized:
    """What hangs fails soon, saying who waits for whom."""
    return decentralized(model, optimizer, algorithm, timeout_s=20.0, replicas=mesh["replica"])


def batches(num_batches: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_batches, 8, 10, generator=generator)
    return [(x, x.sum(1, keepdim=True)) for x in inputs]


def train(model: nn.Module, optimizer: Any, num_batches: int = 12, seed: int | None = None) -> None:
    for x, y in batches(num_batches, dist.get_rank() if seed is None else seed):
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()


def loss_of(model: nn.Module) -> float:
    [(x, y)] = batches(1, 99)
    with torch.no_grad():
        return float(((model(x) - y) ** 2).mean())


def whole(model: nn.Module) -> Tensor:
    """All weights; the ranks of a replica call it together."""
    state = model.state_dict().values()
    return torch.cat([t.full_tensor().reshape(-1) for t in state if isinstance(t, DTensor)])


# ---- every algorithm ----
def train_with(name: str) -> tuple[Any, ...]:
    mesh = make_mesh()
    model, optimizer = make(mesh)
    first = loss_of(model)
    with replica_of(model, optimizer, ALGORITHMS[name](), mesh) as replica:
        for _ in range(6):
            train(model, optimizer)
            with replica.consensus():
                inside = whole(model), loss_of(model)
            loss_of(model)  # which leaves the gathered weights of the root
        metrics = replica.metrics()
    return first, inside, whole(model), loss_of(model), metrics


@cases("name", now=["local_sgd"], later=["diloco", "sgp, overlap", "hpsgd", "adpsgd"])
def test_replicas_learn_and_agree(name: str) -> None:
    ranks = run(4, train_with, name)
    for first, (consensus, consensus_loss), weights, last, metrics in ranks:
        assert torch.equal(weights, ranks[0][2])
        assert torch.equal(consensus, ranks[0][1][0])
        assert consensus_loss < 0.7 * first
        assert last < 0.7 * first
        assert metrics["consensus_distance"] == ranks[0][4]["consensus_distance"]


CLIP = 0.5
"""The norm of a whole gradient, to which it is clipped: some are longer."""


def train_twice() -> tuple[Tensor, Tensor]:
    mesh = make_mesh()
    both = []
    for _ in range(2):
        model, optimizer = make(mesh)
        with replica_of(model, optimizer, dsgd.LocalSGD(sync_period=3), mesh) as replica:
            for x, y in batches(12, replica.rank):
                optimizer.zero_grad()
                ((model(x) - y) ** 2).mean().backward()
                replica.reduce_gradients(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
        both.append(whole(model))
    return both[0], both[1]


def train_unsharded() -> Tensor:
    """Each of two ranks as a replica, on the batches of both ranks that hold one above."""
    model = Network()
    optimizer = optimizer_of(model, "adamw")
    with decentralized(model, optimizer, dsgd.LocalSGD(sync_period=3), timeout_s=20.0):
        first, second = (batches(12, 2 * dist.get_rank() + shard) for shard in range(2))
        for (x, y), (more_x, more_y) in zip(first, second, strict=True):
            optimizer.zero_grad()
            inputs, targets = torch.cat([x, more_x]), torch.cat([y, more_y])
            ((model(inputs) - targets) ** 2).mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_local_sgd_is_the_same_in_every_run_and_that_of_whole_replicas() -> None:
    ranks = run(4, train_twice)
    for one, another in ranks:
        assert torch.equal(one, ranks[0][0])
        assert torch.equal(one, another)
    [weights, _] = run(2, train_unsharded)
    torch.testing.assert_close(ranks[0][0], weights, rtol=1e-4, atol=1e-5)


# ---- x and the shards ----
POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"reshard_after_forward": False},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
}


def train_plainly(mesh: Any, kind: str, policy: str) -> Tensor:
    model, optimizer = make(mesh, kind, **POLICIES[policy])
    train(model, optimizer)
    return whole(model)


def train_on_x(mesh: Any, kind: str, policy: str) -> tuple[Tensor, set[bool]]:
    model, optimizer = make(mesh, kind, **POLICIES[policy])
    with replica_of(model, optimizer, dsgd.NoSync(), mesh) as replica:
        train(model, optimizer)
        [part] = replica._session.training.replica.parts
        x = part.x.untyped_storage().data_ptr()
        where = [shards.local(p).untyped_storage().data_ptr() for p in part.weights.parameters]
    return whole(model), {address == x for address in where}


CASES = [
    *(("adamw", "default"), ("adamw", "bfloat16"), ("adamw", "offloaded"), ("sgd", "kept")),
]


def train_in_each_way() -> None:
    mesh = make_mesh(1)
    for kind, policy in CASES:
        plain = train_plainly(mesh, kind, policy)
        ours, lies_in_x = train_on_x(mesh, kind, policy)
        assert torch.equal(plain, ours), (kind, policy)
        assert lies_in_x == {policy != "offloaded"}, (kind, policy)
        with mock.patch.object(shards, "_is_as_tested", return_value=False):
            ours, lies_in_x = train_on_x(mesh, kind, policy)
            said = shards.Shards(make(mesh)[0]).describe()
        assert torch.equal(plain, ours), (kind, policy)
        assert lies_in_x == {False}
    assert "algorithms work on a copy of the shards, four passes over it a step" in said


def test_training_on_x_is_plain_fsdp_to_the_bit() -> None:
    run(2, train_in_each_way)


# ---- while the consensus is shown ----
def show_and_save(folder: Path) -> dict[str, Any]:
    """Ranks that have never met; their consensus, and what is left and loaded of their own."""
    logging.getLogger("lightning_dsgd").setLevel(logging.INFO)
    heard, mesh = Heard("lightning_dsgd"), make_mesh()
    model, optimizer = make(mesh)
    with replica_of(model, optimizer, dsgd.NoSync(), mesh) as replica:
        train(model, optimizer)
        own, loss = whole(model), loss_of(model)  # leaves the gathered weights of the root
        with replica.consensus():
            inside = loss_of(model)
            copied = Network()
            names = [name for name, _ in copied.named_parameters()]
            copied.load_state_dict(
                {n: p.full_tensor() for n, p in model.state_dict().items() if n in names}
            )
            expected = loss_of(copied)
            replica.save(folder / "saved.pt")
        assert torch.equal(whole(model), own)
        assert loss_of(model) == loss
    model, optimizer = make(mesh)
    with replica_of(model, optimizer, dsgd.NoSync(), mesh) as replica:
        replica.load(folder / "saved.pt")
        loaded = whole(model)
    return {
        "own": own,
        "loaded": loaded,
        "loss": loss,
        "inside": inside,
        "expected": expected,
        "said": [line for line in heard.lines if "Sharded" in line],
    }


def test_an_evaluation_sees_the_consensus_and_a_save_there_holds_the_own_weights(
    tmp_path: Path,
) -> None:
    ranks = run(4, show_and_save, tmp_path)
    for each in ranks:
        assert each["inside"] == pytest.approx(each["expected"], rel=1e-5)
        assert abs(each["inside"] - each["loss"]) > 1e-4
        assert torch.equal(each["own"], each["loaded"])
    told = "Sharded replicas: algorithms work on the shards in place."
    assert [each["said"] for each in ranks] == [[told] * 2, [], [], []]  # once a training


# ---- checkpoints ----
def resume(folder: Path, kind: str) -> tuple[Tensor, Tensor, Any]:
    mesh = make_mesh()
    model, optimizer = make(mesh, kind)
    with replica_of(model, optimizer, dsgd.LocalSGD(sync_period=5), mesh) as replica:
        train(model, optimizer, 7)
        replica.save(folder / "saved.pt", epoch=1, rank=replica.rank)
        train(model, optimizer, 7, 10 + replica.rank)
    straight = whole(model)
    model, optimizer = make(mesh, kind)
    with replica_of(model, optimizer, dsgd.LocalSGD(sync_period=5), mesh) as replica:
        extras = replica.load(folder / "saved.pt")
        train(model, optimizer, 7, 10 + replica.rank)
    return straight, whole(model), extras


def go_on(path: Path, num_replicas: int) -> tuple[Tensor, Tensor, Tensor, Any]:
    mesh = make_mesh(num_replicas)
    model, optimizer = make(mesh)
    with replica_of(model, optimizer, dsgd.LocalSGD(sync_period=5), mesh) as replica:
        extras = replica.load(path)
        loaded = whole(model)
        moments = [state["exp_avg"].full_tensor() for state in optimizer.state.values()]
        train(model, optimizer, 7)
    return loaded, torch.cat([m.reshape(-1) for m in moments]), whole(model), extras


def go_on_unsharded(path: Path) -> Tensor:
    model = Network()
    optimizer = optimizer_of(model, "adamw")
    with decentralized(model, optimizer, dsgd.LocalSGD(sync_period=5), timeout_s=20.0) as replica:
        replica.load(path)
        loaded = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        train(model, optimizer, 7)
        replica.save(path.with_name("whole.pt"))
    return loaded


def test_a_checkpoint_goes_on_with_the_same_bits_and_from_other_numbers(tmp_path: Path) -> None:
    for rank, (straight, resumed, extras) in enumerate(run(4, resume, tmp_path, "adamw")):
        assert torch.equal(straight, resumed)
        assert extras == {"epoch": 1, "rank": rank}
    path = tmp_path / "saved.pt"
    saved = torch.load(path, weights_only=True)
    plain = Network()
    plain.load_state_dict(saved["state_dict"])
    weights = torch.cat([p.detach().reshape(-1) for p in plain.parameters()])
    moments = torch.cat(
        [s["exp_avg"].reshape(-1) for s in saved["optimizer_states"][0]["state"].values()]
    )
    for loaded, own, after, extras in run(2, go_on, path, 1):
        assert torch.equal(loaded, weights)
        assert torch.equal(own, moments)
        assert not torch.equal(after, weights)
        assert extras == {"epoch": 1, "rank": 0}
    for loaded in run(2, go_on_unsharded, path):
        assert torch.equal(loaded, weights)
    whole_state = torch.load(tmp_path / "whole.pt", weights_only=True)["state_dict"]
    after = torch.cat([whole_state[name].reshape(-1) for name, _ in plain.named_parameters()])
    for loaded, *_ in run(4, go_on, tmp_path / "whole.pt", 2):
        assert torch.equal(loaded, after)


def save_distributed(folder: str) -> tuple[Tensor, Tensor]:
    mesh = make_mesh()
    model, optimizer = make(mesh)
    with replica_of(model, optimizer, dsgd.LocalSGD(), mesh) as replica:
        train(model, optimizer, 5)
        text = blocks_of_page("import torch.distributed.checkpoint as dcp")
        os.chdir(folder)
        exec(text, {"replica": replica, "mesh": mesh, "model": model})
    consensus = whole(model)
    model, optimizer = make(make_mesh(1))
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id="last")
    return consensus, whole(model)


def blocks_of_page(begin: str) -> str:
    page = Path(__file__).parents[3] / "docs" / "sharded.md"
    found = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    (text,) = (block for block in found if block.startswith(begin))
    return text


@exhaustive
def test_the_consensus_is_saved_as_a_distributed_checkpoint(tmp_path: Path) -> None:
    for consensus, loaded in run(4, save_distributed, str(tmp_path)):
        assert torch.equal(consensus, loaded)


# ---- the page's script ----
def run_script(folder: str, text: str) -> None:
    os.chdir(folder)
    Path("train.py").write_text(text)
    code = compile(text, "train.py", "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    state = {"loss": names["valid_loss"], "rank": names["replica"].rank}
    torch.save(state, f"rank_{names['replica'].rank}.pt")


@pytest.mark.exhaustive
def test_the_script_of_the_page_word_for_word(tmp_path: Path) -> None:
    text = blocks_of_page("# train.py")
    ParentWorld().run(1, run_forked_by_torchrun, 4, run_script, str(tmp_path), text)
    losses = [torch.load(tmp_path / f"rank_{rank}.pt")["loss"] for rank in range(4)]
    assert losses == losses[:1] * 4
    assert losses[0] < 2  # 8 is the variance of the target
    saved = torch.load(tmp_path / "last.pt", weights_only=True)
    assert saved["extras"] == {"epoch": 9}
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    model.load_state_dict(saved["state_dict"])


# ---- tensor parallelism ----
class Pair(nn.Module):
    """Two layers that two ranks compute together, and one that each computes by itself."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(10)
        self.up, self.down = nn.Linear(10, size), nn.Linear(size, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def make_parallel(mesh: Any, size: int = 8) -> tuple[nn.Module, Any]:
    """In tensor parallelism, and over another dimension of the mesh by FSDP2 if it has one."""
    model, names = Pair(size), mesh.mesh_dim_names
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh[names[-1]], plan)
    if len(names) > 2:
        fully_shard(model, mesh=mesh["shard"])
    return model, optimizer_of(model, "sgd")


def train_parallel(name: str, shape: tuple[int, ...], folder: Path) -> tuple[Any, ...]:
    """Trains and saves; goes on from the model alone, without each rank's own file."""
    names = ("replica", "shard", "tensor")[: len(shape)]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model, optimizer = make_parallel(mesh)
    first, own_data = loss_of(model), dist.get_rank() // shape[-1]
    with replica_of(model, optimizer, ALGORITHMS[name](), mesh) as replica:
        train(model, optimizer, seed=own_data)
        held_by_all = model.norm.weight, model.down.bias
        held_by_all = [
            t.full_tensor() if isinstance(t, DTensor) else t.clone() for t in held_by_all
        ]
        replica.save(folder / "saved.pt")
    last, saved = loss_of(model), whole(model)
    model, optimizer = make_parallel(mesh)
    with replica_of(model, optimizer, ALGORITHMS[name](), mesh) as replica:
        if replica.rank == 0:
            state = torch.load(folder / "saved.pt", weights_only=True)
            del state["lightning_dsgd"]
            torch.save(state, folder / "model.pt")
        replica.barrier()
        replica.load(folder / "model.pt")
        loaded = whole(model)
    return first, last, saved, [t.detach() for t in held_by_all], loaded


@cases(
    "name, shape",
    now=[("local_sgd", (2, 2))],
    later=[("sgp", (2, 2)), ("local_sgd", (2, 2, 2))],
)
def test_with_tensor_parallelism_ranks_of_a_replica_hold_the_same(
    name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """Also with FSDP2 in the same replica, which is then of four ranks."""
    num_ranks = torch.Size(shape).numel()
    ranks = run(num_ranks, train_parallel, name, shape, tmp_path)
    for rank, (first, last, saved, held_by_all, loaded) in enumerate(ranks):
        assert last < first
        assert torch.equal(saved, ranks[0][2])
        torch.testing.assert_close(saved, loaded, rtol=0, atol=0)
        for mine, theirs in zip(held_by_all, ranks[rank // 2 * 2][3], strict=True):
            assert torch.equal(mine, theirs)


# ---- the ranks that hold the same shard ----
def sum_by_messages(net: Any) -> None:
    """Beside a replica's own collectives, a lane's sums would be in no order with them."""
    work = net.all_reduce(torch.ones(1))
    assert not isinstance(work, NativeCollective)
    work.wait()


def sum_in_a_column(net: Any) -> None:
    pairs = [[rank, rank + net.world_size // 2] for rank in range(net.world_size // 2)]
    column = MeshSharding(tuple(pairs[net.rank % len(pairs)]), net.world_size).column(net)
    work = column.all_reduce(torch.ones(1))
    assert isinstance(work, NativeCollective)
    assert work.wait() == 2
    column.spawn_lane(sum_by_messages).join()
    net.barrier().wait()  # rank 2 passes rank 3's ticket on, though it is in another column


def test_columns_sum_by_torchs_collectives_in_the_training_thread() -> None:
    NativeWorld().run(4, sum_in_a_column)


# ---- what cannot work ----
REFUSED: dict[str, str] = {
    "allreduce": "must exchange weights, got 'allreduce' with",
    "sgp": "which exchanges gradients, as FSDP does by itself",
    "wagma": "must not depend on which rank comes first, as they",
    "uneven": "choose sizes that the number of ranks divides",
    "whole mesh": 'use replicas=mesh["replica"]',
    "no mesh": "replicas must be one dimension of a DeviceMesh",
    "not all": "a dimension of a mesh that holds every rank once, with rank 0",
    "turned": "with rank 0 in the first replica, got 2,0 on ranks 0 and 2",
    "shards": "sharded within its replica alone",
    "no shard mesh": "use fully_shard(module, mesh=mesh",
    "no replicas": 'replicas=mesh["replica"]',
}


def begin(case: str) -> None:
    mesh = make_mesh()
    algorithms = {
        "allreduce": dsgd.AllReduce(),
        "sgp": dsgd.SGP(node_size=2),
        "wagma": dsgd.WAGMA(group_size=2),
    }
    turned = [2, 0] if dist.get_rank() % 2 == 0 else [3, 1]
    replicas = {
        "whole mesh": mesh,
        "no mesh": [0, 2],
        "not all": mesh_of([0, 1, 2]),
        "turned": mesh_of(turned),
        "shards": mesh["shard"],
        "no replicas": None,
    }
    model, optimizer = make(mesh)
    if case in ("wagma", "uneven"):
        model, optimizer = make_parallel(mesh, 7 if case == "uneven" else 8)
    if case == "no shard mesh":
        model = Network()
        fully_shard(model)
        optimizer = optimizer_of(model, "sgd")
    with decentralized(
        *(model, optimizer, algorithms.get(case, dsgd.LocalSGD())),
        replicas=replicas.get(case, mesh["replica"]),
        timeout_s=20.0,
    ):
        pass


def mesh_of(ranks: list[int]) -> Any:
    return type("Mesh", (), {"mesh": torch.tensor(ranks), "ndim": 1})()


def refuse_all() -> dict[str, str]:
    said = {}
    for case in REFUSED:
        try:
            begin(case)
        except ValueError as error:
            said[case] = str(error)
    return said


def test_what_cannot_work_is_refused_on_every_rank() -> None:
    for said in run(4, refuse_all):
        assert said.keys() == REFUSED.keys()
        for case, text in REFUSED.items():
            assert text in said[case]


def test_a_scaler_is_refused_with_the_way_out() -> None:
    model = Network()
    with pytest.raises(ValueError, match="must be trained without a GradScaler"):
        decentralized(
            *(model, optimizer_of(model, "sgd"), dsgd.LocalSGD()),
            scaler=torch.amp.GradScaler("cpu"),
            replicas=object(),
        )
