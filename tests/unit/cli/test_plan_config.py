"""Configs of other frameworks for plans: those that say a plan, and the nearest with a price."""

import json
from dataclasses import replace

import pytest
import torch

import shardwright as sw
from shardwright.cli.plan_config import config_for, write_offer
from shardwright.cli.planning.capturing import CapturedTarget
from shardwright.frameworks.reading import read_text
from shardwright.machine.presets import preset

MACHINE = preset("8xH100")


@pytest.fixture(scope="module")
def captured():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=256, num_hidden_layers=4, intermediate_size=512,
        num_attention_heads=8, num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model, ids = LlamaForCausalLM(config), torch.zeros((16, 512), dtype=torch.long)
    graph = sw.capture(model, (), {"input_ids": ids, "labels": ids}, precision="bf16")
    return CapturedTarget(None, graph, "adamw", 0.0)


def offered(captured, strategy, framework):
    plan = sw.price(captured.graph, MACHINE, strategy)
    return plan, config_for(plan, captured, MACHINE, framework, None)


@pytest.mark.parametrize(
    "framework, sync",  # torchtitan reduces gradients after every micro-batch
    [("torchtitan", " sync=every"), ("torchtitan-toml", " sync=every"), ("megatron", "")],
)
def test_a_strategy_that_a_framework_can_say_is_written_as_it_is(captured, framework, sync):
    plan, found = offered(captured, f"dp_replicate=2 tp=4 mb=2 ac=full{sync}", framework)
    assert found.is_plan and found.more == 0 and found.seconds == plan.step_seconds
    again = read_text(found.text, devices=8)
    assert again.strategy == found.strategy
    assert (again.strategy.tp, again.strategy.dp_replicate) == (4, 2)
    assert (again.batch.samples, again.batch.sequence) == (16, 512)


def test_what_a_framework_cannot_say_is_offered_with_its_price(captured):
    """DeepSpeed's files say no recomputation and no pipeline."""
    plan, found = offered(captured, "dp_shard=4 pp=2 mb=4", "deepspeed")
    assert not found.is_plan
    assert found.strategy.pp == 1
    assert found.more == pytest.approx(found.seconds / plan.step_seconds - 1)
    assert read_text(found.text, devices=8).strategy == found.strategy


def test_a_config_that_changes_numbers_says_so(captured):
    """FSDP of accelerate reduces gradients in bf16; that of torchtitan in float32, as the plan."""
    _, found = offered(captured, "dp_shard=8", "accelerate")
    assert found.is_plan and found.changes == ("reduce_dtype is bfloat16, not float32",)
    assert f"  changes results: {found.changes[0]}" in write_offer(found, "accelerate", None)
    _, found = offered(captured, "dp_shard=8", "torchtitan")
    assert found.is_plan and not found.changes


def test_a_nearest_config_takes_more_time_or_less(captured):
    _, found = offered(captured, "dp_shard=4 pp=2 mb=4", "deepspeed")
    for more, said in ((0.02, "takes 2.0% more time"), (-0.02, "takes 2.0% less time")):
        assert said in "".join(write_offer(replace(found, more=more), "deepspeed", None))


def test_formats_of_modules_say_the_plan_or_the_nearest_that_they_can(captured):
    """A style of modules has one axis, which `split-spec` has for stages alone."""
    plan, found = offered(captured, "dp_shard=8", "split-spec")
    assert not found.is_plan and found.strategy.pp > 1 and "SplitPoint" in found.text
    assert found.more == pytest.approx(found.seconds / plan.step_seconds - 1)


def test_plan_writes_a_config_into_the_file_that_is_named(tmp_path, shardwright_command, mistake):
    model, file = tmp_path / "config.json", tmp_path / "run.toml"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 8}
    model.write_text(json.dumps({"model_type": "llama", **sizes, **layers}))
    asked = ("plan", model, "--batch", 8, "--seq", 32, "--machine", "8xH100")
    result = shardwright_command(*asked, "--for", "torchtitan-toml", "--config", file)
    assert result.exit_code == 0, (result.output, result.exception)
    assert str(file) in result.stdout
    assert read_text(file.read_text(), devices=8).strategy.devices == 8
    assert "--config names the file of --for" in mistake(*asked, "--config", file)
