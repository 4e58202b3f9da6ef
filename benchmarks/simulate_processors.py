"""Whether the processor time that a probe has measured makes predictions better.

    lightning-dsgd probe --ranks 4 --network 1gbit --output cluster.json
    python benchmarks/simulate_processors.py cluster.json

Predicts the measurements on emulated links that docs/simulate.md shows (4, 8 and 16 ranks on 2
cores) without processor time, as they are predicted there, and with that of the probe.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_dsgd.probe.cluster import Cluster
from lightning_dsgd.results import provenance, write_result
from lightning_dsgd.simulate.check import check

MEASURED = Path("docs/results/simulate")


def compare(cluster: Cluster, ranks: int) -> list[dict[str, Any]]:
    """One row for each strategy: predicted over measured, without and with processor time."""
    result = json.loads((MEASURED / f"emulated_{ranks}.json").read_text())
    busy = {
        "processor": cluster.processor, "cores": result["cores"], "machine_size": ranks,
    }  # fmt: skip
    plain, _ = check(result)
    ours, _ = check(result, lambda machine: replace(machine, **busy))
    return [
        {
            "ranks": ranks,
            "strategy": a["strategy"],
            "measured": a["measured"],
            "without": a["predicted"] / a["measured"],
            "with": b["predicted"] / b["measured"],
        }
        for a, b in zip(plain, ours, strict=True)
        if a["predicted"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cluster", type=Path)
    parser.add_argument("--ranks", default="4,8,16")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("docs/results/know_before_you_choose/simulate_processors.json"),
    )
    args = parser.parse_args()
    cluster, rows = Cluster.read(args.cluster), []
    for ranks in map(int, args.ranks.split(",")):
        rows += compare(cluster, ranks)
    for row in rows:
        print(f"{row['ranks']:3} {row['strategy']:16}{row['without']:6.2f}{row['with']:6.2f}")
    write_result(provenance() | {"cluster": cluster.to_json(), "rows": rows}, args.output)


if __name__ == "__main__":
    main()
