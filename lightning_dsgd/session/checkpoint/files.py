"""A checkpoint is one file that torch loads anywhere, and beside it what each rank needs to go on.

    x.ckpt                           the consensus model, rank 0's training state; in Lightning's
                                     form, where Lightning saves it
    x.ckpt.replicas/rank_00003.pt    rank 3's weights, training state, algorithm and random states

The files of one save carry the same number, so that one left from another save is noticed.  On a
local disk a save over an older checkpoint takes effect at one moment; before it the older is whole:

    x.ckpt.replicas/rank_*.pt.new      are written; when all ranks have done so:
    x.ckpt.new  ->  x.ckpt             written, then renamed: from here on the new checkpoint counts
    rank_*.pt.new  ->  rank_*.pt       or when it is next loaded, if the ranks are killed before

What is written is on the disk (fsync, of the folders too) before it counts.  A save that fails on
one rank fails on all, and leaves nothing behind: a rank that cannot write says so, and every rank
removes its `.new`.  Where a rank is lost, rank 0 removes all of them, if the checkpoint does not
count yet: it alone knows.  Only what is there when rank 0 is lost stays: it may be needed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from lightning_dsgd.agreement import everyones
from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.session.checkpoint import record
from lightning_dsgd.transport import Transport, TransportError

_ABSENT: Final = "missing"


class FileIO(Protocol):
    """Writes and reads a file; Lightning's CheckpointIO is one."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Writes a file."""
        ...

    def load_checkpoint(
        self, path: str | Path, map_location: Any = ..., weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads a file."""
        ...

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes a file or a folder."""
        ...


class TorchFiles:
    """Writes and reads files of torch's own, of tensors and plain values.

    Args:
        maps: whether files are read piece by piece, as for a rank that needs a part of each
    """

    def __init__(self, *, maps: bool = False) -> None:
        self._maps = maps

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Writes a file; makes its folder if there is none."""
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        torch.save(checkpoint, path)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads a file, but never pickled objects."""
        checkpoint: dict[str, Any] = torch.load(
            path, map_location, weights_only=True, mmap=self._maps
        )
        return checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes a file or a folder."""
        if os.path.isdir(path):
            shutil.rmtree(path)
        elif os.path.exists(path):
            os.remove(path)


def replicas_folder(path: str | Path) -> str:
    """Returns the folder of a checkpoint's replicas, of the file itself if the path is a link."""
    return f"{os.path.realpath(path) if os.path.islink(path) else path}.replicas"


def replica_file(folder: str, rank: int) -> str:
    """Returns the file of one rank's replica."""
    return f"{folder}/rank_{rank:05d}.pt"


def _new(file: str | Path) -> str:
    """Returns the name of a file until the file counts."""
    return f"{file}.new"


def _can_rename(io: FileIO, path: str | Path) -> bool:
    """Returns whether `io` leaves a file where it was told to, on this machine's file system."""
    is_lightnings = any(base.__name__ == "TorchCheckpointIO" for base in type(io).__mro__)
    return (is_lightnings or isinstance(io, TorchFiles)) and "://" not in str(path)


def save(
    io: FileIO,
    net: Transport,
    path: str | Path,
    shared: dict[str, Any],
    own: dict[str, Any] | None,
    storage_options: Any = None,
    num_shards: int = 1,
) -> None:
    """Saves the consensus file and the replicas, on all ranks together.

    Args:
        io: writes files
        net: the network
        path: where the consensus file is
        shared: the content of the consensus file
        own: the content of this rank's replica; None where only the model is saved
        storage_options: passed to `io`
        num_shards: how many ranks hold a replica of the model together
    """
    number = torch.tensor([random.SystemRandom().getrandbits(60)])
    net.broadcast(number, src=0).wait()
    saved_as = record.Save(int(number), net.world_size, own is not None, num_shards)
    # Where the path is a link, a save replaces the link, so the replicas go beside the link.
    this = _Save(io, net, path, f"{path}.replicas", _can_rename(io, path), storage_options)
    if own is not None:
        replica = record.marked(own, saved_as, net.rank)
        this.on_all_ranks(lambda: this.write_replica(replica))
    consensus = record.marked(shared, saved_as)
    this.on_all_ranks(lambda: this.write_consensus(consensus))
    if own is not None and this.renames:
        file = replica_file(this.folder, net.rank)
        os.replace(_new(file), file)
        if net.rank == 0:
            _remove_replicas_from(this.folder, net.world_size)


def _remove_replicas_from(folder: str, rank: int) -> None:
    """Removes an older save's replicas, of more ranks, and what a lost rank has left of one."""
    found = True
    while found:
        file = replica_file(folder, rank)
        found = False
        for name in (file, _new(file)):
            with contextlib.suppress(FileNotFoundError):
                os.remove(name)
                found = True
        rank += 1


@dataclass
class _Save:
    """Makes one save on this rank; `counts` once rank 0 knows that the consensus file is new."""

    io: FileIO
    net: Transport
    path: str | Path
    folder: str
    renames: bool
    storage_options: Any
    counts: bool = False

    def write_replica(self, content: dict[str, Any]) -> None:
        file = replica_file(self.folder, self.net.rank)
        self._write(content, file)
        if self.renames:
            _sync(_new(file), self.folder, os.path.dirname(self.folder) or ".")
        self.net.check()  # once it has said that it is done, a rank must leave its file to rank 0

    def write_consensus(self, content: dict[str, Any]) -> None:
        """Writes the consensus on rank 0; the others have nothing to write."""
        if self.net.rank != 0:
            return
        self._write(content, self.path)
        if self.renames:
            _sync(_new(self.path))
            os.replace(_new(self.path), self.path)
            self.counts = True
            _sync(os.path.dirname(self.path) or ".")

    def _write(self, content: dict[str, Any], file: str | Path) -> None:
        self.io.save_checkpoint(content, _new(file) if self.renames else file, self.storage_options)

    def on_all_ranks(self, write: Callable[[], None]) -> None:
        """Calls `write`; raises on every rank, and removes all files, if one cannot write."""
        error: Exception | None = None
        try:
            write()
        except BaseException as err:
            if self.counts or not isinstance(err, Exception):
                self._clean_up()
                raise
            error = err  # others may be writing still: cleaned up when all have spoken
        try:
            faults = everyones(self.net, f"{type(error).__name__}: {error}" if error else "")
        except TransportError:
            if error or self.net.rank == 0:
                self._clean_up()
            raise
        if any(faults):
            self._clean_up()
            failed = ", ".join(f"{f} on rank {rank}" for rank, f in enumerate(faults) if f)
            left = "nothing is left of it" if self.renames else "do not use what is left of it"
            raise error or RuntimeError(
                f"every rank must be able to write its part of {self.path}, got {failed}; {left}, "
                "older checkpoints stay: make room, or choose another folder"
            )

    def _clean_up(self) -> None:
        if self.counts or not self.renames:
            return
        is_first = self.net.rank == 0
        ranks = range(self.net.world_size) if is_first else [self.net.rank]
        files = [replica_file(self.folder, rank) for rank in ranks]
        if is_first:
            files.append(str(self.path))
        with contextlib.suppress(OSError):  # of the folder, if it holds replicas of an older save
            for file in files:
                with contextlib.suppress(OSError):
                    os.remove(_new(file))
            os.rmdir(self.folder)


def _sync(*paths: str) -> None:
    """Puts files, and the names in folders, onto the disk."""
    for path in paths:
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        except OSError as err:
            # Some network file systems have no such thing for a folder.
            if err.errno not in (errno.EINVAL, errno.ENOTSUP) or not os.path.isdir(path):
                raise
        finally:
            os.close(opened)


def remove(io: FileIO, path: str | Path) -> None:
    """Removes a checkpoint with its replicas."""
    io.remove_checkpoint(path)
    io.remove_checkpoint(f"{path}.replicas")


def load_replica(
    io: FileIO,
    net: Transport,
    path: str | Path,
    shared: dict[str, Any],
    algorithm: Algorithm,
    announce: Callable[[str], None],
    weights_only: bool | None = None,
    num_shards: int = 1,
) -> dict[str, Any] | None:
    """Returns this rank's replica; None where all ranks agree to start from the consensus.

    Then what other ranks have held back is added to the consensus, for `record.carry_over`.

    Args:
        io: reads files
        net: the network
        path: where the consensus file is
        shared: the content of the consensus file
        algorithm: the algorithm that goes on
        announce: is told why they start from the consensus
        weights_only: passed to `io`
        num_shards: how many ranks hold a replica of the model together

    Raises:
        ValueError: on every rank, if a replica is damaged, or of another save or rank, or if the
            checkpoint is of another algorithm
    """
    record.check_algorithm(shared, path, algorithm.name)
    load = _Load(io, net, path, record.save_of(shared), weights_only, num_shards)
    own, reason = load.own_replica()
    if own is None:
        announce(f"All ranks start from the one model in {path}: {reason}.")
        if algorithm.traits.holds_back and load.saved_as is not None and load.saved_as.has_replicas:
            announce(load.add_held_back(shared, load.saved_as))
    return own


@dataclass
class _Load:
    """Reads the replicas of one save, on all ranks together; `saved_as` says which."""

    io: FileIO
    net: Transport
    path: str | Path
    saved_as: record.Save | None
    weights_only: bool | None
    num_shards: int

    def add_held_back(self, shared: dict[str, Any], saved_as: record.Save) -> str:
        """Adds the saved ranks' states to the consensus, each on one rank; says which are lost."""
        net, faults = self.net, []
        for rank in range(net.rank, saved_as.world_size, net.world_size):
            if self.num_shards == saved_as.num_shards == 1:
                own, fault = self._read_replica(rank, saved_as)
            else:
                own, fault = None, "of shards"
            if own is None:
                faults.append(f"{self._file(rank)}, {fault}")
            else:
                record.add_held_back(shared, own)
        lost = "; ".join(filter(None, everyones(net, "; ".join(faults))))
        if lost:
            return (
                f"What the ranks had held back of their gradients is lost as far as it lay in "
                f"{lost}."
            )
        return "They go on with what the ranks had held back of their gradients."

    def own_replica(self) -> tuple[dict[str, Any] | None, str]:
        """Returns this rank's replica; or None, and why there is no replica to go on from."""
        saved_as, net = self.saved_as, self.net
        if saved_as is None:
            return None, (
                "it was saved by another strategy or after training, with one model for all"
            )
        if not saved_as.has_replicas:
            return None, "it holds the model only"
        if saved_as.world_size != net.world_size:
            saved = f"it was saved from {saved_as.world_size} ranks"
            return None, f"{saved} and there are {net.world_size} now"
        if saved_as.num_shards != self.num_shards:
            return None, f"a replica had {saved_as.num_shards} shards and has {self.num_shards} now"
        own, fault = self._read_replica(net.rank, saved_as)
        faults, folder = everyones(net, fault), replicas_folder(self.path)
        if set(faults) == {_ABSENT}:
            return None, f"there is no replica in {folder}"
        bad = [f"{self._file(rank)}, {f}" for rank, f in enumerate(faults) if f]
        if bad:
            raise ValueError(
                "every replica of a checkpoint must be complete and have the number of its rank, "
                f"got {'; '.join(bad)}; put the right files there, or remove {folder} to start "
                "from the consensus"
            )
        return own, ""

    def _file(self, rank: int) -> str:
        return replica_file(replicas_folder(self.path), rank)

    def _read_replica(self, rank: int, saved_as: record.Save) -> tuple[dict[str, Any] | None, str]:
        """Reads a rank's replica, a newer file if the ranks were killed while they saved."""
        file = self._file(rank)
        own, fault = self._read(file, rank, saved_as)
        if fault and os.path.exists(_new(file)):
            newer, newer_fault = self._read(_new(file), rank, saved_as)
            if not newer_fault:
                os.replace(_new(file), file)
                return newer, ""
        return own, fault

    def _read(
        self, file: str, rank: int, saved_as: record.Save
    ) -> tuple[dict[str, Any] | None, str]:
        """Reads a rank's replica; returns what is wrong with the file too, or an empty text."""
        try:
            own: dict[str, Any] = self.io.load_checkpoint(
                file, map_location=lambda storage, _: storage, weights_only=self.weights_only
            )
            of_save, of_rank = record.save_of(own), record.rank_of(own)
        except FileNotFoundError:
            return None, _ABSENT
        except Exception as err:  # whatever a damaged file makes the reader raise
            return None, f"damaged ({f'{type(err).__name__}: {err}'.splitlines()[0]})"
        if of_save is None or of_save.save_number != saved_as.save_number:
            return None, "from another save than the checkpoint"
        if of_rank != rank:
            return None, f"the replica of rank {of_rank}"
        return own, ""
