"""Loss against bytes and virtual seconds of what follows DiLoCo: language, hundreds of local steps.

    python benchmarks/local_updates.py

Four ranks of the simulated world train a causal language model of 1.1 million weights on the
sources of Python's standard library for 1000 steps: a linear warm-up over 50, then a cosine to a
tenth.  A step takes a second, and a sum of all weights ten.  The inner optimizer is AdamW, or
Muon where a strategy ends in "@muon".  Each strategy is tried with both learning rates and the
first seed; the other seeds have the one with the lower loss.  The loss is the consensus's on 400
pieces that are not trained on; the bytes are those of the rank that sends the most.

A quarter of a run is saved once it is made, and nothing that is there is made again: the command
can be interrupted, and given a part of the strategies, learning rates and seeds.
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import script
from benchmarks.text_pieces import pieces
from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.lab.in_force import in_force
from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.replica.replica import Replica
from lightning_dsgd.simulated import SimulatedWorld
from lightning_dsgd.tasks.language import CausalLanguageModel

RANKS, STEPS, WARMUP, SEQ_LEN, BATCH = 4, 1000, 50, 32, 4
EVALUATED = 400
ALL_REDUCE_S = 10.0
STREAMING = "diloco:sync_period=30:outer_lr=0.4:num_fragments=2:overlap_steps=5"
STRATEGIES = [
    "allreduce",
    "local_sgd:sync_period=30",
    "diloco:sync_period=30",
    "sparse_loco",
    "noloco:sync_period=30",
    f"{STREAMING}:fragments=layers:mixing=0.5:wire_dtype=e3m0",
    f"{STREAMING}:wire_dtype=int4",
    "diloco:sync_period=30@muon",
    "diloco:sync_period=30:wire_dtype=2bit@muon",
    "diloco:sync_period=30:wire_dtype=2bit",
    "allreduce@muon",
    "sparse_loco:local_steps=100",
    "diloco:sync_period=100",
    "diloco:sync_period=100@muon",
    "diloco:sync_period=300@muon",
    "diloco:sync_period=500@muon",
    "diloco:sync_period=500",
]
LRS = [0.003, 0.006]


def share(step: int) -> float:
    """The learning rate, of the peak."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.55 + 0.45 * math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))


def new_model(inner: str = "adamw") -> CausalLanguageModel:
    return CausalLanguageModel(dim=208, depth=2, seq_len=SEQ_LEN, optimizer=inner, weight_decay=0.1)


def train(
    net: Any, key: dict[str, Any], data: dict[str, Tensor], saved: list[dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, float]]:
    """A quarter of a run, from where the one before has ended: its state, and its figures."""
    strategy, _, inner = key["strategy"].partition("@")
    with torch.random.fork_rng():
        torch.manual_seed(key["seed"])
        model = new_model(inner or "adamw")
    generator = torch.Generator().manual_seed(1000 * key["seed"] + net.rank)
    optimizer, state = model.configure_optimizers(), saved[net.rank]
    if state:
        model.load_state_dict(state["model"])
    replica = Replica(net, model, [optimizer], make_algorithm(strategy))
    if state:
        replica.load_state_dict(state["replica"], state["names"])
        optimizer.load_state_dict(state["optimizer"])
        generator.set_state(state["generator"])
    begin, before = net.now(), net.counters.bytes_sent

    def loss(of: Tensor) -> Tensor:
        return nn.functional.cross_entropy(*model.logits_and_targets(of, None))

    first = state.get("step", 0)
    for step in range(first, first + STEPS // 4):
        for group in optimizer.param_groups:
            group["lr"] = key["lr"] * share(step)
        optimizer.zero_grad()
        picked = torch.randint(len(data["train"]), (BATCH,), generator=generator)
        loss(data["train"][picked]).backward()
        net.compute(1.0)
        replica.before_update(optimizer)
        optimizer.step()
        replica.after_update(optimizer)
    figures = {"seconds": net.now() - begin, "mb": (net.counters.bytes_sent - before) / 1e6}
    replica.show_consensus()
    if net.rank == 0:
        with torch.no_grad():
            figures["loss"] = float(loss(data["val"][:EVALUATED]))
    replica.show_own()
    end = {
        "step": first + STEPS // 4,
        "model": model.state_dict(),
        "replica": replica.state_dict(),
        "names": replica.names(),
        "optimizer": optimizer.state_dict(),
        "generator": generator.get_state(),
    }
    end = copy.deepcopy(end)
    replica.stop()
    return end, figures


def measure(key: dict[str, Any], data: dict[str, Tensor], folder: Path) -> dict[str, Any]:
    """A run, of which all quarters that were made before are in the folder."""
    file = folder / f"{key['strategy']}_{key['lr']}_{key['seed']}.pt"
    weights = sum(p.numel() for p in new_model().parameters())
    saved: list[dict[str, Any]] = [{}] * RANKS
    points: list[dict[str, float]] = []
    if file.exists():
        saved, points = torch.load(file, weights_only=False)
    while len(points) < 4:
        sum_bytes = 2 * (RANKS - 1) / RANKS * 4 * weights
        world = SimulatedWorld(RANKS, 0.01, bandwidth_bytes_s=sum_bytes / ALL_REDUCE_S)
        saved, figures = map(list, zip(*world.run(train, key, data, saved), strict=True))
        before = points[-1] if points else {"seconds": 0.0, "mb": 0.0}
        most = {name: max(each[name] for each in figures) for name in ("seconds", "mb")}
        points.append(
            {
                "step": saved[0]["step"],
                "seconds": round(before["seconds"] + most["seconds"], 1),
                "mb": round(before["mb"] + most["mb"], 3),
                "loss": round(figures[0]["loss"], 4),
            }
        )
        folder.mkdir(parents=True, exist_ok=True)
        torch.save((saved, points), file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)
    return {**key, "weights": weights, "points": points}


def rows(runs: list[dict[str, Any]]) -> list[str]:
    """A table's rows: the end of each strategy, at its better learning rate."""
    lines = []
    for spec in dict.fromkeys(run["strategy"] for run in runs):
        own = [run for run in runs if run["strategy"] == spec]
        best = min((r for r in own if r["seed"] == 0), key=lambda r: float(r["points"][-1]["loss"]))
        ends = [run["points"][-1] for run in own if run["lr"] == best["lr"]]
        losses = ", ".join(f"{end['loss']:.3f}" for end in ends)
        lines.append(
            f"| `{spec}` | {losses} | {ends[0]['mb']:.2f} | {ends[0]['seconds']:.0f} "
            f"| {best['lr']:g} |"
        )
    return lines


def main() -> None:
    parser = script.parser(__doc__, "docs/results/diloco/local_updates.json")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--lrs", type=float, nargs="+", default=LRS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--most", type=int, help="how many runs to make; by default all")
    parser.add_argument("--folder", type=Path, default=Path("build/local_updates"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = json.loads(args.output.read_text())["runs"] if args.output.exists() else []
    left, data = args.most, {name: pieces(name, seq_len=SEQ_LEN) for name in ("train", "val")}
    for seed in args.seeds:
        for spec in args.strategies:
            own = [run for run in runs if run["strategy"] == spec and run["seed"] == 0]
            lrs = args.lrs
            if seed and own:
                lrs = [min(own, key=lambda r: float(r["points"][-1]["loss"]))["lr"]]
            for lr in lrs:
                key = {"strategy": spec, "lr": lr, "seed": seed}
                if any(key.items() <= run.items() for run in runs) or left == 0:
                    continue
                left = left and left - 1
                runs.append(measure(key, data, args.folder))
                print(runs[-1], flush=True)
                made = provenance("python benchmarks/local_updates.py")
                settings = {"ranks": RANKS, "steps": STEPS, "batch": BATCH, "seq_len": SEQ_LEN}
                specs = [run["strategy"].partition("@")[0] for run in runs]
                made["hyperparameters"] = in_force(specs, [RANKS])
                write_result(made | {"settings": settings, "runs": runs}, args.output)
    print("\n".join(rows(runs)))


if __name__ == "__main__":
    main()
