"""Ranks do not capture again what their test has captured."""

import pytest

from tests.harness import captures

# These capture on every rank, as users do.
ON_EVERY_RANK = ("test_parallel_module", "test_gathering", "test_opaque", "test_verify")


@pytest.fixture(scope="module", autouse=True)
def _captures_remembered(request):
    if request.module.__name__.rpartition(".")[2] in ON_EVERY_RANK:
        yield
    else:
        with captures.remembered():
            yield
