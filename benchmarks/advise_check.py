"""Whether the advised strategy is the fastest, and predictions are right: in six situations.

    python benchmarks/advise_check.py --ranks 4

On a fast and on a slow link (network namespaces, which are probed first): all ranks equally fast,
a random rank in four late in each step, one rank that always takes twice as long.  In each, all of
the strategies below take turns, every step a sleep; then all are simulated, and one is advised.
With `--measured FILE` the situations and rates are those of an earlier run, for which all is probed
and predicted anew; of the strategies only `no_sync` runs again, for what a step takes of a core.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from lightning_dsgd.lab.advise import verify
from lightning_dsgd.lab.advise.candidates import BOUND, CANDIDATES
from lightning_dsgd.lab.advise.ranking import rank
from lightning_dsgd.lab.bench.network import Link
from lightning_dsgd.lab.probe import command as probe
from lightning_dsgd.lab.probe.cluster import Cluster, table
from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.lab.simulate.machines import probed
from lightning_dsgd.lab.simulate.recorded import Recorded
from lightning_dsgd.lab.stragglers import delayed_ranks

SPECS = (
    "no_sync", "allreduce", "local_sgd", "sgp:overlap=1", "popsgd", "adpsgd",
    "hpsgd", "wagma", "wagma:overlap=true", "oktopk", "topk_allgather", "topk_dsa", "gtopk",
    "gaussian_topk",
)  # fmt: skip
KINDS = ("even", "random", "slow rank")
RECORDED_STEPS = 60


def recorded(kind: str, ranks: int, step_s: float) -> Recorded:
    """Step times as `StepTrace` would record them."""

    def of(rank: int, step: int) -> float:
        seconds = step_s * random.Random(f"{rank}/{step}").uniform(0.97, 1.03)
        if kind == "random":
            return seconds + 0.8 * step_s * (rank in delayed_ranks(0, step, ranks, ranks // 4))
        return seconds * (2 if kind == "slow rank" and rank == ranks - 1 else 1)

    return Recorded(tuple(tuple(of(r, s) for s in range(RECORDED_STEPS)) for r in range(ranks)))


def probed_link(network: str, ranks: int) -> Cluster:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "cluster.json")
        probe.main(["--ranks", str(ranks), "--network", network, "--output", str(output)])
        return Cluster.read(output)


def check(
    network: str,
    cluster: Cluster,
    kind: str,
    known: dict[str, list[float]],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """One situation: what was advised, measured (unless it is `known`) and predicted."""
    machine = probed(cluster, args.params, 0.0, recorded(kind, args.ranks, args.step_s))
    chosen = [candidate for candidate in CANDIDATES if candidate.spec in args.specs]
    advised = rank(chosen, machine, args.ranks, verify.STEPS).advised.candidate.spec
    link = Link.parse(network)
    specs = [BOUND] if known else args.specs
    measured, core_s = verify.measure(specs, machine, args.ranks, link, args.rounds)
    rows = verify.compare(args.specs, machine, args.ranks, known or measured, core_s)
    rates = {row["strategy"]: row["measured"] for row in rows}
    best = max((spec for spec in rates if spec != BOUND), key=lambda spec: rates[spec])
    of_best = rates[advised] / rates[best]
    print(f"{network}, {kind}: advised {advised}, {of_best:.2f} of the best measured, {best}")
    print(verify.table(rows), flush=True)
    said = {"network": network, "kind": kind, "advised": advised, "best": best}
    return {**said, "of_best": of_best, "rows": rows}


def earlier(file: Path | None, network: str, kind: str) -> dict[str, list[float]]:
    """The rates of an earlier run: by strategy and round."""
    situations = json.loads(file.read_text())["situations"] if file else []
    return {
        row["strategy"]: row["rounds"]
        for situation in situations
        if (situation["network"], situation["kind"]) == (network, kind)
        for row in situation["rows"]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--params", type=int, default=1_000_000)
    parser.add_argument("--step-s", type=float, default=0.2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--networks", default="1gbit,100mbit", help="the fast and the slow one")
    parser.add_argument("--specs", type=lambda text: text.split(","), default=list(SPECS))
    parser.add_argument("--measured", type=Path, help="the result file of an earlier run")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    folder = Path("docs/results/know_before_you_choose")
    output = args.output or folder / f"advise_check_{args.ranks}.json"
    situations, clusters = [], {}
    for network in args.networks.split(","):
        clusters[network] = cluster = probed_link(network, args.ranks)
        print(table(cluster))
        for kind in KINDS:
            known = earlier(args.measured, network, kind)
            if args.measured and not known:
                continue
            situations.append(check(network, cluster, kind, known, args))
            names = ("ranks", "params", "step_s", "rounds")
            settings = {name: getattr(args, name) for name in names} | {"steps": verify.STEPS}
            found = {network: cluster.to_json() for network, cluster in clusters.items()}
            report = {"settings": settings, "clusters": found, "situations": situations}
            write_result(provenance() | report, output)


if __name__ == "__main__":
    main()
