"""A model whose blocks are traced once gives the graph that it gives when all are traced."""

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwright.tracing.capture import capture_call
from shardwright.tracing.export import export
from tests.harness import models

LAYERS, WIDTH = 5, 4


class Block(nn.Module):
    """Calls what it is told to, with itself."""

    def __init__(self, index, what):
        super().__init__()
        self.index, self.what = index, what
        self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)
        self.inner = nn.Sequential(nn.LayerNorm(WIDTH), nn.ReLU())
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, **given):
        return self.what(self, x, **given)

    def usual(self, x):
        return x + self.down(self.inner(x).matmul(self.up.weight.t()).relu())


class Stack(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, what, call=lambda model, block, x: block(x)):
        super().__init__()
        self.blocks = nn.ModuleList(Block(i, what) for i in range(LAYERS))
        self.first = nn.Parameter(torch.zeros(WIDTH))  # gradients pass every block alike
        self.call, self.notes = call, []

    def forward(self, x):
        x = x + self.first
        for block in self.blocks:
            x = self.call(self, block, x)
        return x.sum()


def _both(monkeypatch, model, *args, **kwargs):
    """Its graph with blocks traced once, that with all traced, and how many calls are copies."""
    copies = []

    def spied(program, placed):
        put(program, placed)
        copies.append(sum(place.traced_number != number for number, place in placed.items()))

    put = export.inline_calls
    with monkeypatch.context() as patch:
        patch.setattr(export, "inline_calls", spied)
        shared = capture_call(model, args, kwargs)
        patch.setattr(export, "_with_repeats", lambda *_: None)
        whole = capture_call(model, args, kwargs)
    assert shared.output_keys == whole.output_keys
    assert shared.constants.keys() == whole.constants.keys()
    return shared.graph, whole.graph, sum(copies)


def _check(monkeypatch, model, copies):
    shared, whole, count = _both(monkeypatch, model, torch.zeros(3, WIDTH, device="meta"))
    assert shared == whole
    assert count == copies


def _stack(*args):
    with torch.device("meta"):
        return Stack(*args)


def same(block, x):
    return block.usual(x)


def scaled_by_index(block, x):
    return block.usual(x) * block.index


def first_two_differ(block, x):
    return block.usual(x) + 1 if block.index < 2 else block.usual(x)


def every_other(block, x):
    return block.usual(x).roll(2 if block.index % 2 else 1, 0)


def sign_of_zero(block, x):
    return block.usual(x) * (0.0 if block.index < 3 else -0.0)


def another_line(block, x):
    if block.index > 2:
        return block.usual(x) * 2
    return block.usual(x) * 2


def drops(block, x):
    return F.dropout(block.usual(F.dropout(x, 0.1)), 0.2)


def constant(block, x):
    return block.usual(x) * torch.tensor([2.0, 3.0, 5.0, 7.0], device=x.device)


def no_grad_inside(block, x):
    with torch.no_grad():
        weight = x.sigmoid()
    return block.usual(x) * weight


def autocast_later(block, x):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=block.index > 2):
        return block.usual(x)


def inner_by_index(block, x):
    return block.inner[1 if block.index == 4 else 0](block.usual(x)) + block.inner[0](x)


def writes_a_buffer(block, x):
    block.seen.add_(1)
    return block.usual(x) * block.seen


def assigns_a_buffer(block, x):
    block.seen = block.seen + 1
    return block.usual(x) * block.seen


def writes_what_it_made(block, x):
    y = block.usual(x)
    y[:, 0] = 0
    return y


def inverts_an_order(block, x):
    order = block.usual(x).sum(0).argsort()
    back = torch.empty_like(order)
    back[order] = torch.arange(WIDTH, device=x.device)
    return block.usual(x)[:, back]


def divides_what_it_made(block, x):
    weights, _ = block.usual(x).softmax(-1).topk(WIDTH)
    weights /= weights.sum(-1, keepdim=True)
    return weights


def divides_what_it_was_given(block, x):
    y = x.contiguous()
    y /= 2
    return block.usual(y)


def writes_elsewhere_by_index(block, x):
    made = x.new_zeros(WIDTH)
    made[1 if block.index > 2 else 0] = 1.0
    return block.usual(x) * made


def writes_to_a_view_of_what_it_made(block, x):
    made = x.new_zeros(2, WIDTH)
    made[0].fill_(1.0)
    return block.usual(x) * made.sum(0)


def checkpointed(block, x):
    return checkpoint(block.usual, x, use_reentrant=False)


def nothing_to_do(block, x):
    return block.usual(x.to(x.dtype).contiguous()).to(x.dtype) + x


def view(block, x):
    return block.usual(x).unsqueeze(0)[0].t().t()


@pytest.mark.parametrize(
    "what, copies",
    [
        (same, 4),
        (scaled_by_index, 0),
        (first_two_differ, 3),
        (every_other, 3),
        (sign_of_zero, 3),
        (another_line, 3),
        (drops, 4),
        (constant, 4),
        (no_grad_inside, 0),
        (autocast_later, 0),
        (inner_by_index, 3),
        (writes_a_buffer, 0),
        (assigns_a_buffer, 0),
        (writes_what_it_made, 4),
        (inverts_an_order, 4),
        (divides_what_it_made, 4),
        (divides_what_it_was_given, 0),
        (writes_elsewhere_by_index, 3),
        (writes_to_a_view_of_what_it_made, 0),
        (checkpointed, 4),
        (nothing_to_do, 4),
        (view, 4),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_a_block_does_is_seen(monkeypatch, what, copies):
    _check(monkeypatch, _stack(what), copies)


def takes_turns(block, x, model):
    model.turn += 1
    return block.usual(x) * (1 + model.turn % 2)


def counts_turns(model, block, x):
    if block.index == 0:
        model.turn = 0
    return block(x, model=model)


def twice(model, block, x):
    return block(block(x))


def returns_a_tuple(block, x):
    return block.usual(x), None, (x.detach(), [x * 2])


def takes_a_tuple(model, block, x):
    y, none, (z, (w,)) = block(x)
    assert none is None
    return y + z + w


class Output(OrderedDict):
    """As those of Hugging Face."""


def returns_a_dict(block, x):
    return Output(hidden=block.usual(x), given=x, number=3)


def takes_a_dict(model, block, x):
    found = block(x)
    assert type(found) is Output
    return found["hidden"] * found["number"] + found["given"]


def keeps(block, x, notes):
    if block.index == 0:
        notes.clear()
    notes.append(x * 2)
    return block.usual(x)


def does_not_read(model, block, x):
    return block(x, notes=model.notes)


def reads(model, block, x):
    return block(x, notes=model.notes) + model.notes[-1]


def keeps_itself(block, x):
    block.kept = x.exp()
    return block.usual(x)


def reads_the_kept(model, block, x):
    return block(x) + block.kept


def reads_from_outside(block, x, model):
    return block.usual(x) * model.blocks[0].up.bias.sum()


def gives_the_model(model, block, x):
    return block(x, model=model)


def with_a_mask(block, x, mask):
    mask = mask.to(torch.float32)
    return block.usual(x) * mask, mask


def gives_a_mask(model, block, x):
    if block.index == 0:
        model.mask = x.detach().relu()
    x, model.mask = block(x, mask=model.mask)
    return x


def from_two_lines(model, block, x):
    if block.index % 2:
        return block(x)
    return block(x).relu()


def writes_afterwards(model, block, x):
    y = block(x)
    y[0] = 1
    return y


def no_grad_around(model, block, x):
    with torch.no_grad():
        return block(x)


def checkpoints(model, block, x):
    return checkpoint(block, x, use_reentrant=False)


@pytest.mark.parametrize(
    "what, call, copies",
    [
        (same, twice, 9),
        (takes_turns, counts_turns, 3),
        (returns_a_tuple, takes_a_tuple, 4),
        (returns_a_dict, takes_a_dict, 4),
        (keeps, does_not_read, 0),
        (keeps, reads, 0),
        (keeps_itself, reads_the_kept, 0),
        (reads_from_outside, gives_the_model, 0),
        (with_a_mask, gives_a_mask, 4),
        (same, from_two_lines, 4),
        (same, writes_afterwards, 4),
        (same, no_grad_around, 0),
        (same, checkpoints, 4),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_goes_in_and_out_is_seen(monkeypatch, what, call, copies):
    _check(monkeypatch, _stack(what, call), copies)


def _ties_across(blocks):
    blocks[3].up.weight = blocks[1].up.weight


def _ties_inside(blocks):
    for block in blocks:
        block.twin = nn.Linear(WIDTH, 6, device="meta")
    blocks[2].twin.weight = blocks[2].up.weight


def _freezes(blocks):
    blocks[0].requires_grad_(False)


def _shares_a_module(blocks):
    blocks[1].up = blocks[0].up


@pytest.mark.parametrize(
    "change, copies",
    [(_ties_across, 4), (_ties_inside, 3), (_freezes, 3), (_shares_a_module, 0)],
)
def test_which_weights_they_are_is_seen(monkeypatch, change, copies):
    model = _stack(same)
    change(model.blocks)
    _check(monkeypatch, model, copies)


class OfTorch(nn.Module):
    """Blocks of torch's own, whose operators come from this model's lines."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.TransformerEncoderLayer(8, 2, 8) for _ in range(3))

    def forward(self, x):
        x = self.a(x)
        x = self.b(x)
        return self.c(x).sum()


def test_operators_of_torchs_own_blocks_come_from_the_lines_that_call_them(monkeypatch):
    with torch.device("meta"):
        model = OfTorch()
    shared, whole, copies = _both(monkeypatch, model, torch.zeros(3, 2, 8, device="meta"))
    assert shared == whole
    assert copies == 1  # the first takes what has no gradient


@pytest.mark.parametrize("make", [models.gpt2, models.llama])
def test_models_of_hugging_face_give_one_graph(monkeypatch, make):
    with torch.device("meta"):
        model, batch = make(layers=3)
    shared, whole, copies = _both(monkeypatch, model, **batch)
    assert shared == whole
    assert copies == 2


def test_weights_that_are_there_are_not_touched(monkeypatch):
    model = Stack(same)
    shared, whole, copies = _both(monkeypatch, model, torch.zeros(3, WIDTH))
    assert shared == whole
    assert copies == 0


def test_a_model_is_left_as_it_was():
    model = _stack(same)
    capture_call(model, (torch.zeros(3, WIDTH, device="meta"),))
    assert not any("forward" in vars(module) for module in model.modules())
