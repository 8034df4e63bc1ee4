import gc

import pytest

from shardwright.search.collector import paused


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was_found_also_after_an_error(enabled):
    before = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        with pytest.raises(RuntimeError), paused():
            assert not gc.isenabled()
            raise RuntimeError
        assert gc.isenabled() is enabled
    finally:
        gc.enable() if before else gc.disable()
