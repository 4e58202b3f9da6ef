"""A checkpoint is one file that plain Lightning loads, and beside it what each rank needs to go on.

    x.ckpt                             the consensus model and rank 0's training state, in Lightning's form
    x.ckpt.replicas/rank_00003.pt      rank 3's weights, training state, algorithm and random states

Every file is complete or absent.  Those of one save carry the same number, so that a file left from
another save is noticed.  The consensus file is written last: where it is, its replicas are.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from lightning.fabric.plugins import CheckpointIO

from lightning_dsgd.transport import Transport

KEY: Final = "lightning_dsgd"
"""Under which both kinds of file keep what is ours."""

_GOOD, _ABSENT, _DAMAGED = range(3)


def replicas_folder(path: str | Path) -> str:
    """Where the replicas of a checkpoint lie; that of the file itself if the path is a link to it."""
    text = str(path)
    return f"{os.path.realpath(text) if os.path.islink(text) else text}.replicas"


def replica_file(path: str | Path, rank: int) -> str:
    return f"{replicas_folder(path)}/rank_{rank:05d}.pt"


def save(
    io: CheckpointIO,
    net: Transport,
    path: str | Path,
    shared: dict[str, Any],
    own: dict[str, Any] | None,
    storage_options: Any = None,
) -> None:
    """Writes both kinds of file, on all ranks together.

    Args:
        io: Lightning's way to write a file
        net: the network
        path: of the consensus file
        shared: its content
        own: the content of this rank's replica; None where only the model is saved
        storage_options: for `io`
    """
    number = torch.tensor([random.SystemRandom().getrandbits(60)])
    net.broadcast(number, src=0).wait()
    mark = {
        "save_number": int(number),
        "world_size": net.world_size,
        "has_replicas": own is not None,
    }
    if own is not None:
        io.save_checkpoint(
            {**own, KEY: {**own[KEY], **mark, "rank": net.rank}},
            replica_file(path, net.rank),
            storage_options=storage_options,
        )
        net.barrier().wait()
    if net.rank == 0:
        io.save_checkpoint(
            {**shared, KEY: {**shared[KEY], **mark}}, path, storage_options=storage_options
        )


def remove(io: CheckpointIO, path: str | Path) -> None:
    io.remove_checkpoint(path)
    io.remove_checkpoint(f"{path}.replicas")


def check_algorithm(shared: dict[str, Any], path: str | Path, algorithm: str) -> None:
    saved = shared.get(KEY, {}).get("algorithm", algorithm)
    if saved != algorithm:
        raise ValueError(
            f"training goes on with the algorithm that it was saved from, got strategy={algorithm!r} for "
            f"{path}, saved from {saved!r}; use strategy={saved!r}, or start a new training from its "
            "weights with LightningModule.load_from_checkpoint"
        )


def load_replica(
    io: CheckpointIO, net: Transport, path: str | Path, shared: dict[str, Any]
) -> tuple[dict[str, Any] | None, str]:
    """This rank's replica; or None, and why training starts from the consensus.  All ranks agree.

    Raises:
        ValueError: on every rank, if a replica is damaged or does not belong to the checkpoint.
    """
    mark = shared.get(KEY)
    if mark is None:
        return None, "it was saved by another strategy, which has one model only"
    if not mark["has_replicas"]:
        return None, "it holds the model only"
    if mark["world_size"] != net.world_size:
        return (
            None,
            f"it was saved from {mark['world_size']} ranks and there are {net.world_size} now",
        )
    own, verdict, reason = _read_replica(io, replica_file(path, net.rank), mark)
    verdicts = [int(v) for v in net.all_gather(torch.tensor([verdict])).wait()]
    bad = [rank for rank, v in enumerate(verdicts) if v == _DAMAGED]
    absent = [rank for rank, v in enumerate(verdicts) if v == _ABSENT]
    if bad or (absent and len(absent) < net.world_size):
        which = ", ".join(replica_file(path, rank) for rank in bad or absent)
        raise ValueError(
            f"every replica of a checkpoint must be complete, got a damaged or missing {which}"
            + (f" ({reason})" if reason else "")
            + f"; restore it, or remove {replicas_folder(path)} to start from the consensus"
        )
    if absent:
        return None, f"there is no {replicas_folder(path)}"
    return own, ""


def _read_replica(
    io: CheckpointIO, file: str, mark: dict[str, Any]
) -> tuple[dict[str, Any] | None, int, str]:
    try:
        own: dict[str, Any] = io.load_checkpoint(
            file, map_location=lambda storage, _: storage, weights_only=True
        )
        number = own[KEY]["save_number"]
    except FileNotFoundError:
        return None, _ABSENT, ""
    except Exception as err:  # noqa: BLE001 - whatever a damaged file makes the reader raise
        return None, _DAMAGED, f"{type(err).__name__}: {err}".splitlines()[0]
    if number != mark["save_number"]:
        return None, _DAMAGED, "it is from another save than the checkpoint"
    return own, _GOOD, ""


def random_states() -> dict[str, Any]:
    """The states of all generators that training draws from, as plain values and tensors."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached],  # type: ignore[union-attr]
    }


def restore_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
