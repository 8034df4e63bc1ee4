"""Settings of every test run: the same examples, one thread per process, equal captures once."""

import gc
import os
import sys
from contextlib import nullcontext

import pytest
from hypothesis import settings

# Test workers and ranks share few cores. Ranks inherit this; torch reads it when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests replace parts of the capture, which a cached one would not run.
os.environ.setdefault("SHARDWRIGHT_NO_CACHE", "1")

# `pytest --hypothesis-profile explore` looks for new counterexamples.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=2000, deadline=None)
settings.load_profile("ci")


def pytest_collection_finish():
    """Leave what is imported out of garbage collections, which many tests and runs ask for."""
    gc.collect()
    gc.freeze()


# These capture in each process, as users do.
CAPTURING = (
    "tests.browser.",
    "tests.docs.",
    "tests.property.",
    "tests.ranks.test_gathering",
    "tests.ranks.test_opaque",
    "tests.ranks.test_parallel_module",
    "tests.ranks.test_verify",
    "tests.unit.tracing.",
    "tests.unit.train.targets.test_capture_cache",
)


@pytest.fixture(scope="session")
def _captures_of_the_run(tmp_path_factory):
    """A folder of all workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "captures"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module", autouse=True)
def _in_less_time(request, _captures_of_the_run):
    """Tests do not capture again what another one has captured, nor import torch for each rank."""
    if "torch" not in sys.modules:  # which some packages do without
        yield
        return
    from tests.harness import captures, ranks, torch_speed

    torch_speed.speed_up()
    name = request.module.__name__
    anew = name.startswith(CAPTURING)
    with (
        nullcontext() if anew else captures.remembered(_captures_of_the_run),
        nullcontext() if name == "tests.ranks.test_verify" else ranks.verify_forks(),
    ):
        yield
