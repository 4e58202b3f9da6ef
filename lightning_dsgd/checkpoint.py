"""A checkpoint is one file that plain Lightning loads, and beside it what each rank needs to go on.

    x.ckpt                           the consensus model, rank 0's training state; Lightning's form
    x.ckpt.replicas/rank_00003.pt    rank 3's weights, training state, algorithm and random states

The files of one save carry the same number, so that one left from another save is noticed.  On a
local disk a save over an older checkpoint takes effect at one moment; before it the older is whole:

    x.ckpt.replicas/rank_*.pt.new      are written; when all ranks have done so:
    x.ckpt.new  ->  x.ckpt             written, then renamed: from here on the new checkpoint counts
    rank_*.pt.new  ->  rank_*.pt       or when it is next loaded, if the ranks are killed before
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
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
    """Where the replicas of a checkpoint lie; of the file itself if the path is a link to it."""
    return f"{os.path.realpath(path) if os.path.islink(path) else path}.replicas"


def replica_file(folder: str, rank: int) -> str:
    """Where one rank's replica lies."""
    return f"{folder}/rank_{rank:05d}.pt"


def _new(file: str | Path) -> str:
    """What a file is called until it counts."""
    return f"{file}.new"


def _can_rename(io: CheckpointIO, path: str | Path) -> bool:
    """Whether `io` leaves a file where it was told to, and on this machine's file system."""
    is_torchs = any(base.__name__ == "TorchCheckpointIO" for base in type(io).__mro__)
    return is_torchs and "://" not in str(path)


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
    renames = _can_rename(io, path)
    # Where the path is a link, a save replaces the link, so the replicas go beside the link.
    replica = replica_file(f"{path}.replicas", net.rank)
    if own is not None:
        own = {**own, KEY: {**own[KEY], **mark, "rank": net.rank}}
        io.save_checkpoint(own, _new(replica) if renames else replica, storage_options)
        net.barrier().wait()
    if net.rank == 0:
        shared = {**shared, KEY: {**shared[KEY], **mark}}
        io.save_checkpoint(shared, _new(path) if renames else path, storage_options)
        if renames:
            os.replace(_new(path), path)
    if own is not None and renames:
        net.barrier().wait()
        os.replace(_new(replica), replica)


def remove(io: CheckpointIO, path: str | Path) -> None:
    """Removes a checkpoint with its replicas."""
    io.remove_checkpoint(path)
    io.remove_checkpoint(f"{path}.replicas")


def check_algorithm(shared: dict[str, Any], path: str | Path, algorithm: str) -> None:
    """Raises `ValueError` for a checkpoint of another algorithm."""
    saved = shared.get(KEY, {}).get("algorithm", algorithm)
    if saved != algorithm:
        raise ValueError(
            "training must go on with the algorithm that it was saved from, got "
            f"strategy={algorithm!r} for {path}, saved from {saved!r}; use strategy={saved!r}, or "
            "start a new training from its weights with LightningModule.load_from_checkpoint"
        )


def load_replica(
    io: CheckpointIO,
    net: Transport,
    path: str | Path,
    shared: dict[str, Any],
    weights_only: bool | None = None,
) -> tuple[dict[str, Any] | None, str]:
    """This rank's replica; or None, and why training starts from the consensus.  All ranks agree.

    Raises:
        ValueError: on every rank, if a replica is damaged or does not belong to the checkpoint.
    """
    mark = shared.get(KEY)
    if mark is None:
        return None, "it was saved by another strategy or after training, with one model for all"
    if not mark["has_replicas"]:
        return None, "it holds the model only"
    if mark["world_size"] != net.world_size:
        return (
            None,
            f"it was saved from {mark['world_size']} ranks and there are {net.world_size} now",
        )
    folder = replicas_folder(path)
    own, verdict, reason = _read_replica(io, replica_file(folder, net.rank), mark, weights_only)
    verdicts = [int(v) for v in net.all_gather(torch.tensor([verdict])).wait()]
    bad = [rank for rank, v in enumerate(verdicts) if v == _DAMAGED]
    absent = [rank for rank, v in enumerate(verdicts) if v == _ABSENT]
    if bad or (absent and len(absent) < net.world_size):
        which = ", ".join(replica_file(folder, rank) for rank in bad or absent)
        raise ValueError(
            f"every replica of a checkpoint must be complete, got a damaged or missing {which}"
            + (f" ({reason})" if reason else "")
            + f"; restore it, or remove {folder} to start from the consensus"
        )
    if absent:
        return None, f"there is no replica in {folder}"
    return own, ""


def _read_replica(
    io: CheckpointIO, file: str, mark: dict[str, Any], weights_only: bool | None
) -> tuple[dict[str, Any] | None, int, str]:
    own, verdict, reason = _read(io, file, mark, weights_only)
    if verdict != _GOOD and os.path.exists(_new(file)):
        newer, newer_verdict, _ = _read(io, _new(file), mark, weights_only)
        if newer_verdict == _GOOD:
            os.replace(_new(file), file)
            return newer, _GOOD, ""
    return own, verdict, reason


def _read(
    io: CheckpointIO, file: str, mark: dict[str, Any], weights_only: bool | None
) -> tuple[dict[str, Any] | None, int, str]:
    try:
        own: dict[str, Any] = io.load_checkpoint(
            file, map_location=lambda storage, _: storage, weights_only=weights_only
        )
        number = own[KEY]["save_number"]
    except FileNotFoundError:
        return None, _ABSENT, ""
    except Exception as err:  # whatever a damaged file makes the reader raise
        return None, _DAMAGED, f"{type(err).__name__}: {err}".splitlines()[0]
    if number != mark["save_number"]:
        return None, _DAMAGED, "it is from another save than the checkpoint"
    return own, _GOOD, ""


def is_within_epoch(checkpoint: Mapping[str, Any]) -> bool:
    """Whether it was saved after an epoch had begun and before it was over."""
    epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
    return bool(epochs["processed"] < epochs["started"])


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
    """Takes over what `random_states` gave."""
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
