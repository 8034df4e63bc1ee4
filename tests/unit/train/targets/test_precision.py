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


BOTH, OLD = ("bfloat16", "float16"), ("float16",)
IN_FLOAT16 = "computes in float16 of a scaled loss, keeps parameters in float32"


@pytest.mark.parametrize(
    "fields, fast, option, said",
    [
        ({"dtype": "bfloat16"}, BOTH, "bf16", f"bf16 mixed precision, from config.json: {MIXED}"),
        ({"torch_dtype": "torch.bfloat16"}, BOTH, "bf16", "bf16 mixed precision, from config.json"),
        ({"text_config": {"dtype": "bfloat16"}}, BOTH, "bf16", "bf16 mixed precision, from config"),
        ({"dtype": "bfloat16"}, (), None, "float32, though config.json names bfloat16, in which"),
        (
            {"dtype": "bfloat16"},
            OLD,
            None,
            "float32, though config.json names bfloat16, in which this machine is no faster;"
            f" --precision fp16 {IN_FLOAT16}",
        ),
        (
            {"torch_dtype": "float16"},
            BOTH,
            "bf16",
            f"bf16 mixed precision, from config.json, which names float16: {MIXED}",
        ),
        (
            {"dtype": "float16"},
            OLD,
            "fp16",
            f"fp16 mixed precision, from config.json: {IN_FLOAT16}",
        ),
        ({"dtype": "float16"}, (), None, "float32, though config.json names float16, in which"),
        ({"dtype": "float32"}, BOTH, None, f"float32, from config.json{ASK}"),
        ({"dtype": "auto"}, BOTH, None, f"float32, as config.json names no dtype{ASK}"),
        ({}, BOTH, None, f"float32, as config.json names no dtype{ASK}"),
        ({}, (), None, "float32, as config.json names no dtype"),
    ],
)
def test_a_config_is_trained_in_its_dtype(config, fields, fast, option, said):
    chosen = chosen_precision(config(**fields), job(), None, fast_halves=fast)
    assert chosen.option == option
    assert sentence(chosen).startswith(said)
    assert fast or "--precision" not in sentence(chosen)


def test_settings_come_before_the_file(config):
    file = config(dtype="float32")
    target = Target(file.text, 2, 16, ("torch_dtype=bfloat16",))
    assert chosen_precision(target, job(), None, fast_halves=BOTH).option == "bf16"


@pytest.mark.parametrize("asked", ["bf16", "model"])
def test_what_is_asked_for_comes_first(config, asked):
    chosen = chosen_precision(config(dtype="bfloat16"), job(), asked, fast_halves=BOTH)
    assert chosen.option == asked
    name = "bf16 mixed precision" if asked == "bf16" else "float32"
    assert sentence(chosen).startswith(f"{name}, as asked")


def test_a_function_keeps_its_jobs_precision(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("")
    target = Target(f"{file}:job")
    plain = chosen_precision(target, job(), None, fast_halves=BOTH)
    assert plain.option is None and sentence(plain) == f"float32, as the job builds the model{ASK}"
    assert sentence(plain, "bfloat16") == "bfloat16, as the job builds the model"
    mixed = chosen_precision(target, job(precision="bf16"), None, fast_halves=BOTH)
    assert mixed.option is None
    said = mixed.sentence(graph("bf16", "bfloat16"))
    assert said == f"bf16 mixed precision, as the job says: {MIXED}"


@pytest.mark.parametrize("machine, fast", [("8xH100", BOTH), ("4xV100", OLD), ("2xcpu", ())])
def test_devices_that_are_faster_in_16_bits(machine, fast):
    assert preset(machine).device.fast_halves == fast
