"""What `bench convergence` trains."""

from __future__ import annotations

import inspect

import pytest

from lightning_dsgd.lab.bench.rank import load
from lightning_dsgd.lab.bench.workloads import WORKLOADS


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_names_a_model_and_data_that_take_its_options(name: str) -> None:
    workload = WORKLOADS[name]
    for reference, options in (
        (workload.model, workload.model_options),
        (workload.data, workload.data_options),
    ):
        inspect.signature(load(reference)).bind(**options)
