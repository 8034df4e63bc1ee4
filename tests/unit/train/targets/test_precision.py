import json

import pytest
import torch

from shardwright.ir.graph import Graph, Leaf, LeafKind, Tensor
from shardwright.ir.options.numerics import Numerics
from shardwright.machine.presets import preset
from shardwright.train.job import Job
from shardwright.train.targets.precision import chosen_precision
from shardwright.train.targets.target_text import Target


def graph(precision, dtype="float32"):
    leaf = Leaf("w", LeafKind.PARAMETER, ("w",))
    tensor = Tensor("w", (4,), dtype)
    return Graph((leaf,), (), ("w",), (tensor,), numerics=Numerics(precision=precision))


def job(**options):
    batch = (torch.zeros(2, 4),)
    return Job(lambda: torch.nn.Linear(4, 1), batch, torch.optim.SGD, [batch], 1, **options)


def sentence(chosen, dtype="float32"):
    return chosen.sentence(graph(chosen.option or "model", dtype))


@pytest.fixture
def config(tmp_path):
    def written(**fields):
        file = tmp_path / "config.json"
        file.write_text(json.dumps({"model_type": "llama", **fields}))
        return Target(str(file), 2, 16)

    return written


MIXED = "computes in bfloat16, keeps parameters in float32"
ASK = f"; --precision bf16 {MIXED}"


@pytest.mark.parametrize(
    "fields, faster, option, said",
    [
        ({"dtype": "bfloat16"}, True, "bf16", f"bf16 mixed precision, from config.json: {MIXED}"),
        ({"torch_dtype": "torch.bfloat16"}, True, "bf16", "bf16 mixed precision, from config.json"),
        (
            {"dtype": "bfloat16"},
            False,
            None,
            "float32, though config.json names bfloat16, in which",
        ),
        (
            {"torch_dtype": "float16"},
            True,
            None,
            "float32, though config.json names float16, which",
        ),
        ({"dtype": "float32"}, True, None, f"float32, from config.json{ASK}"),
        ({"dtype": "auto"}, True, None, f"float32, as config.json names no dtype{ASK}"),
        ({}, True, None, f"float32, as config.json names no dtype{ASK}"),
        ({}, False, None, "float32, as config.json names no dtype"),
    ],
)
def test_a_config_is_trained_in_its_dtype(config, fields, faster, option, said):
    chosen = chosen_precision(config(**fields), job(), None, faster_in_bf16=faster)
    assert chosen.option == option
    assert sentence(chosen).startswith(said)
    assert faster or "--precision" not in said


def test_settings_come_before_the_file(config):
    file = config(dtype="float32")
    target = Target(file.text, 2, 16, ("torch_dtype=bfloat16",))
    assert chosen_precision(target, job(), None, faster_in_bf16=True).option == "bf16"


@pytest.mark.parametrize("asked", ["bf16", "model"])
def test_what_is_asked_for_comes_first(config, asked):
    chosen = chosen_precision(config(dtype="bfloat16"), job(), asked, faster_in_bf16=True)
    assert chosen.option == asked
    name = "bf16 mixed precision" if asked == "bf16" else "float32"
    assert sentence(chosen).startswith(f"{name}, as asked")


def test_a_function_keeps_its_jobs_precision(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("")
    target = Target(f"{file}:job")
    plain = chosen_precision(target, job(), None, faster_in_bf16=True)
    assert plain.option is None and sentence(plain) == f"float32, as the job builds the model{ASK}"
    assert sentence(plain, "bfloat16") == "bfloat16, as the job builds the model"
    mixed = chosen_precision(target, job(precision="bf16"), None, faster_in_bf16=True)
    assert mixed.option is None
    said = mixed.sentence(graph("bf16", "bfloat16"))
    assert said == f"bf16 mixed precision, as the job says: {MIXED}"


@pytest.mark.parametrize("machine, faster", [("8xH100", True), ("4xV100", False), ("2xcpu", False)])
def test_devices_that_are_faster_in_bf16(machine, faster):
    assert preset(machine).device.faster_in_bf16 is faster
