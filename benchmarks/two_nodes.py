"""What a step would take on 2 nodes of 8 GPUs: a model, of which nothing is measured.

    python benchmarks/two_nodes.py

    step        compute + passes over memory + what travels before the next step can begin
    compute     250 ms for 1e9 weights; a sum that travels during it is hidden, but for DDP's last
                bucket of 25 MB
    passes      bytes that the algorithm reads and writes for each weight, counted in its code
    travels     the most that one link carries: of a GPU within its node, or of a node's NICs

Each rank has a NIC of its own, or the 8 ranks of a node have one.  No latency, no stragglers, and
links carry what they can: so what is measured will be more.  NCCL's all-reduce is a ring over all
NICs; sums in groups are sends and receives between all members (`transport/native_groups.py`), in
the groups of `primitives/topology.py`.  Also counted: the share of versions whose groups cross
nodes, and what a node sends in the mean; and what `wagma` would take if its groups crossed the
nodes in every fourth version, and not in every second.
"""

from __future__ import annotations

from math import lcm
from typing import Any

from benchmarks import script
from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.lab.in_force import in_force
from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.primitives import topology

NODES, PER_NODE = 2, 8
RANKS = NODES * PER_NODE
X = 4e9
"""|x|: 1e9 weights in fp32."""
COMPUTE_S = 0.25
MEMORY, WITHIN, NIC = 2.7e12, 360e9, 45e9
"""Bytes a second: of a GPU's memory, of its links within the node, of a NIC of 400 Gbit/s."""
GATHERED = 16
"""Bytes for each weight: gradients are gathered (8) and divided (8)."""
WAITED = 48
"""wagma: p and y (16), the mean (8), x and p (16), and adding what arrives (8)."""
PUBLISHED, CORRECTED = 20, 32
"""wagma with overlap, `ContributedAhead`: each step publishes; each round takes up (12), lends (8)
and reduces (12)."""


def all_reduce_s(num_nics: int, size: float = X, ranks: int = RANKS) -> float:
    """Returns how long NCCL's all-reduce takes: a ring over all ranks."""
    return 2 * (ranks - 1) / ranks * size / min(WITHIN, num_nics * NIC)


def group_s(version: int, num_nics: int, group_size: int) -> float:
    """The sums of one version: each member sends 1/S to each other one, twice."""
    within, across = [0.0] * RANKS, [0.0] * RANKS
    for group in topology.groups(version, RANKS, group_size):
        for rank in group:
            for other in group:
                if other != rank:
                    is_near = rank // PER_NODE == other // PER_NODE
                    (within if is_near else across)[rank] += 2 * X / len(group)
    of_nodes = [sum(across[n * PER_NODE : (n + 1) * PER_NODE]) for n in range(NODES)]
    nic_s = max(across) / NIC if num_nics == PER_NODE else max(of_nodes) / num_nics / NIC
    return max(max(within) / WITHIN, nic_s)


def wagma_s(spec: str, num_nics: int, crossing: float | None = None) -> float:
    """Returns a step of wagma; `crossing` is another share of versions that cross the nodes."""
    options = make_algorithm(spec).hyperparameters()
    size, period = topology.near_sqrt(RANKS), options["group_period"]
    cycle = lcm(*range(1, 5))  # after so many versions groups come again
    of_each = [group_s(v, num_nics, size) for v in range(cycle)]
    sums_s = sum(of_each) / cycle / period
    if crossing is not None:
        sums_s = (max(of_each) * crossing + min(of_each) * (1 - crossing)) / period
    if options["overlap"]:
        passes_s = (PUBLISHED + CORRECTED / period) * X / 4 / MEMORY
        return max(COMPUTE_S + passes_s, sums_s)
    return COMPUTE_S + sums_s + WAITED / period * X / 4 / MEMORY


def of_nodes_s(num_nics: int, num_buckets: int = 1) -> float:
    """wagma with `node_size="auto"` and overlap: gradients and shards within the node.

    The last piece of the gradient is summed once the backward pass has ended.
    """
    node_s = (2 / num_buckets + 1) * (PER_NODE - 1) / PER_NODE * X / WITHIN
    passes = GATHERED + (PUBLISHED + CORRECTED) / PER_NODE
    shard_s = X / PER_NODE / (NIC * num_nics / PER_NODE)
    return max(COMPUTE_S + node_s + passes * X / 4 / MEMORY, shard_s)


def steps_s(num_nics: int) -> dict[str, float]:
    """Seconds of a step, by strategy."""
    sum_s, gathered_s = all_reduce_s(num_nics), GATHERED * X / 4 / MEMORY
    hidden_s = max(0.0, sum_s - 2 / 3 * COMPUTE_S)
    last_s = all_reduce_s(num_nics, 25e6)
    period = {name: make_algorithm(name).hyperparameters()["sync_period"] for name in PERIODIC}
    return {
        "ddp": COMPUTE_S + hidden_s + last_s,
        "balanced": COMPUTE_S + sum_s + gathered_s,
        "allreduce": COMPUTE_S + sum_s + gathered_s,
        "allreduce:overlap=true": COMPUTE_S + hidden_s + last_s + gathered_s,
        **{name: COMPUTE_S + sum_s / steps for name, steps in period.items()},
        **{spec: wagma_s(spec, num_nics) for spec in WAGMA},
        "wagma:overlap=true:node_size=auto": of_nodes_s(num_nics),
        "wagma:overlap=true:node_size=auto:num_buckets=8": of_nodes_s(num_nics, 8),
    }


PERIODIC = ("local_sgd", "diloco")
WAGMA = (
    "wagma",
    "wagma:group_period=4",
    "wagma:overlap=true",
    "wagma:overlap=true:group_period=2",
    "wagma:overlap=true:group_period=4",
)
RARER = 0.25
"""The share of versions that would cross nodes if groups were dealt by nodes; now it is a half."""


def crossings(world_size: int, group_size: int, versions: int = 840) -> dict[str, Any]:
    """How many versions have a group across nodes, and what a node sends out, in |x| a version."""
    crossing, sent = 0, 0.0
    for version in range(versions):
        out = 0.0
        for group in topology.groups(version, world_size, group_size):
            nodes = [rank // PER_NODE for rank in group]
            out += sum(2 / len(group) for a in nodes for b in nodes if a != b)
        crossing += out > 0
        sent += out / (world_size / PER_NODE)
    return {
        "ranks": world_size,
        "group_size": group_size,
        "versions_that_cross": round(crossing / versions, 2),
        "sent_by_a_node": round(sent / versions, 2),
    }


def main() -> None:
    args = script.parser(__doc__, "docs/results/gpus/two_nodes.json").parse_args()
    each, one = steps_s(PER_NODE), steps_s(1)
    rows = [
        {"strategy": spec, "ms_8_nics": round(1e3 * each[spec]), "ms_1_nic": round(1e3 * one[spec])}
        for spec in each
    ]
    counted = [
        crossings(size, group)
        for size in (16, 24, 32, 64)
        for group in sorted({topology.near_sqrt(size), PER_NODE})
    ]
    dealt = [
        {
            "strategy": spec,
            "versions_that_cross": RARER,
            "ms_8_nics": round(1e3 * wagma_s(spec, PER_NODE, RARER)),
            "ms_1_nic": round(1e3 * wagma_s(spec, 1, RARER)),
        }
        for spec in ("wagma", "wagma:overlap=true")
    ]
    for row in (*rows, *counted, *dealt):
        print(row)
    constants = {"nodes": NODES, "gpus_of_a_node": PER_NODE, "bytes": X, "compute_s": COMPUTE_S}
    rates = {"memory": MEMORY, "within": WITHIN, "nic": NIC}
    report = provenance() | {"kind": "model", **constants, "bytes_a_second": rates}
    report["hyperparameters"] = in_force(each, [RANKS])
    write_result(
        report | {"rows": rows, "crossings": counted, "dealt_by_nodes": dealt}, args.output
    )


if __name__ == "__main__":
    main()
