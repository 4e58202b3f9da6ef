"""The worlds that keep the contract."""

from __future__ import annotations

import pytest

from tests.support.mpi import PYTHONS, MPIWorld
from tests.support.worlds import ProcessWorld
from tests.transport.contract.helpers import PATIENCE_S, Simulated


@pytest.fixture(params=["simulated", "process_group", *PYTHONS])
def world(request: pytest.FixtureRequest) -> Simulated | ProcessWorld:
    if request.param == "simulated":
        return Simulated()
    limits = {"timeout_s": PATIENCE_S, "heartbeat_timeout_s": PATIENCE_S}
    if request.param == "process_group":
        return ProcessWorld(**limits)
    return MPIWorld(**limits, job=request.getfixturevalue("mpi_jobs")(request.param))
