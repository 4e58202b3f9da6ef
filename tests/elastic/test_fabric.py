"""A loop in Fabric goes on without a rank that is lost: real processes, killed by SIGKILL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger

import lightning_dsgd as dsgd
from tests.elastic.test_plain import (
    NUM_EPOCHS,
    SURVIVES,
    Places,
    algorithm_of,
    check_left,
    loss_of,
    make_calm,
)
from tests.fabric.test_fabric import steps
from tests.plain.test_training import loader_of
from tests.support.doomed import await_leave
from tests.support.models import weights
from tests.support.thorough import cases
from tests.support.worlds import FitWorld

WORLD = FitWorld(timeout_s=60.0)


def loop(name: str, folder: str, places: Places) -> dict[str, Any]:
    model, optimizer = make_calm()
    strategy = dsgd.FabricStrategy(algorithm_of(name), **SURVIVES)
    size = dist.get_world_size()
    logger = CSVLogger(folder, "logs", flush_logs_every_n_steps=1)
    fabric = Fabric(accelerator="cpu", devices=size, strategy=strategy, loggers=logger)
    fabric.launch()
    net, optimizer = fabric.setup(model.net, optimizer)
    rank, sums = fabric.global_rank, []
    with fabric.strategy:
        for epoch in range(NUM_EPOCHS):
            for batch in fabric.strategy.batches(loader_of(rank, 12 + 2 * rank)):
                places.at("batch")
                await_leave(fabric.strategy.session)
                steps(fabric, net, optimizer, [batch])
            with fabric.strategy.consensus():
                places.at("evaluation")
                sums.append(float(fabric.all_reduce(torch.tensor(1.0), reduce_op="sum")))
                largest = float(fabric.all_reduce(torch.tensor(float(rank)), reduce_op="max"))
                ranks = fabric.all_gather(torch.tensor(rank)).tolist()
            fabric.log("ranks", sums[-1], epoch)
            members = {fabric.strategy.members}
            told = fabric.broadcast({"epoch": epoch, "rank": rank}, 1)
            members.add(fabric.strategy.members)  # of one that is lost meanwhile, either is right
            assert told["rank"] in {1 if 1 in ranks else ranks[0] for ranks in members}
            assert told["epoch"] == epoch
            places.at("save")
            state = {"model": net, "optimizer": optimizer, "epoch": epoch}
            fabric.save(Path(folder, "saved.ckpt"), state)
        decided = fabric.strategy.reduce_boolean_decision(True)
        figures = fabric.strategy.communication()
        places.at("end")
    if len(fabric.strategy.members) < size:
        with pytest.raises(RuntimeError, match="all ranks must be there for"):
            fabric.all_reduce(torch.tensor(1.0))
    return {
        "weights": weights(model),
        "loss": loss_of(model),
        "sums": sums,
        "last": (largest, ranks, decided),
        "num_members": figures["num_members"],
        "view": figures["view"],
        "members": fabric.strategy.members,
        "is_first": fabric.is_global_zero,
    }


def train(name: str, folder: str, lost: int, doomed: str) -> Any:
    return loop(name, folder, Places(doomed if dist.get_rank() == lost else ""))


@cases("name, lost, doomed", now=[("wagma", 0, "batch 20")], later=[("allreduce", 2, "save 2")])
def test_a_rank_is_killed_and_the_others_train_to_the_end(name, lost, doomed, tmp_path):
    outcomes = WORLD.outcomes(3, train, name, str(tmp_path), lost, doomed)
    check_left(outcomes, [lost], tmp_path / "saved.ckpt")
    left = [rank for rank in range(3) if rank != lost]
    for rank in left:
        result = outcomes[rank].result
        assert result["members"] == tuple(left)
        assert result["is_first"] == (rank == left[0])
        assert result["last"] == (float(left[-1]), left, True)
        assert result["view"] == 1.0
        assert result["sums"][-1] == 2.0
    logged = [file.read_text().splitlines() for file in tmp_path.rglob("metrics.csv")]
    assert f"2.0,{NUM_EPOCHS - 1}" in [lines[-1] for lines in logged]
    assert len(logged) == (2 if lost == 0 else 1)  # the first that is left has a file of its own
