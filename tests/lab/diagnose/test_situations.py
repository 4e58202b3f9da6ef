"""Twelve situations: small and large gradients, quiet and loaded, ranks late or not.

No gain that is promised is a loss.  What becomes of each strategy is simulated with what sending,
rounding and computing take of the cores that the ranks share; `remedies` knows the trace alone.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from lightning_dsgd.algorithm import Conditions
from lightning_dsgd.algorithms.balanced import Balanced
from lightning_dsgd.data.units.dealing import UnitDealing
from lightning_dsgd.data.units.protocol import NONE
from lightning_dsgd.hyperparameters import parse
from lightning_dsgd.lab.diagnose.in_ddps_place import pieces_of
from lightning_dsgd.lab.diagnose.remedies import advised, remedies
from lightning_dsgd.lab.diagnose.remedy import STRATEGIES, Remedy, chosen, spec_of
from lightning_dsgd.lab.diagnose.times import PARTS, Times, times_of
from lightning_dsgd.lab.diagnose.verdict import Verdict, judge
from lightning_dsgd.lab.diagnose.words import lines
from lightning_dsgd.lab.simulate.machines import Machine, Recorded
from lightning_dsgd.lab.simulate.model import message_bytes, run
from lightning_dsgd.lab.simulate.processors import Costs
from lightning_dsgd.simulated import SimulatedTransport, SimulatedWorld
from tests.lab.diagnose import made

RANKS, STEPS, VICTIM = 4, 33, 2
# What was measured with four ranks on two cores; six messages took 6 ms there.
COSTS = Costs(
    cores=2,
    ranks=RANKS,
    send_s=1.3e-5,
    send_s_per_byte=2.8e-10,
    receive_s=5e-4,
    receive_s_per_byte=4.7e-10,
    add_s_per_byte=3.7e-11,
    unpack_s_per_byte=4.2e-9,
)
OWN_CODE = {"allreduce": 5.9e-10, "popsgd": 9.6e-10, "wagma": 1.1e-9}
"""What a strategy's own code takes for each byte that it receives."""
ROUNDED_S = 12e-9


@dataclass(frozen=True)
class Situation:
    """What is made, and then simulated.

    Args:
        size: "small", 80,000 weights, or "large", 4 million on a link of 1 Gbit/s
        load: "quiet", a core for each rank, or "loaded", two cores for four ranks
        late: "none", "slow" or "random"
    """

    size: str
    load: str
    late: str

    @property
    def weights(self) -> int:
        return 80_000 if self.size == "small" else 4_000_000

    @property
    def sum_s(self) -> float:
        return 1.2e-3 if self.size == "small" else 0.2

    @property
    def work_s(self) -> float:
        """What a rank computes in a step."""
        return 3e-3 if self.size == "small" else 0.12

    @property
    def cores(self) -> int:
        return 2 if self.load == "loaded" else 16

    def late_s(self, s: made.Setting, step: int, rank: int) -> float:
        if self.late == "random":
            drawn = s.drawn.setdefault(step, s.source.randrange(s.ranks))
            return 0.8 * self.work_s if rank == drawn else 0.0
        return 0.6 * self.work_s if self.late == "slow" and rank == s.victim else 0.0

    def inject(self, s: made.Setting, step: int, rank: int, own: made.Own) -> None:
        work_s = self.work_s * s.source.gauss(1.0, 0.03)
        own.between, own.loader = 0.05 * work_s, 0.02 * work_s
        own.forward = 0.3 * work_s + self.late_s(s, step, rank)
        own.backward, own.optimizer = 0.58 * work_s, 0.05 * work_s
        own.sum, own.bytes = self.sum_s * s.source.gauss(1.0, 0.03), 4 * self.weights
        if self.load == "loaded":
            own.short = s.source.uniform(0.3, 1.6) * work_s

    @cache  # noqa: B019
    def times(self) -> Times:
        about: dict[str, object] = {"cores": self.cores, "parameters": self.weights}
        return times_of(made.traces(self.inject, 0, RANKS, STEPS, 0.0, VICTIM, about))

    def of_balanced(self, machine: Machine) -> float:
        """How many steps a second `balanced` makes, in the simulated world."""
        setting = made.Setting(RANKS, STEPS, made.random.Random("0"), VICTIM)
        late = [[self.late_s(setting, n, r) for n in range(STEPS)] for r in range(RANKS)]
        k, num_elements = 4, 256

        def train(net: SimulatedTransport) -> float:
            algorithm, x = Balanced(), torch.zeros(num_elements)
            algorithm.start(net.sub("sums"), x, Conditions(gradient_counts=torch.zeros(1).long()))
            dealing = UnitDealing(net.sub("units"), backups=True, on_closed=algorithm.close_step)
            dealing.know(0, [[home for home in range(RANKS) for _ in range(k)]] * STEPS)
            for step in range(STEPS):
                dealing.begin_step(step)
                late_s = late[net.rank][step]
                while (unit := dealing.take(waits=True)) != NONE:
                    net.compute(late_s + self.work_s / k)
                    late_s, mine = 0.0, [torch.full((num_elements,), float(unit))]
                    dealing.finish(lambda: algorithm.add(step, unit, lambda flat: [flat], mine))  # noqa: B023
                algorithm.take_sum(step)
            net.sub("end").barrier().wait()
            dealing.close()
            algorithm.stop()
            return net.now()

        world = SimulatedWorld(
            RANKS,
            machine.latency_s,
            machine.bandwidth_bytes_s,
            message_bytes=message_bytes(machine.num_params / num_elements),
            strict=False,
        )
        return STEPS / max(world.run(train))

    def gain(self, name: str) -> float:
        """How many times as fast as DDP a strategy is."""
        spec = spec_of(name, RANKS, pieces_of(self.times()))
        setting = made.Setting(RANKS, STEPS, made.random.Random("0"), VICTIM)
        late = [[self.late_s(setting, n, r) for n in range(STEPS)] for r in range(RANKS)]
        is_shared = self.load == "loaded"
        own = [[s + (0.0 if is_shared else self.work_s) for s in of_rank] for of_rank in late]
        machine = Machine(
            latency_s=1e-4,
            bandwidth_bytes_s=1.5 * 4 * self.weights / self.sum_s,
            compute_s=0.0,
            num_params=self.weights,
            # Computation takes a core, too, which matters where cores are shared.
            step_core_s=self.work_s if is_shared else 0.0,
            costs=replace(
                COSTS,
                cores=self.cores,
                add_s_per_byte=OWN_CODE.get(parse(spec)[0], 0.0),
                placed_s_per_byte=OWN_CODE.get(parse(spec)[0], 0.0),
            ),
            recorded=Recorded(tuple(map(tuple, own))),
        )
        if name == "int8":
            rounding_s = ROUNDED_S * self.weights
            machine = replace(machine, step_core_s=machine.step_core_s + rounding_s)
        seen = self.times()
        ddp_s = float((seen.own.max(1).values + seen.takes).sum()) / seen.num_steps
        if name == "balanced":
            return self.of_balanced(machine) * ddp_s
        made_run = run(
            spec, RANKS, machine, STEPS, epoch_steps=STEPS, data=chosen(name, RANKS).data
        )
        return made_run.slowest_steps_per_s * ddp_s


SITUATIONS = [
    Situation(*each)
    for each in itertools.product(
        ("small", "large"), ("quiet", "loaded"), ("none", "slow", "random")
    )
]


IDS = [f"{each.size}, {each.load}, {each.late}" for each in SITUATIONS]
ROUNDED = ("large, quiet, none", "large, quiet, slow", "large, quiet, random")
"""The situations in which a rounded gradient is a gain."""


def is_later(name: str) -> bool:
    """What is rounded is recorded and played once more, which takes long."""
    return name in ROUNDED[1:]


@pytest.mark.parametrize(
    "situation",
    [
        pytest.param(each, id=name, marks=[pytest.mark.exhaustive] if is_later(name) else [])
        for each, name in zip(SITUATIONS, IDS, strict=True)
    ],
)
def test_no_gain_that_is_promised_is_a_loss(
    situation: Situation, request: pytest.FixtureRequest
) -> None:
    seen = situation.times()
    found = judge(seen)
    offered = {remedy.name: remedy for remedy in remedies(seen, found)}
    promised = [name for name in STRATEGIES if name in offered and offered[name].gain > 1.0]
    best = advised(list(offered.values()), found)
    for name in {*promised, *([best.name] if best else [])} & {*STRATEGIES}:
        assert situation.gain(name) > 1.0, offered[name]
    assert ("int8" in promised) == (request.node.callspec.id in ROUNDED)
    if situation.load == "loaded":  # what is sent would wait for processors too
        assert not {*STRATEGIES} & {*offered}
        with_cores = replace(situation, load="quiet").times()
        cured = mean_s(seen) / mean_s(with_cores)
        assert 0.95 * offered["cores"].low < cured < 1.05 * offered["cores"].high


def mean_s(seen: Times) -> float:
    return float((seen.own.max(1).values + seen.takes).sum()) / seen.num_steps


def test_what_is_simulated_is_what_was_measured() -> None:
    """int8 with four ranks of 80,000 weights on two cores: 0.50 to 0.62 times as fast as DDP."""
    assert 0.4 < Situation("small", "loaded", "none").gain("int8") < 0.7


# ---- processors ----
def told(inject: made.Cause, **about: object) -> tuple[Verdict, list[str]]:
    seen = times_of(made.traces(inject, 0, RANKS, 60, 0.03, VICTIM, about))
    found = judge(seen)
    return found, lines(seen, found, remedies(seen, found))


def loaded(s: made.Setting, step: int, rank: int, own: made.Own) -> None:
    own.short = s.source.uniform(5e-3, 60e-3)


def test_processors_that_are_short_are_the_cause_and_not_chance() -> None:
    found, said = told(loaded, cores=2, threads=1)
    assert (found.cause, found.ranks) == ("processor", (0, 1, 2, 3))
    assert found.is_everyones
    assert found.late_s > 5e-3
    assert said[0].startswith("Verdict: all ranks wait for a processor, in 100% of the steps, by ")
    assert "         processors are short: a rank is ready to run and waits" in "\n".join(said)
    assert any("give each rank a core of its own" in line for line in said)
    assert any("4 ranks share 2 cores" in line for line in said)
    _, said = told(loaded, cores=4, threads=4)
    assert any("OMP_NUM_THREADS=1" in line for line in said)
    _, said = told(loaded, cores=16, threads=1)
    assert any("what else runs" in line for line in said)


def slow_and_loaded(s: made.Setting, step: int, rank: int, own: made.Own) -> None:
    own.short = s.source.uniform(5e-3, 9e-3)
    if rank == s.victim:
        own.forward += 60e-3


def test_where_no_strategy_is_advised_the_late_rank_is_to_be_mended() -> None:
    found, said = told(slow_and_loaded, cores=2, threads=1)
    assert (found.cause, found.ranks) == ("slow", (VICTIM,))
    assert any(line.startswith("Next:    mend what makes these ranks slow") for line in said)
    assert not any("stay with ddp" in line for line in said)


def gains(name: str, gain: float) -> Remedy:
    return Remedy(name, "", "", gain, 0.97 * gain, 1.03 * gain)


@pytest.mark.parametrize(
    ("others", "first"),
    [
        ([("claimed", 1.4), ("int8", 1.5)], "claimed"),
        ([("claimed", 1.02), ("int8", 1.3), ("lighter", 1.1)], "int8"),
        ([("cores", 1.9), ("lighter", 1.1)], "lighter"),
        ([("claimed", 1.02), ("int8", 1.04), ("cores", 1.9)], "mended"),
    ],
)
def test_the_late_rank_is_to_be_mended_where_nothing_else_gains_5_percent(
    others: list[tuple[str, float]], first: str
) -> None:
    found = sorted([("mended", 2.9), *others], key=lambda each: -each[1])
    best = advised([gains(*each) for each in found], Verdict("slow", (VICTIM,), 0.4))
    assert best is not None
    assert best.name == first


def on_one_machine(s: made.Setting, step: int, rank: int, own: made.Own) -> None:
    if rank == s.victim:
        own.short = s.source.uniform(20e-3, 60e-3)


def test_a_rank_on_a_busy_machine_is_named_and_the_others_need_not_wait_for_it() -> None:
    traces = made.traces(on_one_machine, 0, RANKS, 60, 0.03, VICTIM)
    for trace in traces:
        trace.about["host"] = f"node {trace.rank}"
    seen = times_of(traces)
    found = judge(seen)
    assert (found.cause, found.ranks) == ("processor", (VICTIM,))
    assert not seen.are_processors_short
    assert {*STRATEGIES} <= {remedy.name for remedy in remedies(seen, found)}
    shared = times_of(made.traces(on_one_machine, 0, RANKS, 60, 0.03, VICTIM))
    assert shared.are_processors_short


@pytest.mark.parametrize(("running", "cause"), [(1, "random"), (6, "processor"), (None, "random")])
def test_a_thread_that_is_on_no_core_may_sleep(running: int | None, cause: str) -> None:
    """Where the kernel does not tell, it waits only if more threads want to run than can."""

    def sleeps(s: made.Setting, step: int, rank: int, own: made.Own) -> None:
        if rank == s.drawn.setdefault(step, s.source.randrange(s.ranks)):
            own.short = 40e-3

    traces = made.traces(sleeps, about={"processors": "guessed", "cores": 2}, steps=60)
    traces = [
        replace(trace, steps=tuple(replace(step, running=running) for step in trace.steps))
        for trace in traces
    ]
    assert judge(times_of(traces)).cause == cause


def test_a_trace_that_says_nothing_of_processors_is_still_judged() -> None:
    traces = made.traces(made.slow, steps=60, victim=VICTIM)
    traces = [
        replace(
            trace,
            about={"strategy": "ddp", "sums": "seen", "clock": "host"},
            steps=tuple(replace(step, short=()) for step in trace.steps),
        )
        for trace in traces
    ]
    seen = times_of(traces)
    assert judge(seen).cause == "slow"
    assert seen.ranks_per_core == 2.0


def short_before_own_meetings(s: made.Setting, step: int, rank: int, own: made.Own) -> None:
    if rank == VICTIM:
        own.short = 10e-3


def test_a_rank_that_met_others_once_more_has_waited_as_long() -> None:
    """What it waited before a meeting that is not common counts for the one that follows."""
    traces = made.traces(short_before_own_meetings, steps=40, victim=VICTIM, jitter=0.0)
    before = times_of(traces)
    more = []
    for step in traces[VICTIM].steps:
        alone = step.begin_s + 2e-4, step.begin_s + 3e-4
        (none, waited) = step.short
        exchange = alone, *step.exchange
        more.append(replace(step, exchange=exchange, short=(1e-4, none, waited)))
    traces[VICTIM] = replace(traces[VICTIM], steps=tuple(more))
    waited_s = times_of(traces).parts[PARTS.index("processor")].sum(0)
    assert waited_s[VICTIM] == pytest.approx(10.1e-3 * before.num_steps)
