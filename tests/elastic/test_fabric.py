"""A loop in Fabric goes on without a rank that is killed: real processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger

import lightning_dsgd as dsgd
from tests.elastic.test_plain import NUM_EPOCHS, SURVIVES, check_left, loss_of, make_calm
from tests.fabric.test_fabric import steps
from tests.plain.test_training import loader_of
from tests.support.models import weights
from tests.support.worlds import FitWorld


def train(folder: str) -> dict[str, Any]:
    model, optimizer = make_calm()
    strategy = dsgd.FabricStrategy(dsgd.WAGMA(), **SURVIVES)
    logger = CSVLogger(folder, "logs", flush_logs_every_n_steps=1)
    fabric = Fabric(accelerator="cpu", devices=3, strategy=strategy, loggers=logger)
    fabric.launch()
    net, optimizer = fabric.setup(model.net, optimizer)
    rank = fabric.global_rank
    with strategy:
        for epoch in range(NUM_EPOCHS):
            batches = strategy.batches(loader_of(rank, 12 + 2 * rank))
            for number, batch in enumerate(batches):
                if (rank, epoch, number) == (0, 1, 8):
                    os.kill(os.getpid(), signal.SIGKILL)
                steps(fabric, net, optimizer, [batch])
            with strategy.consensus():
                total = float(fabric.all_reduce(torch.tensor(1.0), reduce_op="sum"))
                largest = float(fabric.all_reduce(torch.tensor(float(rank)), reduce_op="max"))
                ranks = fabric.all_gather(torch.tensor(rank)).tolist()
            fabric.log("ranks", total, epoch)
            told = fabric.broadcast({"epoch": epoch, "rank": rank}, 2)
            state = {"model": net, "optimizer": optimizer, "epoch": epoch}
            fabric.save(Path(folder, "saved.ckpt"), state)
        decided = strategy.reduce_boolean_decision(True)
        figures = strategy.communication()
    with pytest.raises(RuntimeError, match="all ranks must be there for"):
        fabric.all_reduce(torch.tensor(1.0))
    return {
        "weights": weights(model),
        "loss": loss_of(model),
        "collectives": (total, largest, ranks, told, decided),
        "num_members": figures["num_members"],
        "view": figures["view"],
        "members": strategy.members,
        "is_first": fabric.is_global_zero,
    }


def test_a_rank_is_killed_and_the_others_train_to_the_end(tmp_path):
    outcomes = FitWorld(timeout_s=60.0).outcomes(3, train, str(tmp_path))
    check_left(outcomes, [0], tmp_path / "saved.ckpt")
    for rank in (1, 2):
        result = outcomes[rank].result
        assert result["members"] == (1, 2)
        assert result["is_first"] == (rank == 1)
        told = {"epoch": NUM_EPOCHS - 1, "rank": 2}
        assert result["collectives"] == (2.0, 2.0, [1, 2], told, True)
        assert result["view"] == 1.0
    logged = [file.read_text().splitlines() for file in tmp_path.rglob("metrics.csv")]
    assert f"2.0,{NUM_EPOCHS - 1}" in [lines[-1] for lines in logged]
    assert len(logged) == 2  # the first that is left has a file of its own
