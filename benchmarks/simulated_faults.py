"""A rank is lost every minute: how much of the throughput of a large model is kept, in simulation.

    python benchmarks/simulated_faults.py --minutes 20
    python benchmarks/simulated_faults.py --minutes 20 --silent

16 ranks, a model of 1B parameters, links of 100 Gbit/s, steps of 1 s; all of it in virtual time, on
the package's own code: the algorithms, `SurvivingReplica`, `Calls`, and the agreement on views.
Small tensors stand for large ones, as in `lab.simulate`.

Every 60 s a random rank is killed.  Another process comes `--away-s` later, and is let in before a
common batch.  Then weights are averaged, the newcomer gets the mean, and from one member the two
moments of Adam.  Counted are the steps of all processes, relative to the same without faults.

With `--silent`, the rank is cut off in place of killed, as with its machine: the others, and who
starts another process, notice when they have not heard of it for `--heartbeat-s`.

What it is compared with, by calculation: a job that ends as a whole where a rank is lost, as under
torchrun, starts again in the same time, and reads its last checkpoint: weights and moments, which
one rank has written while the others waited, or beside the training; as often as is best.  A step
takes as long as one of the simulated all-reduce.
"""

from __future__ import annotations

import argparse
import functools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dsgd.agreement import everyones
from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.elastic.calls import Calls
from lightning_dsgd.elastic.simulated import SurvivingWorld
from lightning_dsgd.elastic.surviving import Circle, SurvivingReplica
from lightning_dsgd.lab.in_force import in_force
from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.lab.simulate.model import stand_in
from lightning_dsgd.transport import PeerLost, TransportError
from lightning_dsgd.transport.view import View

BYTES = 4
"""Of a parameter, and of each of its two moments."""


@dataclass
class Job:
    """What all processes of a run know.

    Attributes:
        meet_at: before which batch all meet; -1: before none
        num_begun: of each process
        lost_at: when each process is lost that is
        done_s: when each step was done of any process that was not lost
        changes_s: how long each member was busy with each change of the view
    """

    spec: str
    num_elements: int
    compute_s: float
    end_s: float
    meet_at: int = -1
    num_begun: dict[int, int] = field(default_factory=dict)
    lost_at: dict[int, float] = field(default_factory=dict)
    done_s: list[float] = field(default_factory=list)
    changes_s: list[float] = field(default_factory=list)
    back_s: dict[int, float] = field(default_factory=dict)


class StandIn(nn.Module):
    """A model of few parameters."""

    def __init__(self, num_elements: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(num_elements))


class Rank:
    """One process: what a session does for it, in brief.

    Args:
        net: of all ranks
        job: that all share
    """

    def __init__(self, net: Any, job: Job) -> None:
        self.net, self.job = net, job
        self.module = StandIn(job.num_elements)
        self.optimizer = torch.optim.SGD(self.module.parameters(), 0.1)
        self.is_new = net.is_newcomer
        self.calls = Calls(net, self.enter_view, is_newcomer=net.is_newcomer)
        self.replica = SurvivingReplica(
            self.calls.view.sub("replica"),
            self.module,
            [self.optimizer],
            make_algorithm(job.spec),
            is_newcomer=net.is_newcomer,
        )

    def run(self) -> None:
        """Trains until the end."""
        net, job = self.net, self.job
        if self.is_new:
            net.join(within_s=300.0)
            self.calls.join()
        job.num_begun.setdefault(net.rank, 0)
        while net.now() < job.end_s:
            self.meet_others()
            job.num_begun[net.rank] += 1
            net.compute(job.compute_s)
            self.module.x.grad = torch.zeros(job.num_elements)
            self.calls.step(lambda: self.replica.before_update(self.optimizer), again=True)
            self.optimizer.step()
            self.calls.step(lambda: self.replica.after_update(self.optimizer), again=False)
            if net.now() < job.lost_at.get(net.rank, job.end_s):
                job.done_s.append(net.now())
            job.back_s.setdefault(net.rank, net.now())
        self.calls.together(self.replica.settle)
        self.calls.together(self.replica.finish, self.replica.finish_as_shared)
        self.calls.leave()

    def meet_others(self) -> None:
        """Lets newcomers in, if all are to meet before this batch."""
        job, view = self.job, self.calls.view
        if view.rank == 0 and view.views.newcomers() and job.meet_at < 0:
            job.meet_at = 1 + max(job.num_begun[rank] for rank in view.members)
        if job.num_begun[self.net.rank] != job.meet_at:
            return
        newcomers = self.calls.once(self.find_newcomers)
        job.meet_at = -1
        if newcomers:
            self.change(lambda: self.calls.admit(newcomers))

    def find_newcomers(self) -> list[int]:
        """Those that the first one knows, once all are here."""
        self.replica.settle()
        view = self.calls.view
        texts = everyones(view.sub("meetings"), " ".join(map(str, view.views.newcomers())))
        return [int(number) for number in texts[0].split()]

    def change(self, call: Callable[[], None]) -> None:
        begin_s = self.net.now()
        call()
        self.job.changes_s.append(self.net.now() - begin_s)

    def enter_view(self, view: View) -> None:
        """Averages; newcomers get the mean, and the moments from the first member."""
        told = [text == "new" for text in everyones(view.sub("new"), "new" if self.is_new else "-")]
        new = [rank for rank, is_new in enumerate(told) if is_new]
        old = [rank for rank, is_new in enumerate(told) if not is_new]
        self.replica.change_view(Circle(view.sub("replica"), new))
        state, moments = view.sub("state"), torch.zeros(2 * self.job.num_elements)
        if view.rank == old[0]:
            for newcomer in new:
                state.send(moments, newcomer)
        if self.is_new:
            state.recv(moments, old[0]).wait()
            begun = [self.job.num_begun[view.members[rank]] for rank in old]
            self.job.num_begun[self.net.rank] = max(begun)
            self.is_new = False


def train(net: Any, job: Job) -> None:
    """One process; one that comes too late is not needed."""
    try:
        Rank(net, job).run()
    except (PeerLost, TransportError):
        if not net.is_newcomer or net.rank in job.num_begun:
            raise


def counted(x: Tensor, scale: float, num_elements: int) -> float:
    """The bytes that a message counts for: weights, parts of them, and moments stand for more."""
    is_weights = x.dtype == torch.float32 or x.nbytes == BYTES * num_elements
    return x.nbytes * scale if is_weights else x.nbytes


def moments(args: argparse.Namespace) -> list[tuple[float, int]]:
    """When a rank is lost, and which one: of the last of so many seconds, anywhere in a step."""
    chance, number = random.Random(args.seed), int(60 * args.minutes / args.every_s - 1e-9)
    return [
        ((k + 1) * args.every_s - chance.uniform(0, args.compute_s), chance.randrange(args.ranks))
        for k in range(number)
    ]


def run(spec: str, args: argparse.Namespace, *, strikes: bool) -> dict[str, Any]:
    """One job: steps of all ranks, and what faults did to it."""
    num_elements = stand_in(make_algorithm(spec), args.ranks, int(args.params))
    end_s = 60 * args.minutes
    job = Job(spec, num_elements, args.compute_s, end_s)
    world = SurvivingWorld(
        args.ranks,
        latency_s=args.latency_us / 1e6,
        bandwidth_bytes_s=args.gbit_s * 1e9 / 8,
        timeout_s=1e9,
        message_bytes=functools.partial(
            counted, scale=args.params / num_elements, num_elements=num_elements
        ),
        heartbeat_timeout_s=args.heartbeat_s,
        strict=False,
    )
    places, replaced_at = list(range(args.ranks)), {}
    faults = moments(args) if strikes else []
    for at_s, place in faults:
        (world.drop if args.silent else world.kill)(places[place], at_s)
        job.lost_at[places[place]] = at_s
        places[place] = world.join(at_s + args.heartbeat_s * args.silent + args.away_s)
        replaced_at[places[place]] = at_s
    begin = time.perf_counter()
    outcomes = world.outcomes(train, job)
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, BaseException) and rank not in job.lost_at:
            raise outcome
    back = [job.back_s[rank] - at_s for rank, at_s in replaced_at.items() if rank in job.back_s]
    return {
        "strategy": spec,
        "faults": len(faults),
        "steps": len(job.done_s),
        "step_s": args.ranks * end_s / len(job.done_s),
        "came_back": len(back),
        "first_step_after_s": sum(back) / len(back) if back else None,
        "change_s": sum(job.changes_s) / len(job.changes_s) if job.changes_s else None,
        "took_s": time.perf_counter() - begin,
    }


def restarted(step_s: float, args: argparse.Namespace, *, beside: bool) -> dict[str, Any]:
    """A job that starts as a whole from a checkpoint: the best share of several intervals."""
    write_s = 3 * BYTES * args.params / (args.storage_gbyte_s * 1e9)
    shares = {}
    for every in range(1, 121):
        if not beside or every * step_s >= write_s:  # one is written before the next begins
            shares[every] = share_kept(step_s, every, write_s, beside, args)
    best = max(shares, key=lambda every: shares[every])
    return {
        "strategy": "checkpoint beside the training" if beside else "checkpoint",
        "every_steps": best,
        "write_s": write_s,
        "kept": shares[best],
    }


def share_kept(
    step_s: float, every: int, write_s: float, beside: bool, args: argparse.Namespace
) -> float:
    """Of the steps of a job without faults and checkpoints, by going through its seconds."""
    end_s = 60 * args.minutes
    now, done, saved = 0.0, 0, 0
    faults = [at_s for at_s, _ in moments(args)]
    pending = (0.0, 0)  # when a checkpoint that is being written is whole, and of which step
    for fault in [*faults, end_s]:
        while now + step_s <= fault:
            now += step_s
            done += 1
            if pending[0] <= now:
                saved = max(saved, pending[1])
            if (done - saved) % every == 0:
                if beside:
                    pending = (now + write_s, done)
                elif now + write_s <= fault:
                    now += write_s
                    saved = done
        if fault == end_s:
            break
        if pending[0] <= fault:
            saved = max(saved, pending[1])
        noticed = fault + args.heartbeat_s * args.silent
        now, done, pending = noticed + args.away_s + write_s, saved, (0.0, 0)
    return done * step_s / end_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--strategies", default="wagma,sgp,popsgd,hpsgd,local_sgd,allreduce", help="by commas"
    )
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--params", type=float, default=1e9)
    parser.add_argument("--gbit-s", type=float, default=100.0)
    parser.add_argument("--latency-us", type=float, default=10.0)
    parser.add_argument("--compute-s", type=float, default=1.0, help="of a step")
    parser.add_argument("--every-s", type=float, default=60.0, help="from fault to fault")
    parser.add_argument(
        "--away-s", type=float, default=7.6, help="from a kill until another process asks to join"
    )
    parser.add_argument("--silent", action="store_true", help="ranks are cut off, not killed")
    parser.add_argument("--heartbeat-s", type=float, default=20.0)
    parser.add_argument("--storage-gbyte-s", type=float, default=2.0, help="of a checkpoint")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="the result; by default among the docs'")
    args = parser.parse_args()
    name = "simulated_faults_silent.json" if args.silent else "simulated_faults.json"
    rows = []
    for spec in args.strategies.split(","):
        alone, struck = run(spec, args, strikes=False), run(spec, args, strikes=True)
        struck |= {"kept": struck["steps"] / alone["steps"], "step_s": alone["step_s"]}
        rows.append(struck)
        print(
            f"{spec}: step {alone['step_s']:.2f} s, {struck['faults']} faults, kept "
            f"{struck['kept']:.1%}, first step {struck['first_step_after_s']:.1f} s after the kill "
            f"({alone['took_s'] + struck['took_s']:.0f} s)",
            flush=True,
        )
    step_s = next((row["step_s"] for row in rows if row["strategy"] == "allreduce"), None)
    for beside in (False, True) if step_s is not None else ():
        rows.append({**restarted(step_s, args, beside=beside), "step_s": step_s})
        print(rows[-1])
    settings = {k: v for k, v in vars(args).items() if k != "output"}
    made = provenance() | {"hyperparameters": in_force(args.strategies.split(","), [args.ranks])}
    output = args.output or Path("docs/results/survival", name)
    write_result(made | {"settings": settings, "rows": rows}, output)


if __name__ == "__main__":
    main()
