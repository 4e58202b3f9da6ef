"""What is measured, on every rank at once, over any transport.

Each function below `STAGES` is called by all ranks, in this order; what it returns on rank 0
counts.  Ranks that have no part in a measurement wait for the others at a barrier, which takes no
processor.  Each stage takes seconds: sizes follow from what the first small message took.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from lightning_dsgd import devices
from lightning_dsgd.agreement import everyones
from lightning_dsgd.algorithms import ALGORITHMS, make_algorithm
from lightning_dsgd.lab import accelerators
from lightning_dsgd.lab.probe.cluster import Cluster, Link, Processor
from lightning_dsgd.lab.timeline.clocks import boot_id
from lightning_dsgd.lab.timeline.processors import SEEN, Waited
from lightning_dsgd.primitives import sparse, sparse_wire
from lightning_dsgd.primitives.error_feedback import ErrorFeedback
from lightning_dsgd.transport import Transport

MOST_PAIRS: Final = 6
"""The most pairs of each kind: inside a node, and between nodes."""
_PINGS: Final = 30
_MESSAGE_S: Final = 0.25
"""How long a large message should take that measures the bandwidth."""
_LARGEST: Final = 64 << 20
_LEAST: Final = 256 << 10
_BURST: Final = 200
_SUMS: Final = 50
_ELEMENTS: Final = 4_000_000
_DENSITY: Final = 0.01
ALL_REDUCED: Final = (4_000, 100_000, 1_000_000, 16_000_000)
_LONGEST_ALL_REDUCE_S: Final = 4.0
_SPARSE: Final = [name for name, kind in ALGORITHMS.items() if issubclass(kind, ErrorFeedback)]
SPARSE_ELEMENTS: Final = (100_000, 1_000_000)
_DENSE: Final = (
    "allreduce", "local_sgd", "dpsgd", "sgp", "adpsgd", "popsgd", "hpsgd", "eager_sgd", "wagma",
)  # fmt: skip
_LEAST_DENSE: Final = 10_000
_MOST_DENSE: Final = 1_000_000
_DENSE_S: Final = 0.05
"""How long a message of a dense strategy may take."""
_STEPS: Final = 8
"""The number of steps that `local_sgd` makes from one average to the next."""
_PAUSE_S: Final = 0.05
_BUSY: Final = 0.1
"""A machine is busy where rank 0, which measures alone, waits for this share of the time."""
_WARM_UP: Final = 3

Found = dict[str, Any]


class Spent(NamedTuple):
    """Counts what a rank has spent: seconds of a core, messages and bytes that it has sent."""

    seconds: float
    messages: float
    num_bytes: float


def places(net: Transport, device: torch.device) -> Found:
    """Returns where every rank is: its node, its machine, its cores and its device."""
    of_this = {
        "node": socket.gethostname(),
        "machine": boot_id(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        "device": accelerators.name_of(device),
    }
    return {"places": [json.loads(text) for text in everyones(net, json.dumps(of_this))]}


def pairs_of(places: Sequence[Found]) -> list[tuple[int, int]]:
    """Returns a sample of pairs, spread evenly: ranks of one node, and ranks of two."""
    ranks = range(len(places))
    pairs = [(a, b) for a in ranks for b in ranks if a < b]
    chosen: list[tuple[int, int]] = []
    for is_inside in (True, False):
        alike = [(a, b) for a, b in pairs if (places[a]["node"] == places[b]["node"]) == is_inside]
        every = max(1, len(alike) // MOST_PAIRS)
        chosen += alike[::every][:MOST_PAIRS]
    return chosen


def pair(net: Transport, a: int, b: int) -> Found:
    """Measures latency and bandwidth from rank `a` to rank `b`, while the others are quiet."""
    net.barrier().wait()
    found: Found = {}
    if net.rank in (a, b):
        other = b if net.rank == a else a
        trips = [_ping(net, other, net.rank == a) for _ in range(_PINGS)]
        size = _agreed_size(net, other, net.rank == a)
        x = torch.zeros(size // 4)
        times = [_there(net, x, other, net.rank == a) for _ in range(3)]
        latency_s = statistics.median(trips[5:]) / 2
        took_s = max(1e-9, min(times) - 2 * latency_s)
        found = {"latency_s": latency_s, "bandwidth_bytes_s": size / took_s}
    net.barrier().wait()
    gathered = everyones(net, json.dumps(found))
    return {"pair": [a, b], **json.loads(gathered[a])}


def _ping(net: Transport, other: int, begins: bool) -> float:
    x, begin = torch.zeros(1, dtype=torch.int64), net.now()
    if begins:
        net.send(x, other)
        net.recv(x, other).wait()
    else:
        net.recv(x, other).wait()
        net.send(x, other)
    return net.now() - begin


def _there(net: Transport, x: Tensor, other: int, sends: bool) -> float:
    """Sends a large message there, and a small one back."""
    begin, done = net.now(), torch.zeros(1, dtype=torch.int64)
    if sends:
        net.send(x, other, copy=False).wait()
        net.recv(done, other).wait()
    else:
        net.recv(x, other).wait()
        net.send(done, other)
    return net.now() - begin


def _agreed_size(net: Transport, other: int, decides: bool) -> int:
    """Returns as many bytes as take `_MESSAGE_S`."""
    x, size = torch.zeros(_LEAST // 4), torch.zeros(1, dtype=torch.int64)
    took_s = min(_there(net, x, other, decides) for _ in range(2))
    if decides:
        wanted = int(_LEAST * _MESSAGE_S / max(took_s, 1e-6))
        size[0] = min(_LARGEST, max(_LEAST, wanted)) // 4 * 4
        net.send(size, other)
        return int(size)
    return int(net.recv(size, other).wait())


def together(net: Transport, shift: int, alone_bytes_s: float) -> Found:
    """Measures the slowest rank's bytes per second, when each sends to the one `shift` ranks on."""
    size = min(_LARGEST, max(_LEAST, int(alone_bytes_s * _MESSAGE_S / 2))) // 4
    x, times = torch.zeros(size), []
    dst, src = (net.rank + shift) % net.world_size, (net.rank - shift) % net.world_size
    for _ in range(3):
        net.barrier().wait()
        begin = net.now()
        sending = net.send(x, dst, copy=False)
        net.recv(x, src).wait()
        sending.wait()
        times.append(net.now() - begin)
    took = [float(text) for text in everyones(net, json.dumps(min(times)))]
    return {"shift": shift, "bytes_s": 4 * size / max(took)}


def all_reduce(net: Transport, device: torch.device) -> Found:
    """Measures an all-reduce's seconds, by size, without sizes that would take too long."""
    found: list[tuple[int, float]] = []
    if net.world_size == 1:
        return {"all_reduce": []}
    for size in ALL_REDUCED:
        if found and found[-1][1] * size / found[-1][0] > _LONGEST_ALL_REDUCE_S:
            break
        x, times = torch.zeros(size // 4, device=device), []
        for _ in range(4):
            net.barrier().wait()
            begin = net.now()
            net.all_reduce(x).wait()
            devices.port_of(device).finish()
            times.append(net.now() - begin)
        slowest = [float(t) for t in everyones(net, json.dumps(statistics.median(times[1:])))]
        found.append((size, max(slowest)))
    return {"all_reduce": found}


def processor(net: Transport) -> Found:
    """Measures what sending and receiving take of a core, all threads of a rank, in seconds.

    A message that follows another costs little.  A message that is waited for wakes the reading
    thread and the waiting one, and finds their memory cold where ranks share cores.  A message's
    cost is therefore taken from small sums, in which all ranks wait for each other.
    """
    found: Found = {}
    if net.world_size > 1:
        short, long = torch.zeros(2), torch.zeros(1 << 20)
        bytes_s = [s / long.nbytes for s in _processor_s(net, long, 24)]
        for name, rank in (("send", 0), ("receive", 1)):
            found[f"{name}_s_per_byte"] = max(1e-12, bytes_s[rank])
        found["send_s"] = max(1e-7, _processor_s(net, short, _BURST)[0])
        found["receive_s"] = max(1e-7, _awaited_s(net) - found["send_s"])
    return found


def _processor_s(net: Transport, x: Tensor, count: int) -> list[float]:
    """Measures rank 0's and rank 1's time for each of so many messages, while others are quiet."""
    net.barrier().wait()
    begin, own_s = time.process_time(), 0.0
    if net.rank < 2:
        for _ in range(count):
            if net.rank == 0:
                net.send(x, 1, copy=False).wait()
            else:
                net.recv(x, 0).wait()
        own_s = (time.process_time() - begin) / count
    net.barrier().wait()
    return [float(text) for text in everyones(net, json.dumps(own_s))]


def _awaited_s(net: Transport) -> float:
    """Measures a rank's time to send a message and to wait for one, while all ranks do so."""
    x = torch.zeros(net.world_size)  # so each rank sends and receives in every exchange

    def add_up() -> None:
        for _ in range(_SUMS):
            net.all_reduce(x).wait()

    add_up()
    spent = _spent(net, add_up)
    return spent.seconds / spent.messages


def _spent(net: Transport, work: Callable[[], object]) -> Spent:
    """Measures what a rank spends on some work, as the mean of all ranks."""
    net.barrier().wait()
    counters, begin_s = net.counters, time.process_time()
    num_messages, num_bytes = counters.messages_sent, counters.bytes_sent
    work()
    own_s = time.process_time() - begin_s
    own = [own_s, counters.messages_sent - num_messages, counters.bytes_sent - num_bytes]
    of_all = [json.loads(text) for text in everyones(net, json.dumps(own))]
    return Spent(*(statistics.mean(of_each) for of_each in zip(*of_all, strict=True)))


def selection(net: Transport, device: torch.device) -> Found:
    """Measures adding, copying and selecting on rank 0, while the others are quiet.

    What rank 0 waits for a processor meanwhile, other programs have taken.
    """
    net.barrier().wait()
    found: Found = {}
    if net.rank == 0:
        waited, begin_s = Waited(), time.monotonic()
        before_s = waited.seconds()
        found = _selection(device)
        share = (waited.seconds() - before_s) / max(1e-9, time.monotonic() - begin_s)
        found["waited_share"] = share if waited.how == SEEN else None
        waited.close()
    net.barrier().wait()
    return found


def steps(net: Transport, device: torch.device, bandwidth_bytes_s: float) -> Found:
    """Measures what a rank spends in a step of each strategy, while all ranks make the step.

    Sparse strategies are measured with each of `SPARSE_ELEMENTS`, the others with so many elements
    that messages do not take long; nothing where ranks do not compute on processors.  Between two
    steps ranks pause, and then all start together with cold memory, as in a training.
    """
    if device.type != "cpu" or net.world_size == 1:
        return {"sparse": {}, "dense": {}}
    n = max(_LEAST_DENSE, min(_MOST_DENSE, int(bandwidth_bytes_s * _DENSE_S / 4)))
    return {
        "sparse": {name: [_step_of(net, name, n) for n in SPARSE_ELEMENTS] for name in _SPARSE},
        "dense": {name: _step_of(net, name, n) for name in _DENSE},
    }


def _step_of(net: Transport, name: str, n: int) -> Spent:
    algorithm, x = make_algorithm(name), torch.zeros(n)
    source = torch.Generator().manual_seed(net.rank)
    noise = torch.randn(2 * n, generator=source)
    net = net.sub(f"{name}/{n}")
    algorithm.start(net, x)

    def make_steps(num_steps: int = _STEPS) -> None:
        for _ in range(num_steps):
            time.sleep(_PAUSE_S)
            begin = int(torch.randint(n, (1,), generator=source))
            g = noise[begin : begin + n].clone()
            algorithm.before_update(x, g if algorithm.traits.uses_gradient else x[:0])
            algorithm.after_update(x)

    make_steps(_WARM_UP)
    spent = _spent(net, make_steps)
    algorithm.settle(x)  # serves those that still make steps
    algorithm.stop()
    return Spent(*(each / _STEPS for each in spent))


def besides_messages_s(step: Spent, costs: Found) -> float:
    """Returns a step's time besides what a simulated run counts for its messages."""
    message_s: float = costs["send_s"] + costs["receive_s"]
    byte_s: float = costs["send_s_per_byte"] + costs["receive_s_per_byte"]
    return max(0.0, step.seconds - step.messages * message_s - step.num_bytes * byte_s)


def own_code_s(steps: Sequence[Spent], costs: Found) -> tuple[float, float]:
    """Returns what a sparse strategy's own code takes in a step, at least and for each element.

    Unpacking is counted for each message; the copy of the gradient is not part of a step.
    """
    for_few, for_many = (
        max(0.0, besides_messages_s(step, costs) - step.num_bytes * costs["unpack_s_per_byte"])
        for step in steps
    )
    few, many = SPARSE_ELEMENTS
    each_s = max(0.0, for_many - for_few) / (many - few)
    copied_s = 4 * costs["copy_s_per_byte"]
    return max(0.0, for_few - few * each_s), max(0.0, each_s - copied_s)


def _selection(device: torch.device) -> Found:
    n, k = _ELEMENTS, int(_ELEMENTS * _DENSITY)
    source = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, generator=source).to(device) for _ in range(2))
    threshold, residual = sparse.kth_magnitude(x, k), x.clone()
    values, indices = sparse.select(x, threshold)
    cuts = devices.integers([0, len(indices)], device)
    parts, _ = sparse_wire.measure(values, indices, cuts, n)
    message, _ = sparse_wire.pack(values, indices, parts)
    none = torch.zeros_like(x)

    def unpack_and_add() -> None:
        theirs, places = sparse_wire.unpack([message], parts, x)
        y.index_add_(0, places.long(), theirs)

    def accumulate() -> None:
        _, places = sparse.select(residual, threshold, none)
        residual[places] = 0

    return {
        "add_s_per_byte": _best(lambda: y.add_(x), device) / x.nbytes,
        "copy_s_per_byte": _best(lambda: y.copy_(x), device) / x.nbytes,
        "topk_s": _best(lambda: sparse.kth_magnitude(x, k), device) / n,
        "threshold_s": _best(accumulate, device) / n,
        "unpack_s_per_byte": _best(unpack_and_add, device) / message.nbytes,
    }


def _best(work: Callable[[], object], device: torch.device) -> float:
    """Returns the quickest of some measurements: the others were disturbed."""
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        work()
        devices.port_of(device).finish()
        times.append(time.perf_counter() - begin)
    return min(times)


def busy(found: Sequence[Found]) -> str:
    """Says that other programs have disturbed what was measured; empty if they have not."""
    share = next((each["waited_share"] for each in found if "waited_share" in each), None)
    if share is None or share < _BUSY:
        return ""
    return (
        f"this machine is busy: for {share:.0%} of the time rank 0 was ready to measure and waited "
        "for a processor, so that all figures are too slow; stop what else runs, and probe again"
    )


def cluster(found: Sequence[Found]) -> Cluster:
    """Returns all that was found, as one cluster."""
    everything: Found = {}
    for each in found:
        everything |= each
    spots = everything["places"]
    pairs = [each for each in found if "pair" in each]
    shifts = {each["shift"]: each["bytes_s"] for each in found if "shift" in each}
    nodes = [spot["node"] for spot in spots]
    machines = [spot["machine"] for spot in spots]

    def link(*, is_inside: bool) -> Link | None:
        alike = [p for p in pairs if (nodes[p["pair"][0]] == nodes[p["pair"][1]]) == is_inside]
        if not alike:
            return None
        alone = statistics.median(p["bandwidth_bytes_s"] for p in alike)
        at_once = shifts.get(1 if is_inside else shift_between(spots), alone)
        return Link(statistics.median(p["latency_s"] for p in alike), alone, at_once)

    sparse = {name: [Spent(*s) for s in steps] for name, steps in everything["sparse"].items()}
    names = set(Processor.__dataclass_fields__) - {"sparse_s", "dense_s_per_byte"}
    costs = {name: everything[name] for name in names}
    costs["sparse_s"] = {name: own_code_s(steps, costs) for name, steps in sparse.items()}
    dense = {name: Spent(*step) for name, step in everything["dense"].items()}
    costs["dense_s_per_byte"] = {
        name: besides_messages_s(step, costs) / step.num_bytes
        for name, step in dense.items()
        if step.num_bytes
    }
    return Cluster(
        ranks=len(spots),
        ranks_per_node=max(nodes.count(node) for node in nodes),
        ranks_per_machine=max(machines.count(machine) for machine in machines),
        cores=max(spot["cores"] for spot in spots),
        device=spots[0]["device"],
        transport=everything["transport"],
        inside=link(is_inside=True),
        between=link(is_inside=False),
        all_reduce=tuple((int(size), float(s)) for size, s in everything["all_reduce"]),
        processor=Processor(**costs),
    )


def shift_between(spots: Sequence[Found]) -> int:
    """Returns by how many ranks on a rank is on another node."""
    nodes = [spot["node"] for spot in spots]
    return max(nodes.count(node) for node in nodes)
