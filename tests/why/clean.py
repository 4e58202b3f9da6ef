"""Clean runs of many kinds, watched: none may be called stuck.

    python -m tests.why.clean            # all kinds with 2, 3 and 4 ranks; prints the count
    python -m tests.why.clean compile 2  # those whose name holds this, with 2 ranks

Ranks are forks of this process, which has loaded torch and Lightning for all of them; recorder and
watcher are the real ones.  What is long takes 2.5 times what would be too long for a rank that does
nothing.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import lightning_dsgd  # noqa: F401 - registers the strategies
from lightning_dsgd.why.job import INSIDE, environment
from lightning_dsgd.why.watch import Watch

STUCK_AFTER_S: Final = 2.0
LONG_S: Final = 2.5 * STUCK_AFTER_S
BEAT_S: Final = 0.2
WITHIN_S: Final = 240.0

Kind = Callable[[Path], None]
KINDS: Final[dict[str, Kind]] = {}


def kind(function: Kind) -> Kind:
    KINDS[function.__name__] = function
    return function


def compute(seconds: float) -> None:
    """Computes for some time."""
    until = time.monotonic() + seconds
    x = torch.randn(64, 64)
    while time.monotonic() < until:
        x = torch.tanh(x @ x)


def joined() -> int:
    dist.init_process_group("gloo")
    return dist.get_rank()


def train(
    steps: int = 20,
    before: Callable[[int], None] = lambda step: None,
    **options: Any,
) -> DistributedDataParallel:
    model = DistributedDataParallel(torch.nn.Linear(8, 8), **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(steps):
        before(step)
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    return model


def on_rank_0(step: int, do: Callable[[], Any]) -> Callable[[int], None]:
    def before(now: int) -> None:
        if now == step and dist.get_rank() == 0:
            do()

    return before


# ---- plain PyTorch ----


@kind
def ddp(_: Path) -> None:
    joined()
    train(200)


@kind
def ddp_with_a_long_first_step_on_all_ranks(_: Path) -> None:
    joined()
    train(before=lambda step: compute(LONG_S if step == 0 else 0))


@kind
def ddp_with_a_long_validation_on_rank_0(_: Path) -> None:
    joined()
    train(before=on_rank_0(10, lambda: compute(LONG_S)))


@kind
def ddp_that_waits_for_rank_0_in_a_barrier(_: Path) -> None:
    joined()
    train(before=on_rank_0(10, lambda: compute(LONG_S)))
    dist.barrier()


@kind
def ddp_that_prepares_data_on_rank_0_before_joining(_: Path) -> None:
    if os.environ["RANK"] == "0":
        compute(LONG_S)
    joined()
    train()


@kind
def ddp_with_big_checkpoints(folder: Path) -> None:
    joined()
    big = torch.zeros(20_000_000)

    def save() -> None:
        until = time.monotonic() + LONG_S
        while time.monotonic() < until:
            torch.save(big, folder / "big.pt")

    train(before=on_rank_0(10, save))


@kind
def ddp_that_compiles(_: Path) -> None:
    joined()
    model = torch.compile(
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), backend="eager"
    )
    wrapped = DistributedDataParallel(model)
    for _step in range(20):
        wrapped(torch.ones(2, 8)).sum().backward()


@kind
def ddp_that_is_compiled_whole(_: Path) -> None:
    joined()
    wrapped = torch.compile(DistributedDataParallel(torch.nn.Linear(8, 8)), backend="eager")
    for _step in range(20):
        wrapped(torch.ones(2, 8)).sum().backward()


@kind
def ddp_that_is_copied_and_saved(_: Path) -> None:
    """What records its steps is no part of the model."""
    joined()
    model = train(5)
    made = io.BytesIO()
    torch.save(model, made)
    assert b"lightning_dsgd" not in made.getvalue()
    copy.deepcopy(model.module)


@kind
def ddp_with_a_hook_that_is_registered_later(_: Path) -> None:
    joined()
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    seen = []

    def averages(state: Any, bucket: Any) -> Any:
        seen.append(bucket)
        return default_hooks.allreduce_hook(state, bucket)

    model.register_comm_hook(None, averages)
    for _step in range(5):
        model(torch.ones(2, 8)).sum().backward()
    assert len(seen) == 5


@kind
def two_ddps_that_take_turns(_: Path) -> None:
    joined()
    models = [DistributedDataParallel(torch.nn.Linear(8, 8)) for _ in range(2)]
    for step in range(40):
        models[step % 2](torch.ones(2, 8)).sum().backward()


@kind
def ddp_with_a_slow_rank(_: Path) -> None:
    rank = joined()
    train(30, before=lambda step: time.sleep(0.1 * (rank == 1)))


@kind
def ddp_with_steps_as_long_as_the_limit(_: Path) -> None:
    joined()
    train(4, before=lambda step: compute(STUCK_AFTER_S))


@kind
def ddp_with_loader_workers(_: Path) -> None:
    joined()
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    loader = DataLoader(TensorDataset(torch.ones(64, 8)), batch_size=4, num_workers=2)
    for _epoch in range(2):
        for (batch,) in loader:
            model(batch).sum().backward()


@kind
def ddp_with_slow_loader_workers(_: Path) -> None:
    joined()
    model = DistributedDataParallel(torch.nn.Linear(8, 8))

    def collate(rows: list[Any]) -> Any:
        compute(0.3)
        return torch.stack([row for (row,) in rows])

    data = TensorDataset(torch.ones(32, 8))
    for batch in DataLoader(data, batch_size=4, num_workers=1, collate_fn=collate):
        model(batch).sum().backward()


@kind
def ddp_with_join_and_uneven_batches(_: Path) -> None:
    rank = joined()
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    with model.join():
        for _step in range(10 + 10 * (rank == 0)):
            model(torch.ones(2, 8)).sum().backward()


@kind
def ddp_with_accumulation(_: Path) -> None:
    joined()
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    for step in range(40):
        with contextlib.nullcontext() if step % 8 == 7 else model.no_sync():
            model(torch.ones(2, 8)).sum().backward()


@kind
def ddp_with_a_profiler(_: Path) -> None:
    joined()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        train(50)


@kind
def ddp_with_a_profiler_of_python(_: Path) -> None:
    import cProfile

    joined()
    cProfile.runctx("train(50)", globals(), {})


@kind
def ddp_with_unused_parameters(_: Path) -> None:
    joined()
    train(find_unused_parameters=True)


@kind
def fsdp_with_a_long_validation_on_rank_0(_: Path) -> None:
    joined()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = [torch.nn.Linear(8, 8) for _ in range(3)]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    model = fully_shard(torch.nn.Sequential(*layers), mesh=mesh)
    before = on_rank_0(10, lambda: compute(LONG_S))
    for step in range(20):
        before(step)
        model(torch.ones(2, 8)).sum().backward()


@kind
def groups_of_two_kinds(_: Path) -> None:
    rank, size = joined(), dist.get_world_size()
    groups = [dist.new_group([0, 1]), dist.new_group(range(size))]
    for _step in range(100):
        if rank < 2:
            dist.all_reduce(torch.ones(4), group=groups[0])
        dist.all_reduce(torch.ones(4), group=groups[1])


@kind
def collectives_in_the_background(_: Path) -> None:
    joined()
    x = torch.ones(100)
    for _step in range(50):
        work = dist.all_reduce(x, async_op=True)
        compute(0.02)
        work.wait()


@kind
def objects_and_messages(_: Path) -> None:
    rank, size = joined(), dist.get_world_size()
    for step in range(30):
        held: list[Any] = [None] * size
        dist.all_gather_object(held, (rank, step))
        if rank == 0:
            dist.send(torch.ones(2), 1)
        elif rank == 1:
            dist.recv(torch.ones(2), 0)


@kind
def a_rank_that_only_serves_messages(_: Path) -> None:
    """Rank 0 waits long, outside of collectives, for what rank 1 computes."""
    rank = joined()
    if rank == 1:
        compute(LONG_S)
        dist.send(torch.ones(2), 0)
    elif rank == 0:
        dist.recv(torch.ones(2), 1)
    dist.barrier()


@kind
def group_ended_and_begun_again(_: Path) -> None:
    joined()
    train(10)
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    joined()
    train(10)


@kind
def one_rank_that_ends_later(_: Path) -> None:
    rank = joined()
    train(10)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        compute(LONG_S)


# ---- Lightning ----


class Model(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = super().training_step(batch, batch_idx)
        self.log("loss", out["loss"], sync_dist=True, on_step=True, on_epoch=True)
        return out

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        out = super().validation_step(batch, batch_idx)
        self.log("val", out["x"], sync_dist=True)
        return out


class ComputesLongOnRank0(pl.Callback):
    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero and not trainer.sanity_checking:
            compute(LONG_S)


def fit(folder: Path, strategy: Any = "ddp", model: Model | None = None, **options: Any) -> None:
    given = {"max_epochs": 1, "limit_train_batches": 20, "limit_val_batches": 2} | options
    pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **given,
    ).fit(model or Model())


@kind
def lightning(folder: Path) -> None:
    fit(folder, max_epochs=2)


@kind
def lightning_that_computes_long_on_rank_0(folder: Path) -> None:
    fit(folder, callbacks=[ComputesLongOnRank0()])


@kind
def lightning_with_checkpoints_and_early_stopping(folder: Path) -> None:
    stops = EarlyStopping("val", patience=1)
    saves = ModelCheckpoint(folder / "saved", every_n_train_steps=5, save_top_k=-1)
    fit(folder, max_epochs=3, callbacks=[stops, saves])


@kind
def lightning_with_accumulation_and_a_profiler(folder: Path) -> None:
    fit(folder, accumulate_grad_batches=4, profiler="simple")


@kind
def local_sgd(folder: Path) -> None:
    fit(folder, "local_sgd")


@kind
def balanced(folder: Path) -> None:
    fit(folder, "balanced")


class OneDataSet(Model):
    """Rank 0 has twice as many batches, drawn from a data set that all ranks have."""

    def train_dataloader(self) -> Any:
        rows = [*torch.ones(40, 32)]
        mine = range(20) if os.environ["RANK"] == "0" else range(20, 30)
        return DataLoader(rows, batch_size=1, sampler=[*mine])


class OwnData(Model):
    """Rank 0 has twice as many batches, of its own data."""

    def train_dataloader(self) -> Any:
        num_rows = 20 if os.environ["RANK"] == "0" else 10
        return DataLoader([*torch.ones(num_rows, 32)], batch_size=1)


@kind
def balanced_with_uneven_samplers(folder: Path) -> None:
    fit(folder, "balanced", OneDataSet(), use_distributed_sampler=False)


@kind
def wagma_with_uneven_loaders(folder: Path) -> None:
    fit(folder, "wagma", OwnData(), use_distributed_sampler=False)


@kind
def wagma_with_uneven_work(folder: Path) -> None:
    class Uneven(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            time.sleep(0.1 * (trainer.global_rank == 1))

    fit(folder, "wagma", callbacks=[Uneven()])


# ---- Fabric ----


@kind
def fabric(_: Path) -> None:
    size = int(os.environ["WORLD_SIZE"])
    each = Fabric(accelerator="cpu", devices=size, strategy="ddp")
    each.launch()
    model = torch.nn.Linear(8, 8)
    model, optimizer = each.setup(model, torch.optim.SGD(model.parameters(), 0.01))
    for step in range(20):
        if step == 10 and each.global_rank == 0:
            compute(LONG_S)
        each.backward(model(torch.ones(2, 8)).sum())
        optimizer.step()
        optimizer.zero_grad()
    each.barrier()


# ---- watching them ----


@contextlib.contextmanager
def in_environment(changes: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ |= changes
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before


def watch(name: str, num_ranks: int, folder: Path) -> tuple[list[str], int]:
    """Runs one kind and watches it: what was said but of ranks that are late, and its status."""
    if str(INSIDE) not in sys.path:
        sys.path.insert(0, str(INSIDE))
    from lightning_dsgd_rank import entering

    records = folder / "records"
    records.mkdir()
    watcher = Watch(records, STUCK_AFTER_S, BEAT_S, time.monotonic, lambda text: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    common = environment(os.environ, records, BEAT_S, with_steps=True) | {
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)},
        **{"LOCAL_WORLD_SIZE": str(num_ranks), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "clean"},
    }
    running = set()
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            _run_rank(name, rank, common, folder, entering)
        running.add(pid)
    status, deadline = 0, time.monotonic() + WITHIN_S
    try:
        while running:
            watcher.look()
            for pid in list(running):
                done, how = os.waitpid(pid, os.WNOHANG)
                if done:
                    running.remove(pid)
                    status = status or os.waitstatus_to_exitcode(how)
            assert time.monotonic() < deadline, f"{name} has not ended"
            time.sleep(0.1)  # between two looks
    finally:
        for pid in running:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
    watcher.end(status)
    said = [told["lines"][0] for told in watcher.told if not told["is_late_only"]]
    return said, status


def _run_rank(name: str, rank: int, common: dict[str, str], folder: Path, entering: Any) -> None:
    code = 1
    try:
        os.environ |= common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        log = os.open(folder / f"log_{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        torch.set_num_threads(1)
        entering.enter()
        KINDS[name](folder)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        # As at the end of a program: what the recorder has registered is called.
        import atexit

        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    sizes = [int(size) for size in sys.argv[2:]] or [2, 3, 4]
    alarms = failed = count = 0
    for name in [name for name in KINDS if part in name]:
        for num_ranks in sizes:
            with tempfile.TemporaryDirectory() as folder:
                begin_s = time.monotonic()
                said, status = watch(name, num_ranks, Path(folder))
                took_s = time.monotonic() - begin_s
            count += 1
            alarms += bool(said)
            failed += bool(status)
            print(f"{name} {num_ranks}: {took_s:.0f} s, status {status}", *said, flush=True)
    load = os.getloadavg()[0]
    print(f"{count} clean runs, {alarms} with an alarm, {failed} failed; load {load:.0f}")


if __name__ == "__main__":
    main()
