"""Predictions beside measurements: the strategies of a result file of `benchmarks throughput`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from lightning_dsgd.algorithms import ALGORITHMS
from lightning_dsgd.hyperparameters import parse
from lightning_dsgd.lab.simulate.machines import Machine
from lightning_dsgd.lab.simulate.model import run

_DDP: Final = "ddp"
"""The name of Lightning's own strategy, which is predicted by the all-reduce."""


def check(
    result: dict[str, Any], changed: Callable[[Machine], Machine] = lambda machine: machine
) -> tuple[list[dict[str, Any]], float]:
    """Returns measured and predicted steps per second of each strategy of a result file.

    The computation gets the time added that a step takes on this machine besides the sleep: as
    much as `no_sync`, which sends nothing, was slower than its stragglers explain.

    Args:
        result: the result of `benchmarks throughput`
        changed: gives the machine to predict for, from the one that the result's settings describe

    Returns:
        The rows, and that time in seconds.
    """
    try:
        machine = changed(_machine(result["settings"]))
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
        if spec == _DDP or parse(spec)[0] in ALGORITHMS:
            row["predicted"] = predict(spec, world_size, machine, steps, rounds)
        rows.append(row)
    return rows, overhead_s


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

    A round's index is the seed of its stragglers.
    """
    name = "allreduce" if spec == _DDP else spec
    return statistics.median(
        run(name, world_size, machine, num_steps, seed).slowest_steps_per_s for seed in rounds
    )


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
