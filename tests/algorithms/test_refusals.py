"""What an algorithm cannot do is refused before the first message, with what to try."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.algorithms import ALGORITHMS, make_algorithm
from lightning_dsgd.simulated import RankFailed, SimulatedWorld

REFUSED = {
    "wagma:perod=3": "wagma has no option perod, got perod=3; it takes ",
    "sgp:num_peers=0": "num_peers must be a whole number of at least 1, got num_peers=0",
    "sgp:topology=star": "got topology='star'",
    "sgp:node_size=auto": "got node_size='auto' (by the launch: not known)",
    "sgp:num_buckets=8": "got num_buckets=8 without node_size; set node_size",
    "sgp:node_size=3": "got node_size=3 with world_size=4",
    "popsgd:topology=star": 'must be "complete" or "cycle", got topology=\'star\'',
    **dict.fromkeys(
        ["allreduce:wire_dtype=2bit", "balanced:wire_dtype=2bit"],
        '"int8", "int4" or "e3m0", got wire_dtype=\'2bit\'; try wire_dtype=',
    ),
    "popsgd:wire_dtype=int4": "got wire_dtype='int4'",
    "hpsgd:max_local_steps=0": "max_local_steps must be None or a whole number of at least 1, ",
    "hpsgd:outer_lr=0.0": "outer_lr must be a number above 0, got outer_lr=0.0; try",
    "hpsgd:outer_momentum=1.0": "below 1, got outer_momentum=1.0; try outer_momentum=0.0",
    "oktopk:density=0.0": "density must be None or a number above 0 and at most 1, got density=0.0",
    "oktopk:balance_ratio=0.5": "balance_ratio must be a number of at least 1, got",
    "oktopk:wire_dtype=int2": '"e3m0" or "2bit", got wire_dtype=\'int2\'',
    "oktopk:rule=mine": 'rule must be None, "shared" or "paper", got rule=\'mine\'',
    "oktopk:paper=true:rule=shared": "rule must be as in the paper, got rule='shared'; set rule=",
    "oktopk:exchanges=gradients:local_steps=2": "leave exchanges out, or set local_steps=1",
    "oktopk:paper=true:local_steps=2": "set local_steps=1 or paper=False",
    "wagma:paper=true:grace_s=0.1": "set grace_s=0 or paper=False",
    "hpsgd:paper=true:max_local_steps=2": "set max_local_steps=None or paper=False",
    "sgp:paper=true:wire_dtype=int8": "set wire_dtype='float32' or paper=False",
    "popsgd:paper=true:blocking=false": "set blocking=True or paper=False",
    "oktopk:scale_steps=true": "scale_steps is for steps that the ranks make apart",
    "wagma:node_size=2:scale_steps=true": "set scale_steps=False",
    "wagma:paper=true:overlap=true": "set overlap=False or paper=False",
    "wagma:group_period=4:sync_period=10": "a multiple of group_period, got sync_period=10 with "
    "group_period=4; try sync_period=8",
    "wagma:group_period=300": "got sync_period=100 with group_period=300; try sync_period=300",
    "wagma:node_size=auto": "got node_size='auto' (by the launch: not known)",
    "wagma:num_buckets=8": "got num_buckets=8 without node_size; set node_size",
    "wagma:node_size=3": "node_size must divide world_size, got node_size=3",
    "wagma:node_size=2:group_size=8": "no larger than the number of nodes, got group_size=8",
    "local_sgd:num_fragments=9": "got num_fragments=9 with sync_period=2; try num_fragments=2, "
    "or sync_period=9",
    "local_sgd:overlap_steps=9": "overlap_steps must be at most sync_period / num_fragments",
    "local_sgd:overlap_steps=5:num_fragments=2": "one sum travels at a time, got overlap_steps=5 "
    "with sync_period=2 and num_fragments=2; try overlap_steps=1, or sync_period=10",
    "diloco:mixing=0.5": "with overlap_steps of at least 1, got mixing=0.5 with overlap_steps=0",
    "sgp:average_momentum=true:overlap=2": "with overlap=2; set overlap=0, or average_momentum=",
    "sgp:average_momentum=true:node_size=2": "with node_size=2; set node_size=None, or average_",
    "sgp:average_momentum=true:paper=true": "set average_momentum=False or paper=False",
    "popsgd:average_momentum=true": "got average_momentum=True with blocking=False; set blocking=",
    "sparse_loco:local_steps=1": "got local_steps=1; set local_steps=30",
}


MISSPELT = {
    "WAGMA(wire_type='int8')": "WAGMA has no option wire_type, got wire_type='int8'; it takes "
    "group_size, .*; did you mean wire_dtype",
    "NoSync(perod=1)": "NoSync has no option perod, got perod=1; it takes none$",
    "DPSGD('ring', topolgy='ring')": "it takes topology; did you mean topology",
    "DiLoCo(growing_period=True)": "DiLoCo has no option growing_period, got ",
}


@pytest.mark.parametrize("made", MISSPELT)
def test_an_algorithm_made_by_hand_refuses_an_option_with_the_nearest(made: str) -> None:
    with pytest.raises(TypeError, match=MISSPELT[made]):
        eval(made, {kind.__name__: kind for kind in ALGORITHMS.values()})


class WithoutOptions(Algorithm):
    """Is no dataclass, and has no `__init__`."""


@pytest.mark.parametrize("given", [{"args": (3,)}, {"kwargs": {"speed": 3}}])
def test_an_algorithm_without_options_takes_none(given: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"takes no arguments, got 3|no option speed, .*takes none"):
        WithoutOptions(*given.get("args", ()), **given.get("kwargs", {}))


@dataclass
class WithItsOwnInit(Algorithm):
    def __init__(self, speed: float, **more: float) -> None:
        self.speed, self.more = speed, more


def test_an_algorithm_with_an_init_of_its_own_takes_what_that_takes() -> None:
    made = copy.deepcopy(WithItsOwnInit(speed=2.0, other=3.0))
    assert (made.speed, made.more) == (2.0, {"other": 3.0})


@pytest.mark.parametrize("spec", REFUSED)
def test_what_cannot_work_is_refused_with_what_to_try(spec: str) -> None:
    with pytest.raises(ValueError, match=re.escape(REFUSED[spec])):
        make_algorithm(spec).check(4)


def test_what_cannot_work_does_not_start() -> None:
    """Whoever starts an algorithm need not have checked it."""
    sgp = make_algorithm("sgp:node_size=3")
    with pytest.raises(RankFailed, match="got node_size=3 with world_size=4"):
        SimulatedWorld(4).run(lambda net: sgp.start(net, torch.zeros(2)))
