"""Latency and bandwidth of the transports, and what a waiting lane costs a thread that computes.

    python benchmarks/transport_bandwidth.py --output docs/results/cluster/transport_bandwidth.json

One job of mpiexec for each number of ranks P.  In every round, one after another and so under the
same conditions: a message from rank 0 to rank 1 and back, and an all-reduce over all ranks, by the
MPI transport, by the process_group transport (TCP), and by torch's own gloo.  Limits in the same
rounds: MPI itself and a plain socket over loopback, into memory that is there, where the transports
give a new tensor; and a copy from memory to memory.

A busy rank: a lane of rank 1 sends back what it receives, while its training thread runs plain
Python all the time.

The lanes: every rank trains a small network on one core's share while a lane waits for a message
that never comes: over the process_group, over the MPI transport, or in MPI's own blocking receive.
"""

from __future__ import annotations

import math
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import script
from lightning_dsgd.lab.jobs.cells import Cell, finish
from lightning_dsgd.lab.jobs.job import Job
from lightning_dsgd.mpi.wire import MPITransport
from lightning_dsgd.transport.mpi_job import library
from lightning_dsgd.transport.process_group import ProcessGroupTransport

SIZES = (1_000, 1_000_000, 100_000_000)
TIMES = {1_000: 200, 1_000_000: 20, 100_000_000: 2}  # operations in one sample
BUSY_SIZES = (4_000_000, 100_000_000)
EMPTY = torch.empty(0)
Operation = Callable[[Tensor], None]


def join() -> None:
    """Makes the process group of the ranks that mpiexec has started."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = world.bcast(probe.getsockname()[1])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=world.rank, world_size=world.size)
    torch.set_num_threads(1)


def ping_pong_of(net: Any) -> Operation:
    def ping_pong(x: Tensor) -> None:
        if net.rank == 0:
            sent = net.send(x, 1, copy=False)
            net.recv(x, 1).wait()
            sent.wait()
        elif net.rank == 1:
            net.send(net.recv(x, 0).wait(), 0, copy=False).wait()

    return ping_pong


def gloo_ping_pong(x: Tensor) -> None:
    if dist.get_rank() == 0:
        dist.send(x, 1)
        dist.recv(x, 1)
    elif dist.get_rank() == 1:
        dist.recv(x, 0)
        dist.send(x, 0)


def mpi_ping_pong(x: Tensor) -> None:
    from mpi4py import MPI

    world, memory = MPI.COMM_WORLD, [x.numpy(), MPI.FLOAT]
    if world.rank == 0:
        world.Send(memory, 1)
        world.Recv(memory, 1)
    elif world.rank == 1:
        world.Recv(memory, 0)
        world.Send(memory, 0)


def mpi_all_reduce(x: Tensor) -> None:
    from mpi4py import MPI

    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, [x.numpy(), MPI.FLOAT])


def loopback() -> tuple[Operation, socket.socket | None]:
    """A plain socket from rank 0 to rank 1."""
    rank, sock = dist.get_rank(), None
    listener = socket.create_server(("127.0.0.1", 0)) if rank == 0 else None
    port = torch.tensor([listener.getsockname()[1] if listener else 0])
    dist.broadcast(port, 0)
    if listener is not None:
        sock = listener.accept()[0]
        listener.close()
    elif rank == 1:
        sock = socket.create_connection(("127.0.0.1", int(port)))
    if sock is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def receive(memory: memoryview) -> None:
        assert sock is not None
        while memory:
            memory = memory[sock.recv_into(memory) :]

    def ping_pong(x: Tensor) -> None:
        memory = memoryview(x.numpy()).cast("B")  # type: ignore[arg-type]
        if sock is None:
            return
        if rank == 0:
            sock.sendall(memory)
            receive(memory)
        else:
            receive(memory)
            sock.sendall(memory)

    return ping_pong, sock


def copying(size: int) -> Operation:
    """From memory to memory, there and back."""
    y = torch.zeros(size // 4)

    def there_and_back(x: Tensor) -> None:
        if dist.get_rank() == 0:
            y.copy_(x)
            x.copy_(y)

    return there_and_back


def run_cell(cell: Cell, settings: dict[str, Any]) -> dict[str, Any]:
    if not dist.is_initialized():
        join()
    nets: dict[str, Any] = {"mpi": MPITransport(), "process_group": ProcessGroupTransport()}
    if cell["what"] == "lanes":
        samples = measure_lanes(nets, settings)
    elif cell["what"] == "busy":
        samples = measure_busy(nets, cell["bytes"], settings["rounds"])
    else:
        samples = measure_messages(nets, cell["bytes"], settings["rounds"])
    for net in nets.values():
        net.barrier().wait()
        net.close()
    return {"samples": samples, "library": library()}


def measure_messages(nets: dict[str, Any], size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a message one way, and of an all-reduce."""
    over_socket, sock = loopback()
    messages: dict[str, Operation] = {name: ping_pong_of(net) for name, net in nets.items()}
    messages |= {"gloo": gloo_ping_pong, "MPI itself": mpi_ping_pong, "loopback": over_socket}
    messages["memory copy"] = copying(size)
    sums: dict[str, Operation] = {
        name: lambda x, net=net: net.all_reduce(x).wait()  # type: ignore[misc]
        for name, net in nets.items()
    }
    sums |= {"gloo": dist.all_reduce, "MPI itself": mpi_all_reduce}
    operations = {f"message, {name}": (run, 2) for name, run in messages.items()}
    operations |= {f"all_reduce, {name}": (run, 1) for name, run in sums.items()}
    x = torch.zeros(size // 4)
    samples: dict[str, list[float]] = {name: [] for name in operations}
    for turn in range(rounds + 1):
        for name, (run, ways) in operations.items():
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(TIMES[size]):
                run(x)
            seconds = (time.perf_counter() - begin) / TIMES[size] / ways
            if turn:  # the first one makes connections
                samples[name].append(seconds)
    if sock is not None:
        sock.close()
    return samples


def measure_busy(nets: dict[str, Any], size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a message to rank 1 and back, while the training thread there runs Python."""
    x = torch.zeros(size // 4)
    samples: dict[str, list[float]] = {name: [] for name in nets}

    def once(net: Any) -> float:
        ended, seconds = threading.Event(), [0.0]

        def exchange(lane_net: Any) -> None:
            dist.barrier()
            begin = time.perf_counter()
            ping_pong_of(lane_net)(x)
            seconds[0] = time.perf_counter() - begin
            ended.set()

        lane = net.spawn_lane(exchange)
        while net.rank == 1 and not ended.is_set():
            pass
        lane.join()
        return seconds[0]

    for turn in range(rounds + 3):
        for name, net in nets.items():
            seconds = once(net)
            if turn > 2:  # the first ones make connections and memory
                samples[name].append(seconds)
    return samples


def measure_lanes(nets: dict[str, Any], settings: dict[str, Any]) -> dict[str, list[float]]:
    """Iterations a second of a thread that computes beside a lane that waits."""
    net, x = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))), torch.randn(32, 512)

    def iterations_per_s() -> float:
        dist.barrier()
        begin, count = time.monotonic(), 0
        while time.monotonic() < begin + settings["seconds"]:
            net(x).sum().backward()
            count += 1
        rate = count / (time.monotonic() - begin)
        dist.barrier()
        return rate

    def beside_lane(transport: Any) -> float:
        lane = transport.spawn_lane(lambda net: net.recv(EMPTY, net.rank).wait(math.inf) and None)
        rate = iterations_per_s()
        lane.stop()
        return rate

    samples: dict[str, list[float]] = {}
    for _ in range(settings["rounds"]):
        for name, measure in {
            "no lane": iterations_per_s,
            "process_group": lambda: beside_lane(nets["process_group"]),
            **{
                name: lambda net=net: beside_lane(net)  # type: ignore[misc]
                for name, net in nets.items()
                if name != "process_group"
            },
            "blocking MPI receive": lambda: beside_blocking_receive(iterations_per_s),
        }.items():
            samples.setdefault(name, []).append(measure())
    return samples


def beside_blocking_receive(measure: Callable[[], float]) -> float:
    from mpi4py import MPI

    alone = MPI.COMM_SELF.Dup()
    buffer = bytearray(1)
    receiver = threading.Thread(target=lambda: alone.Recv([buffer, MPI.BYTE], 0))
    receiver.start()
    rate = measure()
    alone.Send([b"x", MPI.BYTE], 0)
    receiver.join()
    alone.Free()
    return rate


def summarize(results: list[Cell]) -> dict[str, Any]:
    """Medians on rank 0; rates of lanes relative to those without, over all ranks."""
    rows: dict[str, Any] = {}
    for result in results:
        ranks = [rank["samples"] for rank in result["ranks"]]
        if result["what"] == "lanes":
            totals = {
                name: [sum(of_round) for of_round in zip(*(r[name] for r in ranks), strict=True)]
                for name in ranks[0]
            }
            alone = totals["no lane"]
            rows["lanes"] = {
                name: statistics.median(a / b for a, b in zip(rates, alone, strict=True))
                for name, rates in totals.items()
            }
        else:
            size = result["bytes"]
            is_busy = result["what"] == "busy"
            rows[f"busy {size}" if is_busy else str(size)] = {
                name: {
                    "us": 1e6 * statistics.median(seconds),
                    "MB_s": size / 1e6 / statistics.median(seconds),
                    **faster_than_tcp(ranks[0], name),
                    "samples_s": seconds,
                }
                for name, seconds in ranks[0].items()
            }
    return rows


def faster_than_tcp(samples: dict[str, list[float]], name: str) -> dict[str, float]:
    """How many times as fast as the process_group transport, the median of the rounds' ratios."""
    operation, _, net = name.rpartition(", ")
    tcp = f"{operation}, process_group" if operation else "process_group"
    if net in ("loopback", "memory copy"):
        return {}
    pairs = zip(samples[tcp], samples[name], strict=True)
    return {"times_process_group": statistics.median(theirs / ours for theirs, ours in pairs)}


def main() -> None:
    parser = script.parser(__doc__, "docs/results/cluster/transport_bandwidth.json")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one rate beside a lane")
    parser.add_argument("--max-bytes", type=int, default=SIZES[-1])
    args = parser.parse_args()
    cells: list[Cell] = [
        {"what": "messages", "bytes": size} for size in SIZES if size <= args.max_bytes
    ]
    cells += [{"what": "busy", "bytes": size} for size in BUSY_SIZES if size <= args.max_bytes]
    cells.append({"what": "lanes"})
    settings = {"rounds": args.rounds, "seconds": args.seconds}
    measured: dict[str, Any] = {}
    for ranks in args.ranks:
        job = Job(f"{__file__}:run_cell", settings, ranks=ranks, launcher="mpiexec")
        results = job.run(cells, args.output.with_suffix(f".{ranks}.json"))
        measured[str(ranks)] = summarize(results)
        for what, row in measured[str(ranks)].items():
            for name, figure in row.items():
                text = f"{figure:.2f} of the rate" if what == "lanes" else ""
                if what != "lanes":
                    text = f"{figure['us']:10.0f} us  {figure['MB_s']:7.0f} MB/s"
                print(f"P={ranks}  {what:>9}  {name:25}  {text}")
    report = job.provenance()
    report |= {"library": results[0]["ranks"][0]["library"], "ranks": measured}
    finish(report, args.output)
    for ranks in args.ranks:
        cells_file = args.output.with_suffix(f".{ranks}.json.cells")
        cells_file.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
