"""What this package adds to a checkpoint: written and read here alone, under one key.

In the file of the model, and in each rank's replica:

    algorithm, hyperparameters   what it was trained with
    save_number                  the same in all files of one save
    world_size, has_replicas     how many ranks there were, and whether their replicas were saved
    num_shards                   how many ranks held a replica of the model together

In a replica also:

    rank                         whose it is
    algorithms, parameters       for each part: what the algorithm keeps, and what it trains
    updates                      for each part: how far all ranks' updates lead, of some entries
    random_states                of all generators
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from lightning_dsgd import devices
from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.replica.replica import Replica

_KEY: Final = "lightning_dsgd"
CLAIMS: Final = "lightning_dsgd_claims"
"""The key of what ranks have claimed in an epoch (`data.claims`)."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Save:
    """Holds what all files of one save have in common."""

    save_number: int
    world_size: int
    has_replicas: bool
    num_shards: int = 1


def of_model(algorithm: Algorithm) -> Record:
    """Returns the record that stands in every file."""
    return {"algorithm": algorithm.name, "hyperparameters": algorithm.hyperparameters()}


def of_replica(algorithm: Algorithm, replica: Replica) -> Record:
    """Returns the record that stands in a rank's replica."""
    return of_model(algorithm) | {
        "algorithms": replica.state_dict(),
        "parameters": replica.names(),
        "updates": replica.updates(),
        "random_states": random_states(),
    }


def with_record(checkpoint: dict[str, Any], record: Record) -> dict[str, Any]:
    """Returns a checkpoint to be saved, with our record."""
    return {**checkpoint, _KEY: record}


def marked(checkpoint: dict[str, Any], save: Save, rank: int | None = None) -> dict[str, Any]:
    """Returns a checkpoint marked as a file of this save, and as this rank's if it is a replica."""
    entry = asdict(save) | ({} if rank is None else {"rank": rank})
    return {**checkpoint, _KEY: {**checkpoint[_KEY], **entry}}


def without_record(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint without our record."""
    return {key: value for key, value in checkpoint.items() if key != _KEY}


def save_of(checkpoint: Mapping[str, Any]) -> Save | None:
    """Returns the save that a checkpoint is part of; None where another strategy has saved it."""
    record = checkpoint.get(_KEY)
    if record is None:
        return None
    return Save(
        record["save_number"],
        record["world_size"],
        record["has_replicas"],
        record.get("num_shards", 1),
    )


def rank_of(replica: Mapping[str, Any]) -> int:
    """Returns the rank whose replica this is."""
    return int(replica[_KEY]["rank"])


def check_algorithm(shared: Mapping[str, Any], path: str | Path, algorithm: str) -> None:
    """Raises `ValueError` for a checkpoint of another algorithm."""
    saved = shared.get(_KEY, {}).get("algorithm", algorithm)
    if saved != algorithm:
        raise ValueError(
            "training must go on with the algorithm that it was saved from, got "
            f"strategy={algorithm!r} for {path}, saved from {saved!r}; use strategy={saved!r}, or "
            "start a new training from its weights, which lie under state_dict in it"
        )


def add_held_back(shared: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Adds what a rank's algorithms kept to the consensus that was saved with it."""
    kept = {name: own[_KEY][name] for name in ("algorithms", "parameters")}
    shared[_KEY].setdefault("held_back", []).append(kept)


def carry_over(shared: Mapping[str, Any], replica: Replica) -> None:
    """Has the replica take over what `add_held_back` has added."""
    record = shared.get(_KEY, {})
    for each in record.pop("held_back", ()):
        if not replica.carry_over(each["algorithms"], each["parameters"], record["world_size"]):
            warnings.warn(
                "what ranks had held back of their gradients is lost, as other parameters are "
                "trained now than when it was saved",
                stacklevel=2,
            )


def restore(own: Mapping[str, Any], replica: Replica) -> Record:
    """Has the replica take over its record; returns the random states in that record."""
    record = own[_KEY]
    replica.load_state_dict(record["algorithms"], record["parameters"], record.get("updates"))
    states: Record = record["random_states"]
    restore_random_states(states)
    return states


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Sets all random generators that training uses."""
    torch.set_rng_state(states["torch"])
    devices.restore_random_states(states)
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype("uint32"), *rest))


def random_states() -> dict[str, Any]:
    """Returns the states of all random generators of training, as plain values and tensors."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        **devices.random_states(),
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached],  # type: ignore[union-attr]
    }
