import json
import sys

import pytest
import torch
from torch import nn

from shardwright.train.job import Job
from shardwright.train.target import TargetError, build_model, load_job, optimizer_name

HEAD = "import torch\nfrom shardwright.train.job import Job\n"
GOOD = HEAD + (
    "from sibling import SIZE\n"
    "def job():\n"
    "    return Job(lambda: torch.nn.Linear(SIZE, 1), (torch.zeros(2, SIZE),),\n"
    "               lambda ps: torch.optim.AdamW(ps), [(torch.zeros(2, SIZE),)], 3)\n"
)
GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11}
GPT2 |= {"n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}


@pytest.fixture(autouse=True)
def restore_imports(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name in ("my_job", "sibling", "torch__target"):
            del sys.modules[name]


def write(folder, text, name="my_job.py"):
    file = folder / name
    file.write_text(text)
    return str(file)


def test_a_function_in_a_file_gives_its_job_and_may_import_its_neighbours(tmp_path):
    write(tmp_path, "SIZE = 3", "sibling.py")
    job = load_job(write(tmp_path, GOOD) + ":job")
    assert job.model().in_features == 3
    assert optimizer_name(job) == "adamw"


def test_a_file_may_have_the_name_of_a_module_that_is_loaded(tmp_path):
    write(tmp_path, "SIZE = 3", "sibling.py")
    load_job(write(tmp_path, GOOD, "torch.py") + ":job")
    assert sys.modules["torch"] is torch


@pytest.mark.parametrize(
    "text, function, message",
    [
        ("x = 1", "job", r"my_job.py has no function job; it needs one that returns a Job"),
        ("job = 1", "job", r"my_job.py has no function job"),
        ("def job():\n    return 3", "job", r"my_job.py:job returned a int; it must return"),
        ("def job():\n    return {}['k']", "job", r"my_job.py:job raised KeyError at line 2: 'k'"),
        ("import nowhere", "job", r"my_job.py cannot be imported: ModuleNotFoundError at line 1"),
        ("def job(:", "job", r"my_job.py cannot be imported: SyntaxError"),
        (
            HEAD + "def job():\n    return Job(None, (), None, [], 1)",
            "job",
            r"my_job.py:job: Job.model is a NoneType, not a function that makes the model",
        ),
    ],
)
def test_a_target_that_leads_to_no_job_says_why(tmp_path, text, function, message):
    with pytest.raises(TargetError, match=message):
        load_job(write(tmp_path, text) + ":" + function)


@pytest.mark.parametrize(
    "target, sizes, message",
    [
        ("nowhere.py:job", (), "there is no file nowhere.py; a target is file.py:function"),
        ("nowhere.py", (), "'nowhere.py' is neither file.py:function nor a config.json"),
        ("a.py:job", (8, None), "a.py:job brings its own batch; --batch and --seq belong to"),
        ("config.json", (8, None), "config.json has no batch: give its sizes, as in --batch 8"),
        ("nowhere.json", (8, 8), "cannot read nowhere.json: .* give a Hugging Face config.json"),
    ],
)
def test_a_target_of_the_wrong_form_says_what_is_needed(target, sizes, message):
    with pytest.raises(TargetError, match=message):
        load_job(target, *sizes)


@pytest.mark.hf
def test_a_config_becomes_a_causal_language_model_on_random_tokens(tmp_path):
    job = load_job(write(tmp_path, json.dumps(GPT2), "config.json"), 2, 16)
    args, kwargs = job.call()
    assert args == ()
    assert {name: tuple(value.shape) for name, value in kwargs.items()} == {
        "input_ids": (2, 16),
        "labels": (2, 16),
    }
    assert int(kwargs["input_ids"].max()) < 11
    model = build_model(job, meta=True)
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert all(p.is_meta for p in model.parameters())
    assert model.training


@pytest.mark.hf
def test_the_configs_own_architecture_is_built(tmp_path):
    text = json.dumps({**GPT2, "architectures": ["NotThere", "GPT2DoubleHeadsModel"]})
    job = load_job(write(tmp_path, text, "config.json"), 2, 16)
    assert type(job.model()).__name__ == "GPT2DoubleHeadsModel"


@pytest.mark.hf
@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "cannot read .*config.json: .*give a Hugging Face config.json"),
        ("[]", "config.json names no model_type"),
        ('{"model_type": "nothing"}', "config.json: this version of transformers does not take it"),
        (json.dumps(GPT2), "--seq 17 is longer than the 16 positions of .*config.json"),
    ],
)
def test_a_config_that_cannot_be_used_says_why(tmp_path, text, message):
    with pytest.raises(TargetError, match=message):
        load_job(write(tmp_path, text, "config.json"), 2, 17)


def test_a_missing_transformers_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TargetError, match=r"needs transformers: pip install 'shardwright\[hf\]'"):
        load_job(write(tmp_path, json.dumps(GPT2), "config.json"), 2, 8)


def test_weights_follow_the_seed():
    job = Job(lambda: nn.Linear(2, 2), (), torch.optim.SGD, [()], 1, seed=7)
    assert torch.equal(build_model(job).weight, build_model(job).weight)


def test_a_factory_that_cannot_work_without_memory_builds_the_real_model():
    def model():
        layer = nn.Linear(2, 2)
        layer.scale = layer.weight.sum().item()  # needs a value
        return layer

    job = Job(model, (), torch.optim.SGD, [()], 1)
    assert not build_model(job, meta=True).weight.is_meta
