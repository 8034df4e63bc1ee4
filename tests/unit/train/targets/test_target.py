import json
import sys

import pytest
import torch
from torch import nn

from shardwright.train.job import Job
from shardwright.train.targets.target import TargetError, build_model, load_job, optimizer_name

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
    assert optimizer_name(job, build_model(job)) == "adamw"


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
        ("nowhere.py", (), "nor a config.json; name the function .* as in nowhere.py:job"),
        ("a.py:job", (8, None), "a.py:job brings its own batch; --batch and --seq belong to"),
        ("config.json", (None, 8), "config.json has no batch: give its sizes, as in --batch 8"),
        ("nowhere.json", (8, 8), "cannot read nowhere.json: .* give a Hugging Face config.json"),
    ],
)
def test_a_target_of_the_wrong_form_says_what_is_needed(target, sizes, message):
    with pytest.raises(TargetError, match=message):
        load_job(target, *sizes)


def test_momentum_is_part_of_the_optimizer(tmp_path):
    write(tmp_path, "SIZE = 3", "sibling.py")
    for given, name in (("lr=1", "sgd"), ("lr=1, momentum=0.9", "sgd_momentum")):
        text = GOOD.replace("optim.AdamW(ps)", f"optim.SGD(ps, {given})")
        job = load_job(write(tmp_path, text) + ":job")
        assert optimizer_name(job, build_model(job)) == name


def test_a_fused_optimizer_is_known_of_a_model_without_memory(tmp_path):
    """Fused optimizers refuse parameters on the meta device."""
    write(tmp_path, "SIZE = 3", "sibling.py")
    text = GOOD.replace("optim.AdamW(ps)", "optim.AdamW(ps, fused=True)")
    job = load_job(write(tmp_path, text) + ":job")
    assert optimizer_name(job, build_model(job).to("meta")) == "adamw_fused"


SET = HEAD + (
    "def job(width=3, kind='a'):\n"
    "    return Job(lambda: torch.nn.Linear(width, 1), (torch.zeros(2, width),),\n"
    "               torch.optim.AdamW, [], 3, name=kind)\n"
)


def test_settings_are_arguments_of_the_function(tmp_path):
    job = load_job(write(tmp_path, SET) + ":job", settings=("width=8", "kind=plain text"))
    assert (job.model().in_features, job.name) == (8, "plain text")


@pytest.mark.parametrize(
    "setting, message",
    [
        ("widht=8", "--set widht: .*my_job.py:job has no argument widht; there are width"),
        ("width", "--set width: write it as name=value, as in --set num_layers=4"),
        ("=8", "write it as name=value"),
        ("machine=2xcpu", "no argument machine; .*, and the options --machine and --optimizer"),
    ],
)
def test_a_setting_that_the_function_does_not_take_is_a_mistake(tmp_path, setting, message):
    with pytest.raises(TargetError, match=message):
        load_job(write(tmp_path, SET) + ":job", settings=(setting,))


@pytest.mark.hf
def test_settings_change_a_config_and_its_batch(tmp_path):
    file = write(tmp_path, json.dumps(GPT2), "config.json")
    job = load_job(file, 2, settings=("n_layer=3", "batch=4", "seq=8"))
    assert len(job.model().transformer.h) == 3
    assert tuple(job.call()[1]["input_ids"].shape) == (4, 8)
    with pytest.raises(TargetError, match=r"config\.json has no field n_layers; there are n_layer"):
        load_job(file, 2, 8, ("n_layers=3",))
    with pytest.raises(TargetError, match="at least 1 sequence of 2 tokens"):
        load_job(file, settings=("batch=many", "seq=8"))


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
        (
            '{"model_type": "nothing"}',
            "config.json: model_type is .nothing.; give a type that transformers knows, as",
        ),
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
