"""Files that are read, and how those are refused that cannot be."""

import os

import pytest

from shardwright.frameworks.documents.forms import parse_document
from shardwright.frameworks.errors import FrameworkError
from shardwright.frameworks.models import FLAVORS, flavor, model_of_config
from shardwright.frameworks.reading import read_file, read_text
from tests.harness import published_configs as published


@pytest.mark.parametrize(
    "text, framework",
    [
        (published.TORCHTITAN_8B, "torchtitan"),
        (published.NVFP4, "torchtitan"),
        (published.QWEN3_DUMP, "torchtitan"),
        ("NGPU=8 ./run_train.sh --module llama3 --config llama3_8b", "torchtitan"),
        (published.MEGATRON_8B, "megatron"),
        (published.GPT3_15B, "megatron"),
        (published.BRIDGE_GPT_OSS, "megatron-bridge"),
        ("run.py model.tensor_model_parallel_size=2", None),
        (published.ACCELERATE_CP, "accelerate"),
        (published.DEEPSPEED_AUTO, "deepspeed"),
        (published.TRAINER_EXPERTS, "trainer"),
        (published.AXOLOTL_GPT_OSS, "axolotl"),
        (published.TORCHTUNE_70B, "torchtune"),
        (published.LLAMA_FACTORY_MEGATRON, "llama-factory"),
        ("a: 1\nb: 2\n", None),
    ],
)
def test_the_framework_is_recognised_by_the_content(text, framework):
    if framework is None:
        with pytest.raises(FrameworkError, match=r"no framework that is read|no YAML mapping"):
            read_text(text, devices=8)
    else:
        assert read_text(text, devices=64 if "1280" in text else 8).framework == framework


def test_every_key_is_used_or_said_to_be_unused_with_its_line():
    config = read_text(published.TORCHTITAN_8B, devices=8)
    used = {key.name: key.line for key in config.used}
    assert used["training.local_batch_size"] == 8
    assert used["parallelism.tensor_parallel_degree"] == 13
    assert [(key.name, key.line) for key in config.unused] == [
        ("optimizer.name", 5),
        ("optimizer.lr", 6),
    ]
    assert all(key.why for key in config.unused)
    every = set(parse_document("config", published.TORCHTITAN_8B).entries)
    assert {key.name for key in (*config.used, *config.unused)} == every


def titan(line):
    """A config of torchtitan with another line for tensor parallelism."""
    return published.TORCHTITAN_8B.replace("tensor_parallel_degree = 1", line)


def float8(recipe):
    """A config of torchtitan with a recipe in 8 bits, and gathers of weights in them."""
    flavor = 'flavor = "8B"\n'
    text = published.TORCHTITAN_8B.replace(flavor, f'{flavor}converters = ["float8"]\n')
    gathers = "enable_fsdp_float8_all_gather = true"
    return f'{text}[float8]\nrecipe_name = "{recipe}"\n{gathers}\n'


@pytest.mark.parametrize(
    "text, said",
    [
        (
            titan("tensor_parallel_degree = 0"),
            "config, line 13, parallelism.tensor_parallel_degree = 0: a whole number of at least 1",
        ),
        (
            titan('tensor_parallel_degree = "x"'),
            "line 13, parallelism.tensor_parallel_degree = 'x': a whole number",
        ),
        (
            titan("tensor_parallel_degree = 3"),
            "8 devices are not divided by the 3 ranks of line 13, parallelism.tensor_parallel",
        ),
        (
            titan("expert_parallel_degree = 3"),
            "line 13, parallelism.expert_parallel_degree = 3: ep=3 x etp=1 does not divide the 8",
        ),
        (
            published.DEEPSPEED_Z3.replace('"stage": 3', '"stage": 4'),
            "line 7, zero_optimization.stage = 4: 0, 1, 2 or 3 is needed",
        ),
        (
            published.DEEPSPEED_Z3.replace("},", "}", 1),
            "config, line 6: it is no JSON",
        ),
        (
            published.ACCELERATE_HSDP.replace("tp_size: 2", "tp_size: 4"),
            "sizes whose product is the 8 processes are needed, not 16",
        ),
        (
            published.ACCELERATE_HSDP.replace("fsdp_version: 2", "fsdp_version: 1"),
            "a parallelism_config needs fsdp_version: 2",
        ),
        (
            "--tensor-model-parallel-size $TP\n",
            "tensor-model-parallel-size = '$TP': a whole number of at least 1 is needed; the script"
            " does not assign this variable",
        ),
        (
            published.MEGATRON_8B.replace("-128}", "-100}"),
            "global-batch-size = '100': a multiple of the 8 samples",
        ),
        (
            published.MIXTRAL_8X7B.replace("stage: 1", "stage: 3"),
            "line 11, MODEL_ARGS.--num-layers-per-virtual-pipeline-stage = 3",
        ),
        (
            published.TORCHTITAN_405B.replace('"1F1B"', '"Sideways"'),
            "line 13, experimental.pipeline_parallel_schedule = 'Sideways': one of GPipe",
        ),
        (
            float8("rowwise"),
            "line 20, float8.enable_fsdp_float8_all_gather = True: tensorwise is needed with it",
        ),
        (
            float8("tensorwise"),
            "no float8.recipe_name is needed with it: torchtitan takes it for tensorwise without",
        ),
        (
            "--tensor-model-parallel-size 1 --fp8-format hybrid --fp8-param-gather",
            "line 1, fp8-param-gather = True: use-distributed-optimizer or FSDP is needed too",
        ),
        (
            titan("tensor_parallel_degree = 2\nenable_async_tensor_parallel = true"),
            "line 14, parallelism.enable_async_tensor_parallel = True: compile.enable is needed",
        ),
        (
            "--tensor-model-parallel-size 1 --overlap-moe-expert-parallel-comm",
            "line 1, overlap-moe-expert-parallel-comm = True: expert-model-parallel-size of 2",
        ),
        (
            "--tensor-model-parallel-size 2 --tp-comm-overlap",
            "line 1, tp-comm-overlap = True: sequence-parallel is needed too",
        ),
        ("a: !!python/object:os.system x\n", "could not determine a constructor"),
    ],
)
def test_what_contradicts_itself_is_named_with_key_and_line(text, said):
    with pytest.raises(FrameworkError) as raised:
        read_text(text, devices=512 if "pipeline" in text and "MODEL" not in text else 8)
    assert said in str(raised.value)


def test_a_variable_of_a_script_is_read_where_it_is_assigned():
    config = read_text(published.MEGATRON_8B)
    assert config.strategy.devices == 8  # the product of two variables
    assert config.batch.samples == 128  # a default
    assert any("branches of the script" in note for note in config.notes)
    assert all(key.name != "pipeline-model-parallel-size" for key in config.used)  # a comment


def test_devices_that_contradict_the_file_are_refused():
    with pytest.raises(FrameworkError, match="the file says 8 devices, and 16 are given"):
        read_text(published.ACCELERATE_CP, devices=16)
    with pytest.raises(FrameworkError, match="does not say on how many devices it runs"):
        read_text(published.DEEPSPEED_Z3)


def test_a_file_is_data(tmp_path):
    marker = tmp_path / "ran"
    script = tmp_path / "train.sh"
    commands = f"touch {marker}\n$(touch {marker})\n`touch {marker}`\n"
    script.write_text(commands + published.MEGATRON_8B)
    read_file(script)
    config = tmp_path / "config.py"
    config.write_text(published.NVFP4 + f"\n\nopen({str(marker)!r}, 'w')\n")
    read_file(config, devices=4)
    assert not marker.exists()


def test_pipes_large_files_folders_and_bytes_are_refused(tmp_path):
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    large = tmp_path / "large.json"
    large.write_bytes(b" " * (2**22 + 1))
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, said in (
        (pipe, "no regular file"),
        (large, "at most"),
        (tmp_path, "cannot read"),
        (tmp_path / "absent", "No such file"),
        (binary, "no UTF-8"),
    ):
        with pytest.raises(FrameworkError, match=said):
            read_file(path)


@pytest.mark.parametrize("named", ["/etc/passwd", "../secret.json", "absent.json"])
def test_a_config_names_only_files_below_its_folder(tmp_path, named):
    config = tmp_path / "config.yaml"
    config.write_text(f"base_model: m\ndeepspeed: {named}\n")
    with pytest.raises(FrameworkError, match="it names"):
        read_file(config, devices=8)


def parameters(one):
    """Parameters of a dense decoder with grouped attention."""
    model = one.model
    attention = 2 * (model.heads + model.key_value_heads) * one.head_dim * model.hidden
    layer = attention + 3 * model.hidden * model.ffn + 2 * model.hidden
    embeddings = model.vocabulary * model.hidden * (1 if one.tied else 2)
    return model.layers * layer + embeddings + model.hidden


@pytest.mark.parametrize(
    "name, billions",
    [
        *(("llama3 1B", 1.236), ("llama3 3B", 3.213), ("llama3 8B", 8.030), ("llama3 70B", 70.554)),
        *(("llama3 405B", 405.853), ("qwen3 0.6B", 0.596), ("qwen3 1.7B", 1.721)),
        *(("qwen3 4B", 4.022), ("qwen3 8B", 8.191), ("qwen3 14B", 14.768), ("qwen3 32B", 32.762)),
    ],
)
def test_shapes_of_flavors_have_the_published_number_of_parameters(name, billions):
    assert parameters(FLAVORS[name]) / 1e9 == pytest.approx(billions, abs=2e-3)


def test_flavors_are_found_by_any_spelling():
    assert flavor("llama3", "8B") == flavor(None, "llama3_8b") == FLAVORS["llama3 8B"].model
    assert flavor("qwen3", "qwen3_30b_a3b").experts == 128
    assert flavor("other", "1B").layers is None


def test_sizes_of_a_config_json():
    text = '{"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 4}'
    model = model_of_config(parse_document("config.json", text))
    assert (model.layers, model.heads, model.key_value_heads) == (4, 4, 4)
    with pytest.raises(FrameworkError, match="num_hidden_layers is needed"):
        model_of_config(parse_document("config.json", '{"hidden_size": 64}'))


def test_what_deepspeed_leaves_to_its_caller_is_said_and_not_taken_for_float32_in_silence():
    (note,) = (one for one in read_text(published.DEEPSPEED_AUTO, devices=8).notes if "auto" in one)
    assert "bf16.enabled" in note and "the precision is read as float32" in note
    assert "gradient_accumulation_steps" in note and "zero_optimization" not in note
    known = read_text(published.DEEPSPEED_AUTO.replace('"auto"}', "true}"), devices=8)
    assert known.strategy.param_dtype == "bfloat16"
    assert not any("precision" in note for note in known.notes)
