"""Written configs: read back to the strategy that they say, and edited in place."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from shardwright.frameworks.canonical import canonical
from shardwright.frameworks.config import Batch
from shardwright.frameworks.errors import FrameworkError
from shardwright.frameworks.reading import read_text
from shardwright.frameworks.writers.nearest import ConfigFacts
from shardwright.frameworks.writing import WRITERS, convert_config, write_config
from shardwright.ir.strategy.strategy import Strategy
from tests.harness.strategies import training_strategies

# Divided by every product of degrees and micro-batches that the strategies have.
FACTS = ConfigFacts(
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
    if framework != "accelerate":
        assert config.batch.samples == FACTS.batch.samples
        assert config.semantics.clip == FACTS.clip
    if framework not in ("accelerate", "deepspeed", "trainer"):
        assert config.batch.sequence == FACTS.batch.sequence
    assert (not written.reasons) == (canonical(wanted) == written.strategy)


def test_a_known_framework_is_needed():
    with pytest.raises(FrameworkError, match="'jax' is none of torchtitan"):
        write_config("jax", Strategy(), FACTS)


def test_a_batch_that_the_nearest_degrees_do_not_divide_is_refused():
    facts = ConfigFacts(batch=Batch(samples=4, sequence=128))
    with pytest.raises(FrameworkError, match="4 samples of a step are not divided by 8"):
        write_config("trainer", Strategy(dp_shard=4, tp=2), facts)


def test_a_conversion_says_what_changes_results():
    source = read_text("--tensor-model-parallel-size 2 --seq-length 128 --bf16", devices=4)
    written = convert_config(source, "torchtitan-toml", source.strategy)
    assert "results change: the loss is a mean over tokens of the step, not micro-batches" in (
        written.reasons
    )
    said = convert_config(source, "accelerate", source.strategy).reasons
    assert "the batch of 2 sequences stands in its script" in said
    assert "results may change: gradients are clipped at what its script says, not 1" in said
    assert convert_config(source, "megatron", source.strategy).reasons == ()


@pytest.mark.parametrize(
    "model", ["llama3; import os 8B", 'llama3 8B"+f()+"', "llama3 8B\nimport os"]
)
@pytest.mark.parametrize("strategy", [Strategy(tp=2), Strategy(tp=2, fp8="rowwise")])
def test_names_that_would_be_code_are_refused(model, strategy):
    with pytest.raises(FrameworkError, match="is no name of a model; give a family and a size"):
        write_config("torchtitan", strategy, replace(FACTS, model=model))
