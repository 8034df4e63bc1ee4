"""Settings of every test run: the same examples each time, one thread per process."""

import gc
import os

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
