"""Forms of WAGMA-SGD that papers and figures compare, and that nobody should train with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from lightning_dsgd.algorithm import Traits
from lightning_dsgd.algorithms import ALGORITHMS
from lightning_dsgd.algorithms.wagma import WAGMA
from lightning_dsgd.primitives import topology


@dataclass
class FixedGroups(WAGMA):
    """The groups of the first step are those of every step: the paper's ablation."""

    name: ClassVar[str] = "wagma_fixed_groups"

    def group(self, version: int) -> Sequence[int]:
        if self.is_global(version):
            return super().group(version)
        return topology.group_of(self.across.rank, 0, self.across.world_size, self.size)


@dataclass
class PapersRule(WAGMA):
    """The paper's rule alone: a round waits for late ranks as long as `wagma`'s."""

    name: ClassVar[str] = "wagma_papers_rule"

    @property
    def traits(self) -> Traits:
        return replace(super().traits, keeps_updates=False)


ALGORITHMS[FixedGroups.name] = FixedGroups
ALGORITHMS[PapersRule.name] = PapersRule
