"""Passes over a device's memory: the counted bytes are right, and what they cost is foretold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.device_passes import counted, ranks_for
from lightning_dsgd.lab.decisions import NOT_COMPARED, SITUATIONS
from lightning_dsgd.lab.diagnose import passes
from lightning_dsgd.lab.diagnose.remedies import remedies
from lightning_dsgd.lab.diagnose.remedy import Remedy
from lightning_dsgd.lab.diagnose.times import Times, times_of
from lightning_dsgd.lab.diagnose.verdict import judge
from lightning_dsgd.lab.diagnose.words import lines
from tests.lab.diagnose import made
from tests.support.thorough import cases

NOW = ["allreduce", "wagma:overlap=true"]
WEIGHTS = 1_000_000
RATE = 1e9
"""Bytes a second: so slow that passes take some 50 ms."""


@pytest.mark.timeout(240)  # with many ranks
@cases("spec", now=NOW, later=[spec for spec in passes.BYTES if spec not in NOW])
def test_the_bytes_are_those_that_a_device_moves(spec: str) -> None:
    [found] = counted([spec], ranks_for(spec)).values()
    # Some strategies draw their partners, and messages of a few bytes count too.
    assert found == pytest.approx(passes.BYTES[spec], rel=0.03)


def test_the_bytes_are_those_of_the_result() -> None:
    file = Path(__file__).parents[3] / "docs/results/gpus/device_passes.json"
    rows = json.loads(file.read_text())["rows"]
    found = {row["strategy"]: row["bytes_a_weight"] for row in rows}
    assert found == pytest.approx(passes.BYTES, rel=0.03)


def test_all_that_is_advised_is_counted() -> None:
    """Also by a user who writes its options in another order, or its defaults."""
    for situation in SITUATIONS.values():
        if situation.causes:
            for choice in situation.choices:
                if choice.strategy not in NOT_COMPARED:
                    assert passes.bytes_a_weight(choice.strategy) is not None, choice.strategy
    same = "wagma:wire_dtype=int8:overlap=true:sync_period=10:grace_s=None"
    assert passes.bytes_a_weight(same) == passes.bytes_a_weight(
        "wagma:overlap=true:sync_period=10:wire_dtype=int8"
    )
    assert passes.bytes_a_weight("wagma:overlap=true:sync_period=3") is None


def foretold(**about: object) -> tuple[Times, dict[str, Remedy]]:
    told = {"clock": "device", "parameters": WEIGHTS} | about
    seen = times_of(made.traces(made.at_random, ranks=2, steps=60, about=told))
    return seen, {remedy.name: remedy for remedy in remedies(seen, judge(seen), ["sgp:overlap=2"])}


def test_a_step_takes_longer_by_the_passes() -> None:
    seen, without = foretold()
    _, found = foretold(memory_bytes_s=RATE)
    step_s = judge(seen).step_s
    specs = {
        "wagma": "wagma:overlap=true",
        "claimed": "popsgd",
        "int8": "allreduce:wire_dtype=int8:overlap=true",
    }
    for name, spec in specs.items():
        assert without[name].passes_s is None
        passes_s = passes.BYTES[spec] * WEIGHTS / RATE
        assert found[name].passes_s == pytest.approx(passes_s)
        longer_s = step_s / found[name].gain - step_s / without[name].gain
        assert longer_s == pytest.approx(passes_s, rel=0.1), name
        # They may all be hidden, or none.
        assert found[name].low < found[name].gain < without[name].gain < found[name].high
    units = [passes.BYTES[f"balanced:micro_batches={k}"] * WEIGHTS / RATE for k in (4, 8)]
    assert any(found["balanced"].passes_s == pytest.approx(s) for s in units)
    assert found["balanced"].gain < without["balanced"].gain
    assert found["sgp:overlap=2"].passes_s is None
    assert found["workers"] == without["workers"]


def test_the_slowest_memory_decides_where_ranks_wait_for_each_other() -> None:
    told = {"clock": "device", "parameters": WEIGHTS, "memory_bytes_s": RATE}
    traces = made.traces(made.none, ranks=2, steps=60, about=told)
    seen = times_of(traces)
    slower = times_of([traces[0], replace(traces[1], about=told | {"memory_bytes_s": RATE / 2})])
    found = passes.seconds(slower, "allreduce")
    assert found is not None
    assert found.tolist() == [s := 16 * WEIGHTS / RATE, 2 * s]
    gains = [
        {remedy.name: remedy.gain for remedy in remedies(each, judge(each))}
        for each in (seen, slower)
    ]
    assert gains[1]["int8"] < 0.7 * gains[0]["int8"]


def test_an_interval_holds_where_one_memory_is_far_slower() -> None:
    told = {"clock": "device", "parameters": WEIGHTS, "memory_bytes_s": 100 * RATE}
    traces = made.traces(made.at_random, ranks=4, steps=60, about=told)
    traces[3] = replace(traces[3], about=told | {"memory_bytes_s": RATE})
    seen = times_of(traces)
    hidden = times_of(made.traces(made.at_random, ranks=4, steps=60, about=told))
    found = remedies(seen, judge(seen), ["popsgd:data=claimed", "dpsgd"])
    free = {remedy.name: remedy for remedy in remedies(hidden, judge(hidden), ["dpsgd"])}
    assert {"wagma", "claimed", "int8", "balanced", "dpsgd"} <= {remedy.name for remedy in found}
    for remedy in found:
        assert 0 < remedy.low <= remedy.gain <= remedy.high, remedy
        if remedy.name in ("wagma", "balanced", "int8"):
            assert remedy.high >= free[remedy.name].gain, remedy.name
    [wagma] = [remedy for remedy in found if remedy.name == "wagma"]
    assert wagma.passes_s == pytest.approx(passes.BYTES["wagma:overlap=true"] * WEIGHTS / RATE)


def test_on_cpus_nothing_is_added() -> None:
    _, without = foretold(clock="host")
    _, found = foretold(clock="host", memory_bytes_s=RATE)
    assert found == without
    assert found["wagma"].passes_s == 0.0


def test_it_says_what_passes_take_and_what_it_does_not_know() -> None:
    def said(**about: object) -> list[str]:
        seen, found = foretold(**about)
        text = lines(seen, judge(seen), list(found.values()))
        assert max(map(len, text)) <= 150
        return [line for line in text if line.startswith("Passes:")]

    assert said(clock="host") == []
    assert ["record it again" in line for line in said()] == [True]
    [known] = said(memory_bytes_s=2e12)
    assert "(2.00 TB/s): wagma" in known
    assert "sgp:overlap=2 unknown" in known
