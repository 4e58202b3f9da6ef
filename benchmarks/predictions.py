"""Predictions of the simulated world beside measurements.

    python benchmarks/predictions.py docs/results/simulate/emulated_4.json --output predicted.json
    python benchmarks/predictions.py docs/results/simulate/turns_8.json

The first is a result of `benchmarks throughput`.  It is predicted with the same sleep, parameters,
ranks, link and seeds, and counted until the slowest rank has finished, as it was measured.

In the second all strategies took turns on emulated nodes that shared 2 cores, with steps of known
times.  It is predicted as `why --link` does: from the steps, the link and `usual_costs`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from lightning_dsgd.algorithms import ALGORITHMS
from lightning_dsgd.hyperparameters import parse
from lightning_dsgd.lab import decisions
from lightning_dsgd.lab.diagnose.elsewhere import LATENCY_S
from lightning_dsgd.lab.diagnose.in_ddps_place import dealt
from lightning_dsgd.lab.epochs import CLAIMED
from lightning_dsgd.lab.link import Link
from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.lab.simulate.machines import Machine, Recorded, delayed_ranks
from lightning_dsgd.lab.simulate.model import run
from lightning_dsgd.lab.simulate.processors import usual_costs

_CORES: Final = 2
_RECORDED_STEPS: Final = 60
_AS_MEASURED: Final = {"local_sgd": "local_sgd:sync_period=8"}
"""What a name stood for, where a result has no record of hyperparameters."""


def check(result: dict[str, Any]) -> tuple[list[dict[str, Any]], float]:
    """Returns measured and predicted steps per second of each strategy of a result file.

    The computation gets the time added that a step takes on this machine besides the sleep: as
    much as `no_sync`, which sends nothing, was slower than its stragglers explain.

    Args:
        result: the result of `benchmarks throughput`

    Returns:
        The rows, and that time in seconds.
    """
    try:
        machine = _machine(result["settings"])
        world_size, steps = result["settings"]["ranks"], result["settings"]["steps"]
        rounds = sorted({cell["round"] for cell in result["cells"]})
        measured = {row["strategy"]: row["steps_per_s"] for row in result["summary"]}
    except KeyError as err:
        raise ValueError(
            "a result file must be one of `python -m benchmarks throughput` with its settings, "
            f"got one without {err}"
        ) from err
    overhead_s = 0.0
    if "no_sync" in measured:
        bare = predict("no_sync", world_size, machine, steps, rounds)
        overhead_s = max(0.0, 1 / measured["no_sync"] - 1 / bare)
        machine = replace(machine, compute_s=machine.compute_s + overhead_s)
    rows = []
    for spec, steps_per_s in measured.items():
        row: dict[str, Any] = {"strategy": spec, "measured": steps_per_s, "predicted": None}
        if spec == decisions.DDP or parse(spec)[0] in ALGORITHMS:
            row["predicted"] = predict(_meant(spec, result), world_size, machine, steps, rounds)
        rows.append(row)
    return rows, overhead_s


def _meant(spec: str, result: dict[str, Any]) -> str:
    """Returns the strategy that a result has measured, in today's words."""
    return spec if "hyperparameters" in result else _AS_MEASURED.get(spec, spec)


def _machine(settings: dict[str, Any]) -> Machine:
    network = settings["network"]
    rate = network["rate_bit_s"]
    return Machine(
        latency_s=network["latency_s"] or 0.0,
        bandwidth_bytes_s=rate / 8 if rate else math.inf,
        compute_s=settings["compute_s"],
        num_params=int(float(settings["params"])),
        delay_s=settings["delay_s"],
        delayed_ranks=settings["delayed_ranks"],
    )


def predict(
    spec: str, world_size: int, machine: Machine, num_steps: int, rounds: Sequence[int]
) -> float:
    """Predicts steps per second as `benchmarks throughput` does: the median over the rounds.

    A round's index is the seed of its stragglers.  The all-reduce predicts Lightning's `ddp`.
    """
    name = "allreduce" if spec == decisions.DDP else spec
    return statistics.median(
        run(name, world_size, machine, num_steps, seed).slowest_steps_per_s for seed in rounds
    )


def of_turns(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns measured and predicted steps per second of strategies that have taken turns."""
    settings, rows = result["settings"], []
    size, steps = settings["ranks"], settings["steps"]
    for situation in result["situations"]:
        kind, link = situation["kind"], Link.parse(situation["network"], latency_s=LATENCY_S)
        rates = {row["strategy"]: row["measured"] for row in situation["rows"]}
        machine = Machine(
            link.latency_s,
            link.bytes_s,
            0.0,
            settings["params"],
            recorded=Recorded(tuple(_of_kind(kind, rank, size, settings) for rank in range(size))),
            step_core_s=situation["rows"][0]["step_core_s"],
            costs=usual_costs(_CORES, size),
        )
        # Since then strategies can claim batches, and all steps are one epoch.
        claims = any(dealt(spec).data == CLAIMED for spec in rates)
        epoch_steps = steps if claims else None

        def rate(
            spec: str, machine: Machine = machine, epoch_steps: int | None = epoch_steps
        ) -> float:
            choice = dealt(_meant(spec, result))
            done = run(
                choice.strategy, size, machine, steps, epoch_steps=epoch_steps, data=choice.data
            )
            return done.slowest_steps_per_s

        besides_s = max(0.0, 1 / rates["no_sync"] - 1 / rate("no_sync"))
        for spec, measured in rates.items():
            known = dealt(spec).name in ALGORITHMS
            predicted = 1 / (1 / rate(spec) + besides_s) if known else None
            name = f"{spec}, {situation['network']}, {kind}"
            rows.append({"strategy": name, "measured": measured, "predicted": predicted})
    return rows


def _of_kind(kind: str, rank: int, size: int, settings: dict[str, Any]) -> tuple[float, ...]:
    """Returns the times of a rank's steps: those that were slept."""

    def seconds(step: int) -> float:
        usual: float = settings["step_s"] * random.Random(f"{rank}/{step}").uniform(0.97, 1.03)
        if kind == "random":
            is_late = rank in delayed_ranks(0, step, size, size // 4)
            return usual + (0.8 * settings["step_s"] if is_late else 0.0)
        return usual * (2 if kind == "slow rank" and rank == size - 1 else 1)

    return tuple(map(seconds, range(_RECORDED_STEPS)))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a table in Markdown."""
    lines = [
        "| strategy | measured, steps/s (slowest rank) | predicted | ratio |",
        "|---|---|---|---|",
    ]
    for row in rows:
        measured, predicted = row["measured"], row["predicted"]
        figures = f"{predicted:.3f} | {predicted / measured:.2f}" if predicted else "not ours |"
        lines.append(f"| `{row['strategy']}` | {measured:.3f} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("measured", type=Path, help="a result file of `benchmarks throughput`")
    parser.add_argument("--output", type=Path, help="the result file to write")
    args = parser.parse_args()
    result = json.loads(args.measured.read_text())
    if "situations" in result:
        rows = of_turns(result)
        ratios = [row["predicted"] / row["measured"] for row in rows if row["predicted"]]
        print(table(rows))
        print(f"\nwithin 10%: {sum(abs(r - 1) <= 0.1 for r in ratios)} of {len(ratios)}")
        return
    rows, overhead_s = check(result)
    print(table(rows))
    print(f"\nadded to each step, as `no_sync` shows it: {1e3 * overhead_s:.1f} ms")
    if args.output:
        report = {"checked": str(args.measured), "rows": rows, "overhead_s": overhead_s}
        write_result(provenance() | report, args.output)


if __name__ == "__main__":
    main()
