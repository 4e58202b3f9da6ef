"""What the ranks do together that hold a replica: they ask each other, fail, and save.

In the files of a checkpoint:

    x.pt                            whole tensors, as training without shards saves them
    x.pt.replicas/rank_00003.pt     rank 3's shards, of weights and optimizers, each a dict with
                                    one key, `SHARD`
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_dsgd.agreement import everyones
from lightning_dsgd.session.checkpoint import files, record
from lightning_dsgd.session.session import Session
from lightning_dsgd.session.under_way import trained
from lightning_dsgd.sharded.shards import SHARD, local
from lightning_dsgd.transport import PeerLost, TransportError


class ProcessRow:
    """Asks, over gloo, the ranks that hold this replica together: see `Row`.

    All ranks make their rows together.

    Args:
        session: the session of this rank
        rows: the ranks of each replica; None: the process group is of this row alone
    """

    def __init__(self, session: Session[Any], rows: Sequence[tuple[int, ...]] | None) -> None:
        self._session = session
        if rows is None:
            self._group = dist.group.WORLD
            return
        timeout = timedelta(seconds=session.net.timeout_s)
        make_groups: Any = dist.new_subgroups_by_enumeration
        self._group, _ = make_groups(rows, timeout, "gloo")

    def has_lost(self, lost: PeerLost | None) -> bool:
        """Returns whether any rank of the row has met a loss."""
        flag = torch.tensor([int(lost is not None)])
        with blaming(self._session):
            dist.all_reduce(flag, dist.ReduceOp.MAX, self._group)
        return bool(flag)

    def meet(self) -> None:
        """Waits for the other ranks of the row, before a view watches them."""
        dist.all_reduce(torch.zeros(1), group=self._group)


def save(
    session: Session[Any],
    path: str,
    checkpoint: Callable[[], dict[str, Any]],
    *,
    has_replicas: bool = True,
) -> None:
    """Saves the consensus, and each rank's own state beside it; all ranks call it together.

    What is gathered in a view is written in that view, or gathered anew: the ranks that have
    gathered it may be lost.

    Args:
        session: the session that trains
        path: the file with the consensus, in whole tensors; rank 0's path counts
        checkpoint: makes a checkpoint, its tensors in shards, from the model's weights at that time
        has_replicas: whether training is to go on from the checkpoint
    """
    trained(session.training)
    path = session.text_of_rank_0(path)
    is_saved = False
    while not is_saved:
        shared, number = _gathered_consensus(session, checkpoint)
        own = _own(session, checkpoint) if has_replicas else None
        is_saved = session.ranks.together(partial(_write, session, path, shared, own, number))


def _gathered_consensus(
    session: Session[Any], checkpoint: Callable[[], dict[str, Any]]
) -> tuple[dict[str, Any], int]:
    """Returns what the first replica has gathered, nothing on the others, and the view's number."""
    assert session.training is not None
    replica, is_shown = session.training.replica, session.training.replica.shows_consensus
    if not is_shown:
        session.ranks.show(replica.show_consensus)
    # All ranks of this replica are here: none changes the view while another gathers.
    try:
        sharding: Any = session.sharding
        is_first = sharding.members[0] == session.meetings.rank
        with blaming(session):
            whole = gathered(checkpoint()) if is_first else {}
    finally:
        if not is_shown:
            replica.show_own()
    shared = record.with_record(whole, record.of_model(session.training.algorithm))
    return shared, session.ranks.number


def _own(session: Session[Any], checkpoint: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what this rank needs to go on."""
    assert session.training is not None
    algorithm, replica = session.training.algorithm, session.training.replica
    is_shown = replica.shows_consensus
    with replica.as_own():
        own = in_shards(checkpoint())
        if is_shown:  # else they change with the model
            own = {**own, "state_dict": _mapped(own["state_dict"], torch.clone)}
        return record.with_record(own, record.of_replica(algorithm, replica))


def _write(
    session: Session[Any],
    path: str,
    shared: dict[str, Any],
    own: dict[str, Any] | None,
    number: int,
) -> bool:
    """Writes unless a rank has gathered in an earlier view; returns whether files were written."""
    meetings, sharding = session.meetings, session.sharding
    if set(everyones(meetings, str(number))) != {str(session.ranks.number)}:
        return False
    files.save(files.TorchFiles(), meetings, path, shared, own, num_shards=sharding.num_shards)
    return True


@contextlib.contextmanager
def blaming(session: Session[Any]) -> Iterator[None]:
    """Runs a step; raises `PeerLost` where a collective of the shards failed for a lost rank."""
    try:
        yield
    except RuntimeError as error:
        # gloo has no error of its own; other errors must not wait for news of a lost rank.
        is_collectives = isinstance(error, dist.DistError) or "gloo" in str(error)
        if not is_collectives or isinstance(error, TransportError):
            raise
        with session.blaming("a collective of this replica's shards"):
            raise


def lost_behind(session: Session[Any], exception: BaseException) -> PeerLost | None:
    """Returns the lost rank that has made a collective of the shards fail, if one has."""
    if isinstance(exception, PeerLost):
        return None
    try:
        with blaming(session):
            raise exception
    except PeerLost as lost:
        return lost
    except BaseException:
        return None


# ---- what is saved ----


def in_shards(value: Any) -> Any:
    """Returns this rank's share of a state: each sharded tensor as this rank's shard."""
    return _mapped(value, lambda t: {SHARD: local(t)} if isinstance(t, DTensor) else t)


def gathered(value: Any) -> Any:
    """Returns a state with whole tensors, copied to the CPU; all ranks of a replica call it."""

    def gather(tensor: Tensor) -> Tensor:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return whole.detach().to("cpu", copy=True)

    with torch.no_grad():
        return _mapped(value, gather)


def _mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Returns the same dicts and lists with every tensor in them changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _mapped(each, change) for name, each in value.items()}
    if isinstance(value, list | tuple):
        changed = [_mapped(each, change) for each in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    return value
