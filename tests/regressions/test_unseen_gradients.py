"""Gradients and state that a graph does not have: reproduced exactly, or refused with the line.

A user put a hook on a tensor, on a module or on a weight, froze a parameter while the model ran,
changed a tensor through `.data`, read a leaf from a closure, or counted calls in an attribute.
Capture took the model without a word, and the plan trained with other gradients, or with the value
that the attribute had in the first call. Now a child module with backward hooks, or with hooks on
tensors, is kept whole, where autograd runs it as it is; everything else that a graph cannot have
is one error that names file and line. What does no harm is still captured.
"""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import shardwright as sw
from shardwright.tracing.call import CaptureError
from shardwright.tracing.capture import capture_call
from tests.zoo.subject import Subject, worst

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LEAF = torch.ones(4, dtype=torch.float64, requires_grad=True)
CALLS = {"n": 0}


class Net(nn.Module):
    """Two linear layers with a function of the module and the hidden values between them."""

    def __init__(self, function=None, **attributes):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        hidden = self.a(x)
        if self.function is not None:
            hidden = self.function(self, hidden)
        return self.b(hidden).square().mean()


class Child(nn.Module):
    """Decides on its data, so that it is kept whole."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function
        self.k, self.log, self.ema = 0, [], torch.zeros(4)

    def forward(self, hidden):
        if hidden.sum() > 1e9:
            return hidden
        return self.function(self, self.layer(hidden))


class WithChild(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.child = nn.Linear(3, 4), nn.Linear(4, 2), Child(function)

    def forward(self, x):
        return self.b(self.child(self.a(x))).square().mean()


def _doubled_backward(module):
    module.register_full_backward_hook(
        lambda _module, given, _out: tuple(None if g is None else 2 * g for g in given)
    )


def _with(prepare, model=None):
    model = model or Net()
    prepare(model)
    return model


def _hook(_module, hidden):
    hidden.register_hook(lambda gradient: 2 * gradient)
    return hidden


def _frozen(module, hidden):
    module.b.requires_grad_(False)
    return hidden


def _frozen_by_attribute(module, hidden):
    module.b.weight.requires_grad = False
    return hidden


def _assigned_data(module, hidden):
    module.b.weight.data = module.b.weight.data.to(torch.bfloat16)
    return hidden


def _replaced(module, hidden):
    module.b.weight = nn.Parameter(module.b.weight.detach() * 0.5)
    return hidden


def _registered(module, hidden):
    module.late = nn.Parameter(torch.ones(4, dtype=hidden.dtype))
    return hidden * module.late


def _written_data(_module, hidden):
    hidden = hidden.exp()
    hidden.data.mul_(2)
    return hidden


def _written_detached(_module, hidden):
    hidden = hidden * 1
    hidden.detach()[0].mul_(2)
    return hidden * hidden


def _written_unrecorded(_module, hidden):
    hidden = hidden * 1
    with torch.no_grad():
        hidden.mul_(2)
    return hidden * hidden


def _shrinks_rows(module, hidden):
    """What torch's documentation says of `max_norm`: look up in a copy of the weight."""
    weight = (module.layer if isinstance(module, Child) else module.b).weight.clone()
    rows = F.embedding(torch.arange(len(hidden)) % len(weight), weight, max_norm=0.1)
    return hidden + rows[:, :1]


def _cut_off(_module, hidden):
    other = hidden * 1
    other.detach_()
    return hidden * other


def _reads_a_leaf(_module, hidden):
    return hidden * LEAF


def _counts(module, hidden):
    module.k += 1
    return hidden * module.k


def _averages(module, hidden):
    module.ema = 0.9 * module.ema + 0.1 * hidden.detach().mean(0)
    return hidden * module.ema


def _averages_in_place(module, hidden):
    module.ema.mul_(0.9)
    return hidden * module.ema


def _appends(module, hidden):
    module.log.append(1)
    return hidden * len(module.log)


def _queues(module, hidden):
    module.log.append(hidden.detach())
    return hidden + torch.stack(module.log).mean(0)


def _counts_globally(_module, hidden):
    CALLS["n"] += 1
    return hidden * CALLS["n"]


def _initialises(module, hidden):
    if module.ema is None:
        module.ema = hidden.detach().mean(0)
    return hidden - module.ema


REFUSED = [
    (Net(_hook), "registers a hook on a tensor"),
    (_with(_doubled_backward), r"the model \(Net\) has a backward hook"),
    (
        _with(lambda m: m.a.weight.register_hook(lambda g: 2 * g)),
        "a.weight has a hook on its gradient",
    ),
    (
        _with(lambda m: m.a.weight.register_post_accumulate_grad_hook(lambda p: None)),
        "a.weight has a hook after its gradient is accumulated",
    ),
    (Net(_frozen), "sets requires_grad of its parameter b.weight to False"),
    (Net(_frozen_by_attribute), "sets requires_grad of its parameter b.weight to False"),
    (Net(_assigned_data), "sets .data of b.weight"),
    (Net(_replaced), r"changes b.weight \(a parameter\)"),
    (Net(_registered), r"changes late \(a parameter\)"),
    (Net(_written_data), "autograd does not record it"),
    (Net(_written_detached), "autograd does not record it"),
    (Net(_written_unrecorded), "autograd does not record it"),
    (Net(_shrinks_rows), "an embedding with max_norm shrinks rows of its weight in place"),
    (Net(_cut_off), r"calls detach_\(\)"),
    (Net(_reads_a_leaf), r"reads a tensor of shape \(4,\) that wants a gradient"),
    (Net(_counts, k=0), "changes k while it runs"),
    (Net(_averages, ema=torch.zeros(4)), "changes ema while it runs"),
    (Net(_averages_in_place, ema=torch.zeros(4)), "in place that is no buffer"),
    (Net(_appends, log=[]), "changes log while it runs"),
    (Net(_queues, log=[]), "changes log while it runs"),
    (Net(_counts_globally), r"changes CALLS \(a global\) while it runs"),
    (Net(_initialises, ema=None), "changes ema while it runs"),
    (WithChild(_counts), "child changes k while it runs"),
    (WithChild(_averages), "child changes ema while it runs"),
    (WithChild(_appends), "child changes log while it runs"),
    (WithChild(_reads_a_leaf), "that wants a gradient"),
]


@pytest.mark.parametrize(("model", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_a_graph_cannot_have_is_one_line_with_its_place(model, words):
    with pytest.raises(CaptureError, match=words) as wrong:
        capture_call(model, (X.float(),))
    assert re.match(r"^\S*test_unseen_gradients\.py:\d+: ", str(wrong.value)), str(wrong.value)
    assert "\n" not in str(wrong.value)


def test_the_line_is_that_of_the_assignment():
    with pytest.raises(CaptureError) as wrong:
        capture_call(Net(_counts, k=0), (X.float(),))
    line = _counts.__code__.co_firstlineno + 1
    assert f"test_unseen_gradients.py:{line}: Net changes k" in str(wrong.value)


def test_hooks_on_all_modules_are_refused():
    handle = nn.modules.module.register_module_forward_hook(lambda _m, _x, y: 2 * y)
    try:
        with pytest.raises(CaptureError, match="a forward hook is registered for all modules"):
            capture_call(Net(), (X.float(),))
    finally:
        handle.remove()


def _writes_before_it_reads(module, hidden):
    module.last = hidden * 2
    return module.last + 1


def _caches(module, hidden):
    if module.cache is None:
        module.cache = torch.arange(4, dtype=hidden.dtype)
    return hidden * module.cache


def _sets_a_constant(module, hidden):
    module.width = hidden.shape[-1]
    return hidden / module.width


def _retains(_module, hidden):
    hidden.retain_grad()
    return hidden * hidden.data


EXACT = [
    lambda: Net(_retains),
    lambda: Net(_writes_before_it_reads),
    lambda: Net(_caches, cache=None),
    lambda: Net(_sets_a_constant),
    lambda: _with(lambda m: _doubled_backward(m.b)),
    lambda: _with(lambda m: m.b.register_full_backward_pre_hook(lambda _m, g: (2 * g[0],))),
    lambda: _with(lambda m: m.a.register_forward_hook(lambda _m, _x, y: 2 * y)),
    lambda: _with(
        lambda m: m.a.register_forward_hook(lambda _m, _x, _k, y: 2 * y, with_kwargs=True)
    ),
    lambda: _with(lambda m: m.a.register_forward_hook(lambda _m, _x, y: 2 * y, always_call=True)),
    lambda: _with(lambda m: m.b.register_forward_pre_hook(lambda _m, x: (2 * x[0],))),
    lambda: WithChild(_hook),
    lambda: WithChild(_shrinks_rows),
    lambda: _with(
        lambda m: m.child.register_forward_hook(lambda _m, _x, y: 2 * y),
        WithChild(lambda _module, hidden: hidden),
    ),
    lambda: _with(lambda m: parametrizations.weight_norm(m.a)),
    lambda: _with(lambda m: parametrizations.spectral_norm(m.a)),
    lambda: _with(lambda m: nn.utils.spectral_norm(m.a)),
    lambda: _with(lambda m: parametrize.register_parametrization(m.a, "weight", nn.Tanh())),
]


@pytest.mark.parametrize("make", EXACT, ids=range(len(EXACT)))
def test_what_is_captured_has_the_gradients_of_the_module(make):
    one = Subject(make().double(), {"x": X})
    found = one.run(one.one_device())
    alone = make().double()
    alone.load_state_dict(one.weights | one.buffers, strict=False)
    loss = alone(X)
    loss.backward()
    expected = {"loss": loss.detach()}
    expected |= {f"gradient of {key}": p.grad for key, p in alone.named_parameters()}
    expected |= {f"buffer {key}": alone.get_buffer(key) for key, _ in one.graph.updates}
    assert worst(expected, {key: found[key] for key in expected})[0] < 1e-12


def test_capture_leaves_python_state_as_it_was():
    model = Net(_caches, cache=None, log=[1])
    capture_call(model, (X.float(),))
    assert model.cache is None and model.log == [1]
    model = Net(_appends, log=[])
    with pytest.raises(CaptureError):
        capture_call(model, (X.float(),))
    assert model.log == []


def test_a_model_on_the_meta_device_is_looked_at_too():
    with torch.device("meta"):
        model = _with(lambda m: _doubled_backward(m.b))
    with pytest.raises(ValueError, match=r"b .Linear. has a backward hook.*build the model with"):
        sw.capture(model, (X.float().to("meta"),))


@pytest.mark.hf
def test_a_mode_that_a_call_chooses_once_is_no_state_also_on_the_meta_device():
    """Hugging Face's classifiers note their `problem_type` in the first call, and no copy on the
    meta device can be called to see that the second does the same.
    """
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=20,
    )  # fmt: skip
    with torch.device("meta"):
        model = RobertaForSequenceClassification(config)
        ids, labels = torch.ones(4, 8, dtype=torch.long), torch.ones(4, dtype=torch.long)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    assert sw.capture(model, (), batch).outputs
