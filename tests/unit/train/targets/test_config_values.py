"""A config.json is data: what it names is not run or fetched, and its sizes are checked first.

`"_attn_implementation": "org/kernel"` reached a loader of kernels, `"architectures":
["HfArgumentParser"]` called that name, a model of -1 layers was planned, and a billion layers
were made one by one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.cli.planning.capturing import Target, capture
from shardwright.tracing.call import CaptureError
from shardwright.train.data.batch import JobError
from shardwright.train.targets.config_schema import config_of
from shardwright.train.targets.config_values import check_values, read_config
from shardwright.train.targets.target import TargetError, build_model, load_job

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 128},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
}


def write(folder, data):
    (folder / "config.json").write_text(json.dumps(data))
    return str(folder / "config.json")


def nested(levels):
    return {"a": nested(levels - 1)} if levels else {}


@pytest.mark.parametrize(
    "field, value, says",
    [
        ("hidden_size", "64", 'hidden_size is "64"; a whole number of 1 or more'),
        ("hidden_size", True, "hidden_size is true; a whole number"),
        ("hidden_size", -64, "hidden_size is -64; a whole number from 1"),
        ("hidden_size", 0, "hidden_size is 0; a whole number from 1"),
        ("num_attention_heads", 0, "num_attention_heads is 0; a whole number"),
        ("num_attention_heads", 4.5, "num_attention_heads is 4.5; a whole number"),
        ("num_key_value_heads", 3, "num_key_value_heads is 3; a divisor of the 4 heads"),
        ("vocab_size", 0, "vocab_size is 0; a whole number"),
        ("vocab_size", 2**70, "vocab_size is 1180591620717411303424; a whole number"),
        ("intermediate_size", 2**62, "intermediate_size is .*; a whole number"),
        ("num_hidden_layers", -1, "num_hidden_layers is -1; a whole number"),
        ("num_hidden_layers", 10**9, "num_hidden_layers is 1000000000; .* to 4096"),
        ("num_labels", 10**9, "num_labels is 1000000000; .* to 1048576"),
        ("num_local_experts", 10**9, "num_local_experts is 1000000000; .* to 65536"),
        ("depths", [2, 10**9], "depths is .*; a whole number from 0 to 4096"),
        ("attention_dropout", 7.0, "attention_dropout is 7.0; a probability from 0 to 1"),
        ("rms_norm_eps", -1.0, "rms_norm_eps is -1.0; a number of 0 or more"),
        ("rope_theta", float("inf"), "rope_theta is Infinity; a finite number"),
        ("rope_parameters", nested(40), "nested more than 16 levels deep"),
        ("dtype", "os.system", 'dtype is "os.system"; give one of float32'),
        ("_attn_implementation", "org/kernel", "_attn_implementation is .*; give one of sdpa"),
        ("attn_implementation", {"": "org/kernel"}, "attn_implementation is .*; give one of"),
        ("_experts_implementation", "org/kernel", "_experts_implementation is .*; give one"),
        ("text_config", {"_attn_implementation": "org/k"}, "text_config._attn_implementation is"),
        ("use_pretrained_backbone", True, "nothing is fetched from a hub; give false"),
        ("image_size", 2**20, "image_size is 1048576; at most 67108864 values in an image"),
        ("rope_scaling", {"factor": "8"}, 'rope_scaling.factor is "8"; a number above 0'),
        ("quantization_config", 3, "quantization_config is 3; an object with fields"),
        ("use_kernels", True, "nothing is fetched from a hub; give false"),
    ],
)
def test_a_value_that_no_model_is_made_of(tmp_path, field, value, says):
    with pytest.raises(TargetError, match=says) as error:
        load_job(write(tmp_path, {**LLAMA, field: value}), 2, 8)
    assert "\n" not in str(error.value)


def test_a_patch_is_no_larger_than_the_image(tmp_path):
    with pytest.raises(TargetError, match="patch_size is 16; at most image_size 8 is needed"):
        load_job(write(tmp_path, {**LLAMA, "image_size": [8, 32], "patch_size": 16}), 2, 8)


@pytest.mark.hf
@pytest.mark.parametrize(
    "field, value, says",
    [
        ("architectures", ["HfArgumentParser"], "architectures is .*; give a class .*Llama"),
        ("architectures", ["BertForMaskedLM"], "architectures is .*; give a class .*Llama"),
        ("architectures", ["auto"], "architectures is .*; give a class .*Llama"),
        ("tie_word_embeddings", "yes", 'tie_word_embeddings is "yes"; bool is needed'),
    ],
)
def test_only_models_of_the_type_are_made(tmp_path, field, value, says):
    with pytest.raises(TargetError, match=says):
        load_job(write(tmp_path, {**LLAMA, field: value}), 2, 8)


@pytest.mark.hf
@pytest.mark.parametrize(
    "field, value, says",
    [
        ("hidden_act", "gellu", 'hidden_act is "gellu"; give an activation, as gelu'),
        ("rope_scaling", {"rope_type": "yarnn", "factor": 2.0}, "rope_type is .*; give one of"),
        ("pad_token_id", 9999, "pad_token_id is 9999; a token below vocab_size 128"),
    ],
)
def test_a_model_that_cannot_be_made_names_the_field(tmp_path, field, value, says):
    job = load_job(write(tmp_path, {**LLAMA, field: value}), 2, 8)
    with pytest.raises(JobError, match=says):
        build_model(job, meta=True)


LEVIT = {"model_type": "levit", "num_labels": 2, "depths": [1, 1, 1]}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "architectures": [], "num_local_experts": 2}


@pytest.mark.hf
@pytest.mark.parametrize(
    "data, settings, says",
    [
        (LEVIT, ("image_size=40",), r"--set image_size=40: LevitFor\w+ cannot be run with it"),
        (
            {**MIXTRAL, "num_experts_per_tok": 3},
            (),
            r"json: num_local_experts is 2; Mixtral\w+ cannot be run with it \(.*k (not|out)",
        ),
    ],
)
def test_a_value_that_only_a_call_refuses_names_the_field(tmp_path, data, settings, says):
    seq = None if data["model_type"] == "levit" else 8
    target = Target(write(tmp_path, data), 2, seq, settings, cached=False)
    with pytest.raises(TargetError, match=says) as error:
        capture(target)
    assert "\n" not in str(error.value)


@pytest.mark.hf
def test_a_call_that_a_config_is_not_to_blame_for_is_refused_as_it_was(tmp_path):
    """The sequence is what does not fit: no field does without which it would."""
    data = {"model_type": "reformer", "architectures": ["ReformerModelWithLMHead"]}
    target = Target(write(tmp_path, {**data, "is_decoder": True}), 2, 16, cached=False)
    with pytest.raises(CaptureError, match="axial_pos_shape factors"):
        capture(target)


@pytest.mark.hf
def test_code_that_a_config_names_is_not_looked_for(tmp_path):
    (tmp_path / "code.py").write_text("open('ran', 'w')")
    own = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "org/name--code.Model"}
    job = load_job(write(tmp_path, {**LLAMA, "auto_map": own}), 2, 8)
    assert type(build_model(job, meta=True)).__name__ == "LlamaForCausalLM"
    assert not Path("ran").exists()


def test_a_batch_is_bounded(tmp_path):
    with pytest.raises(TargetError, match="at most 268435456 tokens or images"):
        load_job(write(tmp_path, LLAMA), 10**12, 8)


def test_a_setting_names_itself(tmp_path):
    with pytest.raises(TargetError, match=r"--set num_hidden_layers=100.0: a whole number"):
        load_job(write(tmp_path, LLAMA), 2, 8, ["num_hidden_layers=1e2"])


@pytest.mark.parametrize("make", [os.mkfifo, lambda file: file.symlink_to("/dev/zero")])
def test_a_pipe_or_device_is_not_waited_for(tmp_path, make):
    make(tmp_path / "config.json")
    with pytest.raises(TargetError, match="it is no regular file"):
        read_config(tmp_path / "config.json")


def test_a_file_of_gigabytes_is_not_read(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**36)
    with pytest.raises(TargetError, match="at most 8388608 are read"):
        read_config(tmp_path / "config.json")


@pytest.mark.hf
def test_what_transformers_makes_itself_is_taken():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    names = sorted(CONFIG_MAPPING.keys())[::16]  # 802 model types in all were tried once
    assert len(names) > 20
    for name in names:
        if "timm" in json.dumps(CONFIG_MAPPING[name]().to_dict(), default=str):
            continue  # timm may fetch what a config names
        made = CONFIG_MAPPING[name]()
        for fields in (made.to_dict(), made.to_diff_dict()):
            data = {**json.loads(json.dumps(fields, default=str)), "model_type": name}
            check_values(Path(name), data)
            config_of(Path(name), data, {})


def test_refusing_takes_little_time_and_memory(tmp_path):
    """Ten seconds and a GiB are what a config may take that is refused."""
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_CPU, (10, 10));"
        "resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30));"
        "from shardwright.train.targets.target_text import parse_target;"
        "parse_target(sys.argv[1], 2, 8, ())"
    )
    target = write(tmp_path, {**LLAMA, "num_hidden_layers": 10**9})
    ended = subprocess.run(
        [sys.executable, "-c", limited, target], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    assert "num_hidden_layers is 1000000000" in ended.stderr
