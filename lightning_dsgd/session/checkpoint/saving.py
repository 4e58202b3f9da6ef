"""How all ranks save a training together."""

from __future__ import annotations

from typing import Any

from lightning_dsgd.session.checkpoint import files, record
from lightning_dsgd.session.under_way import trained


def save(
    session: Any,
    io: files.FileIO,
    path: str,
    checkpoint: dict[str, Any],
    storage_options: Any = None,
    *,
    has_replicas: bool,
) -> None:
    """Saves what all ranks agree on, and each rank's own beside it; on all ranks together.

    Args:
        session: the session that trains
        io: writes a file
        path: the file with the consensus; rank 0's path counts
        checkpoint: a checkpoint with this rank's weights under "state_dict"
        storage_options: passed to `io`
        has_replicas: whether training is to go on from the checkpoint
    """
    training = trained(session.training)
    algorithm, replica = training.algorithm, training.replica
    if training.claiming is not None:
        training.claiming.save(checkpoint)

    def write() -> None:
        # Ranks with other numbers of steps have other names for it.
        name = session.text_of_rank_0(path)
        shared = record.with_record(replica.consensus(checkpoint), record.of_model(algorithm))
        own = None
        if has_replicas:
            mine = record.of_replica(algorithm, replica)
            own = record.with_record(replica.own(checkpoint), mine)
        files.save(io, session.meetings, name, shared, own, storage_options)
        session.begin_to_count()  # one rank writes, the others wait

    session.ranks.together(write)
