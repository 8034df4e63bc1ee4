"""Written configs: read back to the strategy that they say, and edited in place."""

import pytest
from hypothesis import given, settings

from shardwright.frameworks.canonical import canonical
from shardwright.frameworks.config import Batch
from shardwright.frameworks.reading import read_text
from shardwright.frameworks.writers.nearest import Facts
from shardwright.frameworks.writing import WRITERS, write_config
from tests.harness.strategies import training_strategies

# Divided by every product of degrees and micro-batches that the strategies have.
FACTS = Facts(
    batch=Batch(samples=2**10 * 3**6, sequence=4096), model="llama3 8B", layers=32, clip=0.5
)


@pytest.mark.parametrize("framework", WRITERS)
@settings(max_examples=150)
@given(wanted=training_strategies())
def test_a_written_file_is_read_back_to_the_same_strategy(framework, wanted):
    written = write_config(framework, wanted, FACTS)
    config = read_text(written.text, framework=WRITERS[framework].reads_as, devices=wanted.devices)
    assert canonical(config.strategy) == canonical(written.strategy)
    assert config.strategy.devices == wanted.devices
    assert (not written.reasons) == (canonical(wanted) == written.strategy)
