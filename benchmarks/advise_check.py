"""Whether the advised strategy is the fastest, and predictions are right: in six situations.

    python benchmarks/advise_check.py --ranks 4

On a fast and on a slow link (network namespaces, which are probed first): all ranks equally fast,
a random rank in four late in each step, one rank that always takes twice as long.  In each, all
that `lightning-dsgd advise` ranks, with claimed batches too, take turns, every step a sleep; then
all are simulated, and one is advised.  All steps are one epoch.

It goes on where it was when it is started again.  With `--measured FILE` the situations and rates
are those of an earlier run, for which all is probed and predicted anew; of the strategies only
`no_sync` runs again, for what a step takes of a core.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning_dsgd.lab.advise import verify
from lightning_dsgd.lab.advise.candidates import BOUND, all_for, with_claims
from lightning_dsgd.lab.advise.ranking import rank
from lightning_dsgd.lab.jobs.cells import Cell, finish, measured
from lightning_dsgd.lab.link import Link
from lightning_dsgd.lab.probe import command as probe
from lightning_dsgd.lab.probe.cluster import Cluster, table
from lightning_dsgd.lab.results import provenance
from lightning_dsgd.lab.simulate.machines import Machine, probed
from lightning_dsgd.lab.simulate.recorded import Recorded
from lightning_dsgd.lab.stragglers import delayed_ranks

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


def printed(ranks: int) -> list[str]:
    """All strategies that `advise` may print with so many ranks, as `--verify` takes them."""
    return list(map(verify.spec_of, with_claims(all_for(ranks))))


class Kept:
    """Makes each thing once, and keeps it for a run that is begun again."""

    def __init__(self, output: Path, settings: dict[str, Any]) -> None:
        self.output, self.identity = output, json.dumps(settings, sort_keys=True)

    def made(self, cell: Cell, make: Callable[[], dict[str, Any]]) -> Cell:
        def each(_: Sequence[Cell]) -> Iterator[Cell]:
            yield {**cell, **make()}

        return measured([cell], self.output, self.identity, each)[0]


def probed_link(network: str, ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "cluster.json")
        probe.main(["--ranks", str(ranks), "--network", network, "--output", str(output)])
        return {"cluster": Cluster.read(output).to_json()}


def as_cluster(found: dict[str, Any]) -> Cluster:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "cluster.json")
        file.write_text(json.dumps(found))
        return Cluster.read(file)


def advice(machine: Machine, specs: Sequence[str], ranks: int) -> dict[str, Any]:
    """What is advised of these, and what would be printed of each."""
    ranking = rank(all_for(ranks), machine, ranks, verify.STEPS, epoch_steps=verify.STEPS)
    rows = [row for row in ranking.rows if verify.spec_of(row.candidate) in specs]
    advised = replace(ranking, rows=rows).advised
    return {"advised": verify.spec_of(advised.candidate), "refused": ranking.refused}


def check(
    network: str,
    cluster: Cluster,
    kind: str,
    known: dict[str, list[float]],
    args: argparse.Namespace,
    kept: Kept,
) -> dict[str, Any]:
    """One situation: what was advised, measured (unless it is `known`) and predicted."""
    machine = probed(cluster, args.params, 0.0, recorded(kind, args.ranks, args.step_s))
    link, where = Link.parse(network), {"network": network, "kind": kind}
    specs = [BOUND] if known else args.specs
    rates, core_s = verify.measure(specs, machine, args.ranks, link, args.rounds, kept.output)
    rates = known or rates
    advised = kept.made(where, partial(advice, machine, list(rates), args.ranks))["advised"]
    rows = []
    for spec in rates:
        one = partial(verify.compare, [spec], machine, args.ranks, rates, core_s)
        rows += kept.made({**where, "strategy": spec}, lambda one=one: {"row": one()})["row"]
    best = max((spec for spec in rates if spec != BOUND), key=lambda spec: sum(rates[spec]))
    of_best = sum(rates[advised]) / sum(rates[best])
    print(f"{network}, {kind}: advised {advised}, {of_best:.2f} of the best measured, {best}")
    print(verify.table(rows), flush=True)
    return {**where, "advised": advised, "best": best, "of_best": of_best, "rows": rows}


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
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--specs", type=lambda text: text.split(","), help="by default all")
    parser.add_argument("--measured", type=Path, help="the result file of an earlier run")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    args.specs = args.specs or printed(args.ranks)
    folder = Path("docs/results/know_before_you_choose")
    output = args.output or folder / f"advise_check_{args.ranks}.json"
    names = ("ranks", "params", "step_s", "rounds")
    settings = {name: getattr(args, name) for name in names} | {"steps": verify.STEPS}
    kept, situations, clusters = Kept(output, settings), [], {}
    for network in args.networks.split(","):
        known = {kind: earlier(args.measured, network, kind) for kind in args.kinds.split(",")}
        found = kept.made({"network": network}, partial(probed_link, network, args.ranks))
        clusters[network] = found["cluster"]
        cluster = as_cluster(found["cluster"])
        print(table(cluster))
        for kind, rates in known.items():
            if rates or not args.measured:
                situations.append(check(network, cluster, kind, rates, args, kept))
    report = {"settings": settings, "clusters": clusters, "situations": situations}
    finish(provenance() | report, output)


if __name__ == "__main__":
    main()
