"""Mutated configs of Hugging Face models: a model, or one clean line; nothing is run or fetched."""

import json
import os
import socket
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings

from shardwright.train.data.batch import JobError
from shardwright.train.targets.target import TargetError, build_model, load_job
from tests.harness.hf_configs import CONFIGS, OF_IMAGES, mutated

pytestmark = pytest.mark.hf


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """A folder, in which the config and code of its author lie, and a host that has no network."""
    found = tmp_path_factory.mktemp("configs")
    (found / "code_of_author.py").write_text("raise SystemExit('the code of the author ran')")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(found)
        patch.chdir(found)
        for where, name in (
            *((socket.socket, "connect"), (socket, "getaddrinfo"), (socket, "create_connection")),
            *((subprocess, "Popen"), (os, "system"), (os, "execv"), (os, "posix_spawn")),
        ):
            patch.setattr(where, name, _refuse)
        yield found
    assert "code_of_author" not in sys.modules


def _refuse(*args, **kwargs):
    pytest.exit(f"a config reached {args} {kwargs}")


def made(folder, kind, data):
    """The model of a config, or the line that refuses it."""
    file = folder / "config.json"
    file.write_text(json.dumps(data))
    try:
        job = load_job(str(file), 2, None if kind in OF_IMAGES else 8)
        job.call()
        return build_model(job, meta=True)
    except (TargetError, JobError) as e:
        text = str(e)
        assert "\n" not in text and str(file) in text and len(text) < 900, text
        return text


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_configs_themselves_are_taken(folder, kind):
    assert not isinstance(made(folder, kind, {"model_type": kind, **CONFIGS[kind]}), str)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(found=mutated())
def test_a_mutated_config_is_a_model_or_one_line_that_names_the_file(folder, found):
    made(folder, *found)


OUTSIDE = {"AutoConfig": "code_of_author.Config", "AutoModelForCausalLM": "org/x--code_of_author.M"}
CODE = [
    {"auto_map": OUTSIDE},
    {"auto_map": OUTSIDE, "trust_remote_code": True},
    {"architectures": ["HfArgumentParser"]},
    {"architectures": ["code_of_author.M"]},
    {"architectures": ["pipeline"]},
    {"_attn_implementation": "org/kernel"},
    {"attn_implementation": "org/kernel:entry"},
    {"_attn_implementation_internal": "org/kernel"},
    {"_attn_implementation": {"": "paged|org/kernel@main"}},
    {"_experts_implementation": "org/kernel"},
    {"text_config": {"model_type": "llama", "auto_map": OUTSIDE}},
    {"sub_models": [{"auto_map": OUTSIDE, "_attn_implementation": "org/kernel"}]},
    {"use_kernels": True},
    {"kernel_config": {"kernel_mapping": {"RMSNorm": "org/kernel:RMSNorm"}}},
    {"quantization_config": {"quant_method": "code_of_author"}},
    {"custom_pipelines": {"x": {"impl": "code_of_author.P"}}},
    {"_name_or_path": "org/name", "name_or_path": "org/name", "_commit_hash": "main"},
    {"dtype": "load"},
    {"router_dtype": "hub"},
    {"model_type": "org/name"},
    {"model_type": "timm_wrapper", "architecture": "hf-hub:org/name"},
    {"to_dict": "x"},
    {"from_pretrained": "org/name"},
]


@pytest.mark.parametrize("kind", ["llama", "mamba", "vit"])
def test_no_code_from_outside_runs_and_nothing_is_fetched(folder, kind):
    """Sockets and processes are refused by the fixture, which ends the tests."""
    whole = {"model_type": kind, **CONFIGS[kind]}
    taken = [fields for fields in CODE if not isinstance(made(folder, kind, whole | fields), str)]
    names = {name for fields in taken for name in fields}
    assert names <= {"auto_map", "text_config", "kernel_config", "quantization_config"} | {
        *("custom_pipelines", "_name_or_path", "name_or_path", "_commit_hash"),
    }
    assert os.environ["USE_HUB_KERNELS"] == "NO"


def test_the_field_with_which_no_model_can_be_made_is_named(folder):
    def says(kind, **fields):
        return made(folder, kind, {"model_type": kind, **CONFIGS[kind]} | fields)

    assert "n_inner is -64; a whole number from 1" in says("gpt2", n_inner=-64)
    assert 'feed_forward_proj is "flex"; T5ForCond' in says("t5", feed_forward_proj="flex")
    assert 'rope_theta is "x"; a number above 0' in says("llama", rope_theta="x")
    bogus = {"rope_type": "linear", "factor": 0}
    assert "rope_scaling.factor is 0; a number above 0" in says("llama", rope_scaling=bogus)
    assert "to_dict is 7; LlamaConfig has no such field" in says("llama", to_dict=7)
    assert 'head_dim is "x"; int' in says("llama", head_dim="x")
    assert 'model_type is "lama"; give a type that' in says("llama", model_type="lama")
