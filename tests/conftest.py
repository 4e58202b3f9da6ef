"""What lasts longer than one test."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch

from tests.support.mpi import MPIJob

# A shell that starts the tests in the background has let them ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)


PLUGINS = {"timeout": "timeout", "xdist": "xdist_group"}
"""The marks of each plugin: a checkout runs without them on a machine that has pytest alone."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.has_plugin("timeout"):
        parser.addini("timeout", "no limit: pytest-timeout is not installed")


def pytest_configure(config: pytest.Config) -> None:
    for plugin, mark in PLUGINS.items():
        if not config.pluginmanager.has_plugin(plugin):
            config.addinivalue_line("markers", f"{mark}: nothing, as its plugin is not installed")


LATER_S = 300
"""How long a test may take that is exhaustive, unless it has a limit of its own."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives what takes long a longer limit than the configuration, which is for what hangs."""
    for item in items:
        is_later = item.get_closest_marker("exhaustive") or item.get_closest_marker("versions")
        if is_later and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LATER_S))


def pytest_runtest_setup(item: pytest.Item) -> None:
    needs = [mark.args for mark in item.iter_markers("gpu")]
    if needs and not torch.accelerator.is_available():
        pytest.skip("needs an accelerator")
    if ("cuda",) in needs and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def mpi_jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], MPIJob]]:
    """One job of mpiexec for each interpreter, started when it is first asked for."""
    jobs = []

    @cache
    def job_of(python: str) -> MPIJob:
        jobs.append(MPIJob(python, tmp_path_factory.mktemp("mpi")))
        return jobs[-1]

    yield job_of
    for job in jobs:
        job.stop()
