"""Values of models on the meta device: own initialisers, and refusals that name a tensor."""

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.ir.plan import PlanError
from shardwright.runtime.deferred.initializers import reset_parameters
from shardwright.runtime.model_values import with_values


class Block(nn.Module):
    """A module whose own method resets more than its children do."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(20, 20), nn.BatchNorm1d(20)
        self.attention = nn.MultiheadAttention(16, 2)
        self.scale = nn.Parameter(torch.empty(20))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.zeros_(self.inner.bias)
        nn.init.trunc_normal_(self.scale, std=2.0)


class Declared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(20, 20), nn.Linear(20, 20)
        self.register_buffer("table", torch.zeros(4), persistent=False)

    def init_weights(self, std=0.02):
        nn.init.orthogonal_(self.second.weight)
        nn.init.normal_(self.first.weight, std=std)
        for layer in (self.first, self.second):
            nn.init.zeros_(layer.bias)
        self.table = torch.arange(4.0)  # replaces it


class Forgotten(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.extra = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.register_buffer("angles", torch.arange(4.0))


def on_meta(kind):
    with torch.device("meta"):
        return kind()


def values(model, init):
    torch.manual_seed(1)
    model, sources = with_values(model, init)
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: sources.whole(name, tensor) for name, tensor in named}


@pytest.mark.parametrize(
    "kind, init, eager",
    [
        (Block, "reset_parameters", reset_parameters),
        (Declared, None, Declared.init_weights),
        (Declared, lambda m: m.init_weights(0.5), lambda m: m.init_weights(0.5)),
    ],
)
def test_values_are_those_of_initialisers_on_a_real_device(kind, init, eager):
    model = on_meta(kind).to_empty(device="cpu")
    torch.manual_seed(1)
    with torch.no_grad():
        eager(model)
    found = values(on_meta(kind), init)
    expected = dict(model.named_parameters()) | dict(model.named_buffers())
    assert found.keys() == expected.keys()
    assert [n for n in found if not torch.equal(found[n], expected[n])] == []


def test_children_are_reset_before_the_modules_that_own_them():
    assert not values(on_meta(Block), "reset_parameters")["inner.bias"].any()


@pytest.mark.hf
def test_transformers_initialise_rotary_frequencies_too():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=4, vocab_size=128)
    eager, found = LlamaForCausalLM(config), values(on_meta(lambda: LlamaForCausalLM(config)), None)
    rotary = "model.rotary_emb.inv_freq"
    assert torch.equal(found[rotary], eager.get_buffer(rotary))
    assert 0.019 < found["model.embed_tokens.weight"].std() < 0.021


@pytest.mark.parametrize(
    "make, init, wrong",
    [
        (lambda: on_meta(Forgotten), "reset_parameters", r"gives extra of Forgotten.*2 tensors"),
        (lambda: on_meta(Forgotten), None, "parameters on the meta device, without values"),
        (lambda: on_meta(Declared), "zeros", "init is 'zeros'; give a function"),
        (Declared, "reset_parameters", "this one has values"),
        (lambda: Declared, "reset_parameters", "leave it out for a function"),
    ],
)
def test_refusals(make, init, wrong):
    with pytest.raises(PlanError, match=wrong):
        with_values(make(), init)


def test_a_parameter_of_which_a_part_has_values_is_refused():
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 4))
            with torch.no_grad():
                self.weight[:2].zero_()

        def forward(self, x):
            return (x @ self.weight).sum()

    x = torch.ones(2, 4)
    plan = sw.plan(Partly(), (x,), machine="1xcpu")
    with pytest.raises(PlanError, match="weight: nothing has given values to all"):
        sw.parallelize(Partly, plan)


def test_a_function_that_returns_no_module_is_refused():
    with pytest.raises(ValueError, match=r"no torch\.nn\.Module"):
        with_values(lambda: 3)


class Selects(nn.Module):
    """A sub-module that export cannot trace, so that capture has to run it."""

    def __init__(self):
        super().__init__()
        self.layer, self.shift = nn.Linear(3, 3), torch.randn(3)

    def forward(self, x):
        x = self.layer(x) + self.shift
        return x * x[x > 0].sum()


def test_a_model_that_capture_has_to_run_is_built_whole():
    def make():
        return nn.Sequential(nn.Linear(3, 3), Selects(), nn.Linear(3, 1), nn.Flatten(0))

    x = torch.ones(1, 3)
    torch.manual_seed(2)
    eager = make()
    plan = sw.plan(eager, (x,), machine="1xcpu")
    torch.manual_seed(2)
    module = sw.parallelize(make, plan)
    assert torch.equal(module(x), sw.parallelize(eager, plan)(x))
