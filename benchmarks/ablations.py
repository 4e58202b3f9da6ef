"""Forms of WAGMA-SGD that papers and figures compare, and that nobody should train with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

from lightning_dsgd.algorithm import Traits
from lightning_dsgd.algorithms import ALGORITHMS
from lightning_dsgd.algorithms.wagma import WAGMA, Groups
from lightning_dsgd.primitives import topology
from lightning_dsgd.transport import Transport


@dataclass(frozen=True)
class _SameGroups(Groups):
    def of(self, version: int) -> Sequence[int]:
        if self.is_global(version):
            return super().of(version)
        return topology.group_of(self.rank, 0, self.world_size, self.size)


@dataclass
class FixedGroups(WAGMA):
    """The groups of the first step are those of every step: the paper's ablation."""

    name: ClassVar[str] = "wagma_fixed_groups"

    def make_groups(self, net: Transport) -> Groups:
        return _SameGroups(**asdict(super().make_groups(net)))


@dataclass
class PapersRule(WAGMA):
    """The paper's rule alone: a round waits for late ranks as long as `wagma`'s."""

    name: ClassVar[str] = "wagma_papers_rule"

    @property
    def traits(self) -> Traits:
        return replace(super().traits, keeps_updates=False)


ALGORITHMS[FixedGroups.name] = FixedGroups
ALGORITHMS[PapersRule.name] = PapersRule
