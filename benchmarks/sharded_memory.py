"""Memory that each algorithm takes of a rank beside plain FSDP2, in shards of the weights.

    python benchmarks/sharded_memory.py --output docs/results/sharded/memory.json

2 replicas x 2 shards, four processes on this machine, fp32 and plain SGD.  Every rank notes by how
much its resident memory grows at most, from before the model is made (VmRSS) to the last of some
steps (VmHWM, set back before).  By how much it grows with plain FSDP2 is subtracted, and the rest
divided by the bytes of a rank's shard.  The largest of the four ranks counts.  glibc is told to
give every freed tensor back at once.  "copy" is the fallback where x cannot alias the shards.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lightning_dsgd as dsgd
from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.sharded import shards

RANKS, REPLICAS = 4, 2
ALGORITHMS: dict[str, Any] = {
    "no_sync": dsgd.NoSync,
    "no_sync, copy": dsgd.NoSync,
    "local_sgd": lambda: dsgd.LocalSGD(sync_period=4),
    "diloco": lambda: dsgd.DiLoCo(sync_period=4, outer_lr=1.0, outer_momentum=0.5),
    "dpsgd": dsgd.DPSGD,
    "sgp": dsgd.SGP,
    "sgp:overlap=1": lambda: dsgd.SGP(overlap=1),
    "wagma": lambda: dsgd.WAGMA(group_size=2),
    "hpsgd": dsgd.HPSGD,
    "adpsgd": dsgd.ADPSGD,
    "popsgd": dsgd.PopSGD,
    "popsgd:blocking=true": lambda: dsgd.PopSGD(blocking=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=6, help="that are measured")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    # Read when a process starts; without it, freed memory stays resident and hides what is needed.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "262144"
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (folder, args), nprocs=RANKS)
        ranks = [torch.load(f"{folder}/{rank}.pt") for rank in range(RANKS)]
    plain, shard = [rank["plain"] for rank in ranks], ranks[0]["shard"]
    rows = []
    for name in ALGORITHMS:
        extra = [(rank[name] - rank["plain"]) / shard for rank in ranks]
        rows.append(
            {
                "algorithm": name,
                "extra_shards": round(max(extra), 2),
                "of_each_rank": [round(value, 2) for value in extra],
            }
        )
        print(f"{name:24} {max(extra):5.2f} shards")
    options = vars(args) | {"output": str(args.output)}
    result = {"options": options, "shard_bytes": shard, "plain_bytes": plain, "rows": rows}
    write_result(provenance() | result, args.output)


def join(rank: int, folder: str) -> Any:
    """The mesh of replicas and shards, once all ranks are there."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    limit = timedelta(seconds=300)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
    shape = (REPLICAS, RANKS // REPLICAS)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))


def sharded_model(mesh: Any, args: argparse.Namespace) -> nn.Module:
    """Some layers, sharded by FSDP2; the same weights each time."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(args.width, args.width) for _ in range(args.depth)))
    for layer in model:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return model


def run(rank: int, folder: str, args: argparse.Namespace) -> None:
    """All cases on one rank, one after the other."""
    mesh = join(rank, folder)
    grown: dict[str, int] = {}
    # The first two, of which nothing is kept, load all that is needed.
    for name in ["plain", "wagma", "plain", *ALGORITHMS]:
        gc.collect()
        dist.barrier()
        grown[name], grown["shard"] = case(name, mesh, args)
        if rank == 0:
            print(f"{name}: {grown[name] / grown['shard']:.2f} shards in all", flush=True)
    torch.save(grown, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def case(name: str, mesh: Any, args: argparse.Namespace) -> tuple[int, int]:
    """By how many bytes the memory grows, and how many a shard has."""
    before = resident("VmRSS")
    model = sharded_model(mesh, args)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    training: Any = contextlib.nullcontext()
    is_as_tested = shards._is_as_tested
    if name in ALGORITHMS:
        if name.endswith("copy"):
            shards._is_as_tested = lambda _: False
        training = dsgd.decentralized(
            model, optimizer, ALGORITHMS[name](), replicas=mesh["replica"], timeout_s=300
        )
    with training:
        step(model, optimizer, args, 5)
        Path("/proc/self/clear_refs").write_text("5")
        step(model, optimizer, args, args.steps)
        peak = resident("VmHWM")
    shards._is_as_tested = is_as_tested
    shard = sum(shards.local(parameter).nbytes for parameter in model.parameters())
    return peak - before, shard


def step(model: nn.Module, optimizer: Any, args: argparse.Namespace, num_steps: int) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(4, args.width)).square().mean().backward()
        optimizer.step()


def resident(what: str) -> int:
    """This process's memory, in bytes."""
    [line] = [t for t in Path("/proc/self/status").read_text().splitlines() if what in t]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
