"""Configs edited in place: changed keys alone; comments, order and unknown keys stay."""

import difflib

import pytest
from hypothesis import given, settings

from shardwright.frameworks.canonical import canonical
from shardwright.frameworks.config import Batch
from shardwright.frameworks.documents.forms import parse_document
from shardwright.frameworks.errors import FrameworkError
from shardwright.frameworks.reading import no_companion, read_document
from shardwright.frameworks.writers.nearest import ConfigFacts
from shardwright.frameworks.writing import WRITERS, edit_config, write_config
from shardwright.ir.strategy.strategy import Strategy
from tests.harness import published_configs as published
from tests.harness.strategies import training_strategies


def changed(text, devices, **changes):
    """The lines that an edit removes and adds, and what it wrote."""
    document = parse_document("config", text)
    config = read_document(document, None, devices, no_companion)
    written = edit_config(document, config, config.strategy.but(**changes))
    lines = difflib.ndiff(text.splitlines(), written.text.splitlines())
    return [line for line in lines if line[0] in "+-"], written


def test_toml_keeps_comments_and_unknown_keys():
    lines, written = changed(published.TORCHTITAN_8B, 8, dp_shard=4, tp=2)
    assert sorted(lines) == [
        "+ data_parallel_shard_degree = 4",
        "+ local_batch_size = 4 # sequences",
        "+ tensor_parallel_degree = 2",
        "- data_parallel_shard_degree = -1",
        "- local_batch_size = 2 # sequences",
        "- tensor_parallel_degree = 1",
    ]
    assert written.reasons == ()


def test_yaml_keeps_comments_and_order():
    lines, _ = changed(published.ACCELERATE_CP, None, recompute=Strategy().recompute)
    assert lines == [
        "-   fsdp_activation_checkpointing: true # long sequences",
        "+   fsdp_activation_checkpointing: false # long sequences",
    ]


FSDP1 = """\
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_sharding_strategy: FULL_SHARD
mixed_precision: bf16
num_processes: 8
"""


def test_a_config_of_fsdp1_becomes_one_of_fsdp2_where_only_that_says_the_change():
    """Its checkpointing of whole layers and its words of sharding are none of FSDP2's."""
    lines, written = changed(FSDP1, None, reshard_after_forward=False)
    assert lines == ["+   fsdp_reshard_after_forward: false", "+   fsdp_version: 2"]
    assert str(written.strategy.recompute) == "children" and not written.strategy.reshards
    assert written.reasons == ("FSDP2 recomputes every child of a layer by itself",)
    lines, _ = changed(FSDP1.replace("checkpointing: true", "checkpointing: false"), None)
    assert lines == []


def test_scripts_change_flags_and_keep_variables_that_others_read():
    lines, _ = changed(published.MEGATRON_8B, None, tp=2, dp_shard=4, loss="vocabulary-parallel")
    assert sorted(lines) == [
        "+     --micro-batch-size 2",
        "+     --tensor-model-parallel-size 2",
        "-     --cross-entropy-loss-fusion",
        "-     --micro-batch-size 1",
        "-     --tensor-model-parallel-size $TP_SIZE",
    ]


def test_json_gets_a_section_that_it_did_not_have():
    lines, written = changed(published.DEEPSPEED_Z3, 8, dp_shard=4, tp=2, zero=2)
    assert [line for line in lines if line[0] == "+"] == [
        '+     "train_micro_batch_size_per_gpu": 2,',
        '+         "stage": 2,',
        '+     "wall_clock_breakdown": false,',
        '+     "tensor_parallel": {',
        '+         "autotp_size": 2',
        "+     }",
    ]
    assert written.strategy.zero == 2


def test_a_function_gets_assignments_before_it_returns():
    _, written = changed(published.NVFP4, 4, recompute=Strategy.parse("ac=full").recompute)
    assert "    config.activation_checkpoint = FullAC.Config()\n    return config\n" in written.text


def test_yaml_of_flags_is_edited_in_its_spelling():
    lines, _ = changed(published.GPT3_15B, 256, recompute=Strategy.parse("ac=full").recompute)
    assert lines == [
        "+   --recompute-granularity: full",
        "+   --recompute-method: uniform",
        "+   --recompute-num-layers: 1",
    ]


def test_what_cannot_be_edited_is_said():
    with pytest.raises(FrameworkError, match="configs of axolotl are read and not written"):
        changed(published.AXOLOTL_GPT_OSS, 8, tp=2, dp_shard=4)
    with pytest.raises(FrameworkError, match="is an object of Python; write a new file"):
        changed(published.QWEN3_DUMP, 4, recompute=Strategy.parse("ac=full").recompute)


FACTS = ConfigFacts(batch=Batch(samples=2**10 * 3**6, sequence=4096), model="llama3 8B", layers=32)


@pytest.mark.parametrize("framework", WRITERS)
@settings(max_examples=40)
@given(first=training_strategies(), second=training_strategies())
def test_any_written_file_is_edited_to_any_other_strategy(framework, first, second):
    before = write_config(framework, first, FACTS)
    # A script that starts its ranks says how many there are, and an edit does not change that.
    text = "\n".join(before.text.split("\ntorchrun")[0].split(f"WORLD_SIZE={first.devices}\n"))
    document = parse_document("config", text)
    config = read_document(document, WRITERS[framework].reads_as, first.devices, no_companion)
    after = edit_config(document, config, second, FACTS.batch)
    assert after.strategy == write_config(framework, second, FACTS).strategy
    # The second file read is checked by `edit_config`; here again, from the text alone.
    again = read_document(
        parse_document("config", after.text),
        WRITERS[framework].reads_as,
        second.devices,
        no_companion,
    )
    assert canonical(again.strategy) == after.strategy
