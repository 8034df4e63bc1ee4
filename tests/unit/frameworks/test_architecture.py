"""Models that configs describe: built on the meta device, and counted."""

import pytest

from shardwright.frameworks.architecture import config_json
from shardwright.frameworks.config import ModelHints
from shardwright.frameworks.errors import FrameworkError
from shardwright.frameworks.models import FLAVORS, known_model
from shardwright.frameworks.reading import read_text
from tests.harness import published_configs as published

# Billions of parameters as torchtitan counts them, or as the models' publishers say.
PARAMETERS = {
    **{"llama3 1B": 1.236, "llama3 3B": 3.213, "llama3 8B": 8.030},
    **{"llama3 70B": 70.554, "llama3 405B": 405.853},
    **{"qwen3 0.6B": 0.596, "qwen3 1.7B": 1.721, "qwen3 4B": 4.022, "qwen3 8B": 8.191},
    **{"qwen3 14B": 14.768, "qwen3 32B": 32.762, "qwen3 30B-A3B": 30.53},
    **{"qwen3 235B-A22B": 235.1, "deepseek_v3 16B": 15.7, "deepseek_v3 671B": 671.0},
    **{"gpt_oss 20b": 20.9, "gpt_oss 120b": 116.8},
    **{"llama4 17bx16e": 107.8, "llama4 17bx128e": 400.7},
}


@pytest.mark.hf
@pytest.mark.parametrize("name", FLAVORS)
def test_a_flavor_has_the_parameters_that_were_published(name):
    fields = config_json(FLAVORS[name].model, 8192)
    layers = fields["num_hidden_layers"]
    begin = fields.get("first_k_dense_replace", 0) + 2  # some layers may be of another kind
    few, more = counted(fields, begin), counted(fields, begin + 2)
    whole = few + (more - few) // 2 * (layers - begin)
    assert whole / 1e9 == pytest.approx(PARAMETERS[name], rel=2e-3)


def counted(fields, layers):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**fields, "num_hidden_layers": layers})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "name, layers",
    [
        ("Qwen/Qwen3-30B-A3B", 48),
        ("openai/gpt-oss-20b", 24),
        ("meta-llama/Meta-Llama-3-70B", 80),
        ("meta-llama/Llama-3.1-8B-Instruct", 32),
        ("torchtune.models.llama3_1.llama3_1_70b", 80),
        ("Qwen/Qwen3-1.7B", 28),
        ("meta-llama/Llama-3.2-11B-Vision", None),
        ("org/model", None),
    ],
)
def test_models_are_known_by_their_names_on_the_hub(name, layers):
    found = known_model(ModelHints(name=name))
    assert (found.name, found.layers) == (name, layers)


def test_sequences_may_be_longer_than_the_published_context():
    model = FLAVORS["llama3 8B"].model
    assert config_json(model, 2**18)["max_position_embeddings"] == 2**18
    assert config_json(model, 8192)["max_position_embeddings"] == 131_072


@pytest.mark.parametrize(
    "text, more, kind",
    [
        (published.MEGATRON_8B, "", "llama"),
        (published.GPT3_15B, "  --kv-channels: 128\n", "nemotron"),
        (published.MIXTRAL_8X22B, "  --num-attention-heads: 48\n  --swiglu: true\n", "mixtral"),
    ],
)
def test_flags_give_a_model_of_the_same_matrices(text, more, kind):
    text = text + more
    vocabulary = "  --vocab-size: 32000\n" if "MODEL_ARGS:" in text else " --vocab-size 32000\n"
    config = read_text(
        text.rstrip() + ("\n" if "MODEL_ARGS:" in text else "") + vocabulary,
        devices=None if kind == "llama" else 256,
    )
    fields = config_json(config.model, 4096)
    assert fields["model_type"] == kind
    assert fields["hidden_size"] == config.model.hidden
    assert fields["tie_word_embeddings"]  # as Megatron-LM does unless told otherwise
    if kind == "mixtral":
        assert (fields["num_local_experts"], fields["intermediate_size"]) == (8, 16384)


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--num-layers 2 --hidden-size 64 --num-attention-heads 4", "--vocab-size is missing"),
        ("--seq-length 128", "the model is not known; give --model"),
        (
            "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 9"
            " --num-experts 8",
            "experts without --swiglu",
        ),
    ],
)
def test_what_is_missing_is_named(flags, said):
    config = read_text(f"--tensor-model-parallel-size 1 {flags}", devices=2)
    with pytest.raises(FrameworkError, match=said):
        config_json(config.model, 128)


def test_a_model_of_another_name_is_asked_for():
    with pytest.raises(FrameworkError, match="'org/model' is not known; give --model"):
        config_json(ModelHints(name="org/model"), 128)
