import json
from dataclasses import replace

import pytest

from shardwright.cli.auditing import kernels_of
from shardwright.frameworks.reading import read_file
from tests.harness import published_configs as published


@pytest.fixture
def titan(tmp_path):
    file = tmp_path / "llama3_70b.toml"
    file.write_text(published.TORCHTITAN_70B)
    return file


def test_audit_says_what_was_understood(titan, shardwright_command):
    result = shardwright_command("audit", titan, "--devices", 256, "--all")
    assert result.exit_code == 0, result.exception
    said = result.stdout.splitlines()
    assert said[0] == "llama3_70b.toml: torchtitan, TOML of versions until 2026-02"
    understood = "dp_shard=32 tp=8 async_tp=on ac=full bf16 fp8=tensorwise compile=regional"
    assert f"strategy      {understood}" in said
    assert "  line  9  training.tensor_parallel_degree = 8  (tp)" in said
    assert "  line 11  experimental.enable_async_tensor_parallel = True  (async_tp)" in said


@pytest.mark.parametrize(
    "framework, compiled, expected",
    [
        ("trainer", "off", {"norms": "model", "logits": "model"}),
        ("trainer", "regional", {"norms": "model"}),
        ("torchtitan", "off", {"logits": "model"}),
        ("torchtitan", "regional", {}),
        ("megatron", "off", {}),
        ("megatron-bridge", "off", {}),
    ],
)
def test_norms_and_casts_of_logits_are_those_of_the_framework(titan, framework, compiled, expected):
    found = read_file(titan, devices=256)
    strategy = found.strategy.but(compile=compiled, fp8=None)
    assert kernels_of(replace(found, framework=framework, strategy=strategy)) == expected


def test_json_holds_fields_keys_and_semantics(titan, as_json):
    found = as_json("audit", titan, "--devices", 256)
    assert found["fields"]["tp"] == 8
    assert found["semantics"] == {
        "gradient_sync": "every",
        "clip": 1.0,
        "loss_mean": "tokens of the step",
        "global_batch": 512,
    }
    assert found["batch"]["tokens"] == 512 * 8192
    assert {"key", "line", "value", "sets", "why"} == found["used"][0].keys()
    assert found["misfit"] is None


def test_a_degree_that_does_not_fit_the_model_is_said(titan, as_json):
    found = as_json("audit", titan, "--devices", 256, "--model", "qwen3 30B-A3B")
    assert found["misfit"].startswith("tp=8 does not fit 4 key and value heads")


def test_a_model_is_a_config_json_or_a_flavor(titan, tmp_path, as_json, mistake):
    model = tmp_path / "config.json"
    model.write_text('{"model_type": "llama", "num_hidden_layers": 80, "num_attention_heads": 64}')
    found = as_json("audit", titan, "--devices", 256, "--model", model)
    assert found["model"]["layers"] == 80
    line = mistake("audit", titan, "--devices", 256, "--model", "nothing")
    assert "no config.json and none of llama3 1B" in line


def test_changes_are_written_into_the_same_file(titan, tmp_path, as_json):
    out = tmp_path / "out.toml"
    changes = "tp=4 dp_shard=64"
    found = as_json("audit", titan, "--devices", 256, "--with", changes, "-o", out)
    assert found["written"]["reasons"] == []
    lines = out.read_text().splitlines()
    before = titan.read_text().splitlines()
    assert {b for b in before if b not in lines} == {
        "batch_size = 16",
        "data_parallel_shard_degree = 32",
        "tensor_parallel_degree = 8",
    }


def test_another_framework_is_written_with_reasons(titan, tmp_path, shardwright_command):
    out = tmp_path / "run.sh"
    result = shardwright_command("audit", titan, "--devices", 256, "--to", "megatron", "-o", out)
    assert result.exit_code == 0, result.exception
    assert "not as asked: layers are not compiled as a whole" in result.stdout
    assert "--tensor-model-parallel-size 8" in out.read_text()


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((), "it does not say on how many devices it runs; give --devices"),
        (("--devices", 8, "--machine", "8xH100"), "--devices and --machine both say"),
        (("--devices", 256, "--with", "tp=4"), "name the file with -o"),
        (("--devices", 256, "-o", "out.toml"), "give --machine to have the best one found, or"),
        (("--devices", 7), "7 devices are not divided by the 8 ranks"),
        (("--devices", 256, "--framework", "accelerate"), "the file says 1 devices"),
        (("--devices", 256, "--with", "tp=x", "-o", "out.toml"), "tp is a whole number"),
    ],
)
def test_mistakes_are_one_line(titan, mistake, monkeypatch, tmp_path, arguments, said):
    monkeypatch.chdir(tmp_path)
    text = published.TORCHTITAN_70B.replace("data_parallel_shard_degree = 32\n", "")
    titan.write_text(text)
    assert said in mistake("audit", titan, *arguments)
    assert not (tmp_path / "out.toml").exists()


TINY = """\
{"model_type": "llama", "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 2,
 "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
"""
CONFIG = """\
[training]
local_batch_size = 4 # sequences
seq_len = 512
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 4
[activation_checkpoint]
mode = "full"
[compile]
enable = true
[checkpoint]
folder = "x"
"""


@pytest.fixture
def tiny(tmp_path):
    """A config that recomputes without need, the options that price it, and the file to write."""
    file, model = tmp_path / "tiny.toml", tmp_path / "config.json"
    file.write_text(CONFIG)
    model.write_text(TINY)
    return file, ("--machine", "8xH100", "--model", model), tmp_path / "out.toml"


def test_prices_are_those_of_sw_price_and_changes_are_ranked(tiny, as_json):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import shardwright as sw

    file, options, _ = tiny
    prices = as_json("audit", file, *options, "--all")["prices"]
    fields = json.loads(TINY)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields, use_cache=False))
        tokens = torch.zeros((8, 512), dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    graph = sw.capture(model, (), batch, precision="bf16")
    plan = sw.price(graph, "8xH100", "dp_shard=2 tp=4 ac=full compile=regional", "adamw_fused")
    assert prices["config"]["step_seconds"] == plan.step_seconds
    assert prices["config"]["peak_bytes"] == plan.peak_bytes
    gains = [change["step_change"] for change in prices["changes"]]
    assert gains == sorted(gains)
    none = next(one for one in prices["changes"] if one["after"] == "none")
    assert none["step_change"] < 0 < none["peak_bytes_change"] and none["fits"]
    assert prices["best_uniform"]["step_seconds"] <= plan.step_seconds
    assert 0 < prices["config"]["utilisation"] < 1
    three = [prices[name] for name in ("config", "best_uniform", "best_plan")]
    assert [(one["compiled"], one["fp8"]) for one in three] == [(True, None)] * 3
    assert prices["best_plan"]["step_seconds"] <= prices["best_uniform"]["step_seconds"]
    assert all(change["simulated"] for change in prices["changes"] if change["fits"])
    assert prices["best_uniform"]["memory"] is not None
    interval = "no comparable measurement of compiled layers on H100"
    assert prices["config"]["interval"] == interval


def test_products_in_8_bits_are_priced_as_such_and_so_is_what_is_beside_them(tiny, as_json):
    file, options, _ = tiny
    plain = as_json("audit", file, *options, "--search", "none")["prices"]["config"]
    file.write_text(CONFIG + '[model]\nconverters = ["float8"]\n')
    found = as_json("audit", file, *options, "--search", "all")["prices"]
    assert found["priced_as"] == []
    priced = ("config", "best_uniform", "best_plan")
    assert [found[name]["fp8"] for name in priced] == ["torchao:tensorwise"] * 3
    assert found["config"]["step_seconds"] != plain["step_seconds"]
    assert {change["field"] for change in found["changes"]}.isdisjoint({"fp8", "compile"})


def test_parameters_on_the_host_are_priced_and_taken_off_it_where_they_fit(tiny, as_json):
    file, options, out = tiny
    plain = as_json("audit", file, *options, "--search", "none")["prices"]["config"]
    file.write_text(CONFIG.replace("seq_len = 512", "seq_len = 512\nenable_cpu_offload = true"))
    prices = as_json("audit", file, *options, "--all", "-o", out)["prices"]
    assert prices["priced_as"] == []
    assert prices["config"]["strategy"].split()[3] == "offload=optimizer,parameters"
    assert prices["config"]["step_seconds"] > plain["step_seconds"]
    assert prices["config"]["peak_bytes"] < plain["peak_bytes"]
    (without,) = [
        one
        for one in prices["changes"]
        if one["field"] == "offload" and "optimizer" not in one["after"]
    ]
    assert without["step_change"] < 0 < without["peak_bytes_change"] and without["fits"]
    assert "enable_cpu_offload = false" in out.read_text()


@pytest.mark.parametrize("scope, said", [("none", None), ("all", "best plan")])
def test_what_is_searched_can_be_chosen(tiny, shardwright_command, scope, said):
    file, options, _ = tiny
    result = shardwright_command("audit", file, *options, "--search", scope)
    assert result.exit_code == 0, (result.output, result.exception)
    lines = [line for line in result.stdout.splitlines() if line.startswith("best plan")]
    assert len(lines) == (said is not None)
    assert "no comparable measurement of compiled layers on H100" in " ".join(result.stdout.split())


def test_the_improved_file_keeps_all_other_keys_and_the_results(tiny, shardwright_command):
    file, options, out = tiny
    result = shardwright_command("audit", file, *options, "-o", out)
    assert result.exit_code == 0, (result.output, result.exception)
    assert len(result.stdout.splitlines()) <= 27
    before, after = read_file(file, devices=8), read_file(out, devices=8)
    assert before.batch.samples == after.batch.samples == 8
    assert replace(before.semantics, gradient_sync="") == replace(after.semantics, gradient_sync="")
    text = out.read_text()
    assert "# sequences" in text and 'folder = "x"' in text and "enable = true" in text
    assert 'mode = "none"' in text
    again = shardwright_command("audit", out, *options, "-o", out.with_name("again.toml"))
    assert "not written" in again.stdout and not out.with_name("again.toml").exists()


@pytest.mark.parametrize(
    "text, more, said",
    [
        (CONFIG, (), "the model is not known; give --model with a config.json"),
        (published.ACCELERATE_HSDP, (), "to price it give --batch"),
        (published.DEEPSPEED_Z3, ("--batch", 16), "--batch 16: config says 8; leave it out"),
        (published.MEGATRON_8B, (), "--vocab-size is missing; give --model"),
    ],
)
def test_what_prices_need_is_asked_for(tmp_path, mistake, text, more, said):
    file = tmp_path / "config"
    file.write_text(text)
    assert said in mistake("audit", file, "--machine", "8xH100", *more)
