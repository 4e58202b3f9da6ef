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
from typing import Any, Final

import torch
from torch import Tensor

from lightning_dsgd import devices
from lightning_dsgd.agreement import everyones
from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.primitives import sparse
from lightning_dsgd.probe.cluster import Cluster, Link, Processor
from lightning_dsgd.timeline.clocks import boot_id
from lightning_dsgd.transport import Transport
from lightning_dsgd.transport.simulated import SimulatedWorld

MOST_PAIRS: Final = 6
"""Of each kind: inside a node, and between nodes."""
_PINGS: Final = 30
_MESSAGE_S: Final = 0.25
"""How long a large message should take that measures the bandwidth."""
_LARGEST: Final = 64 << 20
_LEAST: Final = 256 << 10
_BURST: Final = 200
_ELEMENTS: Final = 4_000_000
_DENSITY: Final = 0.01
ALL_REDUCED: Final = (4_000, 100_000, 1_000_000, 16_000_000)
_LONGEST_ALL_REDUCE_S: Final = 4.0
_SPARSE: Final = ("oktopk", "topk_allgather", "topk_dsa", "gtopk", "gaussian_topk")
_SPARSE_ELEMENTS: Final = (100_000, 1_000_000)
_SPARSE_RANKS: Final = 4
_SPARSE_STEPS: Final = 8
_WARM_UP: Final = 3

Found = dict[str, Any]


def places(net: Transport, device: torch.device) -> Found:
    """Where every rank is: its node, its machine, its cores and its device."""
    of_this = {
        "node": socket.gethostname(),
        "machine": boot_id(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        "device": devices.name_of(device),
    }
    return {"places": [json.loads(text) for text in everyones(net, json.dumps(of_this))]}


def pairs_of(places: Sequence[Found]) -> list[tuple[int, int]]:
    """A sample of pairs, spread evenly: of ranks of one node, and of ranks of two."""
    ranks = range(len(places))
    pairs = [(a, b) for a in ranks for b in ranks if a < b]
    chosen: list[tuple[int, int]] = []
    for is_inside in (True, False):
        alike = [(a, b) for a, b in pairs if (places[a]["node"] == places[b]["node"]) == is_inside]
        every = max(1, len(alike) // MOST_PAIRS)
        chosen += alike[::every][:MOST_PAIRS]
    return chosen


def pair(net: Transport, a: int, b: int) -> Found:
    """Latency and bandwidth from rank `a` to rank `b`, while the others are quiet."""
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
    """A large message there, and a small one back."""
    begin, done = net.now(), torch.zeros(1, dtype=torch.int64)
    if sends:
        net.send(x, other, copy=False).wait()
        net.recv(done, other).wait()
    else:
        net.recv(x, other).wait()
        net.send(done, other)
    return net.now() - begin


def _agreed_size(net: Transport, other: int, decides: bool) -> int:
    """As many bytes as take `_MESSAGE_S`."""
    x, size = torch.zeros(_LEAST // 4), torch.zeros(1, dtype=torch.int64)
    took_s = min(_there(net, x, other, decides) for _ in range(2))
    if decides:
        wanted = int(_LEAST * _MESSAGE_S / max(took_s, 1e-6))
        size[0] = min(_LARGEST, max(_LEAST, wanted)) // 4 * 4
        net.send(size, other)
        return int(size)
    return int(net.recv(size, other).wait())


def together(net: Transport, shift: int, alone_bytes_s: float) -> Found:
    """Bytes per second of the slowest rank, when each sends to the one `shift` ranks on."""
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
    """Seconds of an all-reduce, by size; sizes that would take too long are left out."""
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
    """What rank 0 takes of its cores to send to rank 1, and rank 1 to receive, in seconds."""
    found = {}
    if net.world_size > 1:
        short, long = torch.zeros(2), torch.zeros(1 << 20)
        messages_s = _processor_s(net, short, _BURST)
        bytes_s = [s / long.nbytes for s in _processor_s(net, long, 24)]
        for name, rank in (("send", 0), ("receive", 1)):
            found[f"{name}_s"] = max(1e-7, messages_s[rank])
            found[f"{name}_s_per_byte"] = max(1e-12, bytes_s[rank])
    return found


def _processor_s(net: Transport, x: Tensor, count: int) -> list[float]:
    """Of all threads of rank 0 and of rank 1, for each of so many messages."""
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


def selection(net: Transport, device: torch.device) -> Found:
    """What adding, copying and selecting take on rank 0, while the others are quiet."""
    net.barrier().wait()
    found: Found = {}
    if net.rank == 0:
        found = _selection(device)
    net.barrier().wait()
    return found


def sparse_steps(net: Transport, device: torch.device) -> Found:
    """What the sparse strategies' own code takes of a core in a step, on rank 0.

    They run in the simulated world, on tensors of the full length: sending costs next to nothing
    there, and what unpacking costs is counted for each message where a run is simulated.
    """
    net.barrier().wait()
    found: Found = {"sparse_s": {}}
    if net.rank == 0 and device.type == "cpu":
        unpack_s = _selection(device)["unpack_s_per_byte"]
        bare_s = [_step_of("no_sync", n)[0] for n in _SPARSE_ELEMENTS]
        few, many = _SPARSE_ELEMENTS
        for name in _SPARSE:
            steps = [_step_of(name, n) for n in _SPARSE_ELEMENTS]
            for_few, for_many = (
                max(0.0, took_s - bare - num_bytes * unpack_s)
                for (took_s, num_bytes), bare in zip(steps, bare_s, strict=True)
            )
            each_s = max(0.0, for_many - for_few) / (many - few)
            found["sparse_s"][name] = max(0.0, for_few - few * each_s), each_s
    net.barrier().wait()
    return found


def _step_of(spec: str, n: int) -> tuple[float, float]:
    """Processor time, and bytes received, of a rank in a step."""
    begin_s = 0.0
    world = SimulatedWorld(_SPARSE_RANKS, latency_s=1e-4, bandwidth_bytes_s=1e9, strict=False)

    def train(net: Any) -> int:
        nonlocal begin_s
        algorithm, x = make_algorithm(spec), torch.zeros(n)
        source = torch.Generator().manual_seed(net.rank)
        slope, before = torch.randn(n, generator=source), 0
        algorithm.start(net, x)
        for step in range(_WARM_UP + _SPARSE_STEPS):
            if step == _WARM_UP:
                before = net.counters.bytes_sent
                if net.rank == 0:
                    begin_s = time.process_time()
            g = slope.clone()
            algorithm.before_update(x, g if algorithm.uses_gradient else x[:0])
            algorithm.after_update(x)
        net.sub("end").barrier().wait()
        algorithm.stop()
        return int(net.counters.bytes_sent) - before

    sent = world.run(train)
    steps = _SPARSE_RANKS * _SPARSE_STEPS
    return (time.process_time() - begin_s) / steps, sum(sent) / steps


def _selection(device: torch.device) -> Found:
    n, k = _ELEMENTS, int(_ELEMENTS * _DENSITY)
    source = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, generator=source).to(device) for _ in range(2))
    threshold, residual = sparse.kth_magnitude(x, k), x.clone()
    values, indices = sparse.select(x, threshold)
    message = sparse.pack(values, indices, torch.float32)
    none = torch.zeros_like(x)

    def unpack_and_add() -> None:
        theirs, places = sparse.unpack(message, torch.float32, torch.float32)
        y.index_add_(0, places.long(), theirs)

    def accumulate() -> None:
        _, places = sparse.accumulate_and_select(residual, none, threshold)
        residual[places] = 0

    return {
        "add_s_per_byte": _best(lambda: y.add_(x), device) / x.nbytes,
        "copy_s_per_byte": _best(lambda: y.copy_(x), device) / x.nbytes,
        "topk_s": _best(lambda: sparse.kth_magnitude(x, k), device) / n,
        "threshold_s": _best(accumulate, device) / n,
        "unpack_s_per_byte": _best(unpack_and_add, device) / message.nbytes,
    }


def _best(work: Callable[[], object], device: torch.device) -> float:
    """The quickest of some: the others were disturbed."""
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        work()
        devices.port_of(device).finish()
        times.append(time.perf_counter() - begin)
    return min(times)


def cluster(found: Sequence[Found]) -> Cluster:
    """All that was found, as one."""
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

    names = Processor.__dataclass_fields__
    costs = {name: everything[name] for name in names}
    costs["sparse_s"] = {name: tuple(pair) for name, pair in costs["sparse_s"].items()}
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
    """By so many ranks on, a rank is on another node."""
    nodes = [spot["node"] for spot in spots]
    return max(nodes.count(node) for node in nodes)
