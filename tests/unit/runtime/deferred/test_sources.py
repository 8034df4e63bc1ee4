"""Modules built without memory have, bit for bit, the values that their functions give them."""

from collections import namedtuple
from functools import partial

import numpy
import pytest
import torch
from torch import nn

from shardwright.runtime.deferred.sources import all_tensors, deferred, sources_of

HF = pytest.mark.hf
Named = namedtuple("Named", "one other")


def linear():
    return nn.Sequential(nn.Linear(300, 200), nn.LayerNorm(200), nn.BatchNorm1d(200))


def copied_layers():
    layer = nn.TransformerEncoderLayer(32, 4, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def recurrent():
    return nn.LSTM(8, 9)


def orthogonal():
    """Initialisers that pass over tensors on the meta device."""
    model = nn.Sequential(nn.Linear(40, 30), nn.Embedding(100, 8, padding_idx=3))
    nn.init.orthogonal_(model[0].weight)
    nn.init.trunc_normal_(model[0].bias, std=1.0, a=-0.5, b=0.5)
    nn.init.sparse_(model[1].weight[:50], 0.3)
    return model


def seeded_within():
    """Seeds that are set, and states that are saved and restored, between draws."""
    first = nn.Linear(30, 30)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        second = nn.Linear(30, 30)
    third = nn.Linear(30, 30)
    torch.manual_seed(3)  # that of the test: the generator was there before
    fourth = nn.Linear(30, 30)
    return nn.Sequential(first, second, third, fourth)


def own_generator():
    generator = torch.Generator().manual_seed(11)
    model = nn.Module()
    model.first = nn.Parameter(torch.randn(20, 20, generator=generator))
    model.second = nn.Parameter(torch.empty(50).uniform_(-1, 1, generator=generator))
    return model


def assigned():
    """Values that are computed, assigned, tied, split and read in the constructor."""
    model = nn.Linear(30, 30)
    model.weight.data.normal_()
    model.bias = nn.Parameter(torch.randn(500, 100)[0, :30] * 0.02)
    model.tied = model.weight
    model.register_buffer("mask", torch.tril(torch.ones(300, 300)))
    model.register_buffer("count", torch.arange(5), persistent=False)
    model.rates = torch.linspace(0, 1, 3).tolist()
    model.drawn = nn.Parameter(torch.full((4,), torch.rand(()).item()))
    model.listed = nn.Parameter(torch.tensor(torch.rand(3).tolist()))
    model.given = nn.Parameter(torch.from_numpy(numpy.arange(9.0)))
    model.parts = nn.ParameterList(torch.randn(8, 8).chunk(2))
    model.halves = nn.Parameter(torch.empty(10, 4))
    with torch.no_grad():
        model.halves[:5].zero_()
        model.halves[5:].normal_()
        picked = torch.rand(10) > 0.5
        model.halves[picked] = 1.0
        model.kept = torch.nonzero(picked).tolist()
    return model


def normalised():
    return nn.utils.parametrizations.weight_norm(nn.Linear(6, 5))


def half():
    return nn.Linear(30, 30, dtype=torch.bfloat16).half()


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, vocab_size=128))


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=100, **tokens))


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, vocab_size=100))


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return ViTForImageClassification(ViTConfig(**sizes, num_attention_heads=2))


MAKERS = [linear, copied_layers, recurrent, orthogonal, seeded_within, own_generator, assigned]
MAKERS += [normalised, half]
MAKERS += [pytest.param(make, marks=HF) for make in (llama, gpt2, mixtral, vit)]


def tensors(model):
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return parameters | dict(model.named_buffers(remove_duplicate=False))


@pytest.mark.parametrize("make", MAKERS)
def test_values_are_those_of_the_function(make):
    torch.manual_seed(3)
    expected, state = make(), torch.get_rng_state()
    torch.manual_seed(3)
    model = deferred(make)
    sources = sources_of(model)
    sources.check(model)
    wanted, found = tensors(expected), tensors(model)
    assert list(wanted) == list(found)
    for name, tensor in reversed(found.items()):  # in any order
        assert tensor.is_meta
        assert type(tensor) is type(wanted[name])
        assert tensor.requires_grad == wanted[name].requires_grad
        value = sources.whole(name, tensor)
        assert value.dtype == wanted[name].dtype
        assert torch.equal(value, wanted[name]), name
    sources.finish()
    assert torch.equal(torch.get_rng_state(), state)


def test_what_python_read_is_what_was_there():
    torch.manual_seed(3)
    expected = assigned()
    torch.manual_seed(3)
    model = deferred(assigned)
    assert (model.rates, model.kept) == (expected.rates, expected.kept)
    assert model.tied is model.weight


def read_by_python():
    """Large tensors, with and without memory, that Python reads and writes."""
    model = nn.Linear(300, 300)
    with torch.no_grad():
        given = torch.from_numpy(numpy.ones((300, 300), numpy.float32))
        given.view(-1).mul_(3)
        given.numpy()[0, 0] = 7
        model.weight.mul_(given)
        model.bias.fill_(float(model.weight.detach().numpy()[0, 0]))
    model.read = given.tolist(), model.weight.tolist(), numpy.asarray(model.weight.detach()).sum()
    return model


def test_large_tensors_that_python_reads_are_those_that_were_there():
    """Arrays of them were of memory that had been freed, or had never been."""
    torch.manual_seed(3)
    expected = read_by_python()
    torch.manual_seed(3)
    model = deferred(read_by_python)
    assert model.read == expected.read
    for name, value in tensors(expected).items():
        assert torch.equal(sources_of(model).whole(name, tensors(model)[name]), value)


def test_tensors_of_a_module_have_no_memory():
    model = deferred(lambda: nn.Linear(1 << 20, 1 << 20))  # 4 TiB
    assert model.weight.is_meta
    assert model.weight.shape == (1 << 20, 1 << 20)


def test_plain_attributes_and_lists_of_tensors_have_values():
    def make():
        model = nn.Module()
        model.table, model.tables = torch.arange(4.0), [torch.ones(3), {"a": torch.randn(20)}]
        model.named = Named(torch.ones(2), torch.randn(20000))
        return model

    torch.manual_seed(0)
    expected = make()
    torch.manual_seed(0)
    model = deferred(make)
    sources = sources_of(model)
    assert model.table.is_meta
    assert torch.equal(sources.whole("table", model.table), expected.table)
    drawn = model.tables[1]["a"]
    assert torch.equal(sources.whole("a", drawn), expected.tables[1]["a"])
    assert torch.equal(sources.whole("b", model.named.other), expected.named.other)


def test_an_array_of_a_tensor_without_memory_cannot_be_written():
    def make():
        model = nn.Linear(300, 300)
        model.weight.detach().numpy()[0, 0] = 5.0
        return model

    with pytest.raises(ValueError, match="read-only"):
        deferred(make)


def test_different_draws_have_different_digests():
    digests = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        model = deferred(linear)
        digests.append(sources_of(model).digest(all_tensors(model)))
    assert digests[0] == digests[1] != digests[2]


def from_numpy(seed):
    model = nn.Linear(300, 200)
    values = numpy.random.default_rng(seed).standard_normal((200, 300))
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(values))
    return model


def constant(value):
    model = nn.Linear(300, 200)
    nn.init.constant_(model.weight, value)
    return model


@pytest.mark.parametrize("make", [from_numpy, constant])
def test_different_values_that_are_given_have_different_digests(make):
    """Numbers of numpy, whose seeds differed between ranks, were those of several models."""
    digests = []
    for given in (1, 1, 2):
        torch.manual_seed(0)
        model = deferred(partial(make, given))
        digests.append(sources_of(model).digest(all_tensors(model)))
    assert digests[0] == digests[1] != digests[2]


def test_a_function_that_fails_leaves_random_states_as_they_were():
    def failing():
        linear()
        raise ValueError("no model")

    before = torch.manual_seed(0).get_state()
    with pytest.raises(ValueError, match="no model"):
        deferred(failing)
    assert torch.equal(torch.get_rng_state(), before)
