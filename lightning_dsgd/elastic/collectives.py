"""Collectives among the members, in the place of torch's, which would wait for a lost rank.

Each is a call of all ranks (`Ranks.together`): after a loss the members make it again, or take its
result over, so all get the same.

Threads: the training thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_dsgd.agreement import everyones
from lightning_dsgd.session.collectives import Collectives
from lightning_dsgd.transport.contract import LEAST_LIMIT


class MembersCollectives(Collectives):
    """Makes the collectives of a session whose ranks may be lost."""

    def broadcast(self, value: Any, src: int, theirs: Callable[[], Any]) -> Any:
        """Returns one rank's value on all ranks: text, numbers, or None.

        The first member gives its value where that rank is lost.
        """
        session, ranks = self._session, self._session.ranks
        if not session.is_open:
            return value if ranks.has_changed or not session.takes_part else theirs()
        try:
            text = json.dumps(str(value) if isinstance(value, Path) else value)
        except TypeError as err:
            raise ValueError(
                "what is broadcast must be text, a number, a list or a dict of them, or None, with "
                f'on_loss="continue", got {type(value).__name__}; use on_loss="end"'
            ) from err

        def take() -> str:
            members = session.net.members  # not before: the call may be made again
            texts = everyones(session.meetings, text)
            return texts[members.index(src) if src in members else 0]

        return json.loads(ranks.together(take, apart=text))

    def all_gather(
        self, tensor: Tensor, theirs: Callable[[], Tensor], *, group: Any, sync_grads: bool
    ) -> Tensor:
        _check_of_all(group)
        if sync_grads:
            raise ValueError(
                "gradients must not travel through what is gathered with "
                'on_loss="continue", got all_gather(..., sync_grads=True); leave sync_grads out, '
                'or use on_loss="end"'
            )
        return torch.stack(self._gathered(tensor))

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        """Returns every member's tensor."""
        session = self._session

        def gather() -> list[Tensor]:
            session.meet()
            flat = tensor.detach().reshape(-1).contiguous()
            if flat.nbytes > LEAST_LIMIT:
                session.net.expect_at_most(flat.nbytes)
                session.meetings.barrier().wait()  # all do
            return [x.view(tensor.shape) for x in session.meetings.all_gather(flat).wait()]

        gathered: list[Tensor] = session.ranks.together(gather, apart=[tensor])
        return gathered

    def reduce(self, tensor: Tensor, op: str, theirs: Callable[[], Any], *, group: Any) -> Any:
        _check_of_all(group)
        return super().reduce(tensor, op, lambda: _reduced(self._gathered(tensor), op), group=None)

    def decide(self, decision: bool, *, is_of_all: bool) -> bool:
        """Returns whether all members vote yes, or any of them, the same on all.

        The votes alone tell: a rank may take over the votes of a view that had more members.
        """
        votes = self._gathered(torch.tensor(int(decision)))
        return bool(_reduced(votes, "min" if is_of_all else "max"))

    def check_in_step(self) -> None:
        raise ValueError(
            "a value of a step must not be asked of all ranks where one may be lost, got "
            'self.log(..., on_step=True, sync_dist=True) with on_loss="continue"; use '
            "on_epoch=True, on_step=False"
        )

    def check_all_there(self, what: str) -> None:
        ranks = self._session.ranks
        ranks.check_stays()
        if ranks.has_changed:
            raise RuntimeError(
                f"after the end of training all ranks must be there for fabric.{what}, got only "
                f"the ranks {ranks.members}; call it before, inside of `with fabric.strategy:`"
            )


def _check_of_all(group: Any) -> None:
    """Raises for a group of some ranks, whose collective would wait for a lost one."""
    if group is not None and group is not torch.distributed.group.WORLD:
        raise ValueError(
            f'a collective must be of all ranks with on_loss="continue", got group={group!r}; '
            'leave it out, or use on_loss="end"'
        )


def _reduced(tensors: list[Tensor], op: str) -> Tensor:
    """Reduces all members' tensors as Lightning reduces."""
    stacked = torch.stack(tensors)
    made: dict[str, Callable[[], Tensor]] = {
        "max": lambda: stacked.amax(0),
        "min": lambda: stacked.amin(0),
        "product": lambda: stacked.prod(0),
    }
    if op not in made:
        raise ValueError(
            'reduce_op must be mean, sum, max, min or product with on_loss="continue", got '
            f'{op!r}; use on_loss="end"'
        )
    return made[op]()
