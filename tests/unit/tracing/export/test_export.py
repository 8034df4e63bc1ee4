"""What capture falls back to, and what it says where it cannot go on."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import rnn

from shardwright.tracing.call import CaptureError
from shardwright.tracing.capture import capture_call
from tests.zoo.subject import Subject


class Wrapped(nn.Module):
    """A linear layer, and a function of the module and of what the layer gives."""

    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("kept", torch.zeros(4))
        self.function = function

    def forward(self, x):
        return self.function(self, self.layer(x)).sum()


def _capture(function):
    return capture_call(Wrapped(function), (torch.ones(3, 4),)).graph


def _branches(_module, y):
    return y * 2 if y.sum() > 0 else y


def _takes_a_number(_module, y):
    return y * int(y.sum().item())


def _selects(_module, y):
    return y[y > 0]


def _finds(_module, y):
    return y[torch.nonzero(y)[:, 0]]


def _resizes(module, y):
    module.kept = torch.cat([module.kept, y.detach().sum(0)])
    return y


def _resizes_in_place(module, y):
    module.kept.resize_(8)
    return y


def _registers(module, y):
    if not hasattr(module, "late"):
        module.register_buffer("late", y.detach().mean(0))
    return y * module.late


def _drops(module, y):
    module.kept = None
    return y


def _deletes(module, y):
    del module.kept
    return y


class _WordsConfig:
    """A config without the token that a model starts with."""


def _reads_its_config(_module, y):
    return y * _WordsConfig().decoder_start_token_id


def _loops(_module, y):
    while y.sum() > 0:
        y = y - 1
    return y


def _uniques(_module, y):
    return torch.unique(y)


def _selects_masked(_module, y):
    return torch.masked_select(y, y > 0)


def _where_alone(_module, y):
    return y[torch.where(y[:, 0] > 0)]


def _repeats(_module, y):
    return torch.repeat_interleave(y, (y.sum(1) > 0).long() + 1, dim=0)


def _writes_where_data_say(module, y):
    module.kept[int(y.argmax())] = 1.0
    return y


@pytest.mark.parametrize(
    "function, words",
    [
        (_branches, r"test_export\.py:\d+ decides on the value of a tensor.*torch\.where"),
        (_takes_a_number, r"test_export\.py:\d+ decides on the value of a tensor"),
        (_selects, r"test_export\.py:\d+\): aten\.index\.Tensor gives .* as many as the data say"),
        (_finds, r"test_export\.py:\d+\): aten\.nonzero\.default gives .* as many as the data"),
        (_resizes, r"test_export\.py:\d+: .*buffer kept.*\(4,\).*\(8,\).*keep its shape"),
        (_resizes_in_place, r"test_export\.py:\d+: .*buffer kept.*\(4,\).*\(8,\).*keep its shape"),
        (_registers, r"test_export\.py:\d+: .*buffer late while it runs.*in __init__"),
        (_drops, r"test_export\.py:\d+: the model drops its buffer kept; keep it"),
        (_deletes, r"test_export\.py:\d+: the model drops its buffer kept; keep it"),
        (_reads_its_config, r"config decoder_start_token_id, as --set decoder_start_token_id=0"),
        (_loops, r"test_export\.py:\d+ decides on the value of a tensor"),
        (_uniques, r"test_export\.py:\d+\): aten\._unique2\.default gives .* as many as the data"),
        (_selects_masked, r"test_export\.py:\d+\): aten\.masked_select\.default gives .* as many"),
        (_finds, r"give torch\.nonzero_static a size"),
        (_where_alone, r"as many as the data say; torch\.where with one argument, and nonzero"),
        (_repeats, r"test_export\.py:\d+\): aten\.repeat.* data say; give .* output_size"),
        (_uniques, r"as many as the data say; give it a fixed size$"),
        (_writes_where_data_say, r"test_export\.py:\d+ decides on the value of a tensor"),
    ],
)
def test_an_error_says_where_and_what_to_do(function, words, capsys):
    with pytest.raises(CaptureError, match=words):
        _capture(function)
    assert capsys.readouterr() == ("", "")


class _Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x, lengths):
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0].sum()


class _Derived(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return torch.func.grad(lambda x: self.layer(x).sum())(x).square().mean()


class _Selected(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, label):
        chosen = label > 1
        return F.cross_entropy(self.layer(x)[chosen], label[chosen])


@pytest.mark.parametrize(
    "kind, shape, words",
    [
        (_Packed, (3, 3, 4), r"packed sequences depend on their lengths"),
        (_Derived, (3, 4), r"calls a transform of torch\.func"),
        (_Selected, (3, 4), r"decides on the value of a tensor"),
    ],
)
def test_an_error_inside_of_torch_says_where_and_what_to_do(kind, shape, words):
    lengths = () if kind is _Derived else (torch.tensor([2, 3, 1]),)
    x = torch.ones(shape)
    if kind is _Selected:  # with values, it is captured
        x, lengths = x.to("meta"), tuple(one.to("meta") for one in lengths)
    with pytest.raises(CaptureError, match=r"test_export\.py:\d+.*" + words):
        capture_call(kind(), (x, *lengths))


def _uses_numpy(_module, y):
    return y * torch.tanh(torch.from_numpy(y.detach().numpy()))


def test_strict_mode_takes_what_plain_tracing_cannot_and_says_so():
    graph = _capture(_uses_numpy)
    assert "tanh" in {op.kind for op in graph.ops}
    assert graph.note.startswith("captured in strict mode, since Wrapped cannot be captured")
    assert _capture(lambda _module, y: y).note == ""


def _assigns_a_buffer(module, y):
    module.kept = 0.9 * module.kept + y.detach().mean(0)
    return y


def test_a_buffer_that_is_assigned_is_updated():
    model = Wrapped(_assigns_a_buffer)
    one = Subject(model, {"x": torch.ones(3, 4)}, wide=False)
    assert [key for key, _ in one.graph.updates] == ["kept"]
    module = one.one_device()
    for _ in range(3):
        module(**one.batch)
        model(torch.ones(3, 4))
    torch.testing.assert_close(module.get_buffer("kept"), model.kept)


def _fills_part(module, y):
    z = torch.zeros_like(y)
    z[:, 1:] = y[:, :-1]
    return z


def test_gradients_flow_through_assignment_to_a_part():
    model = Wrapped(_fills_part)
    one = Subject(model, {"x": torch.ones(3, 4)}, wide=False)
    found = one.run(one.one_device())
    model(torch.ones(3, 4)).backward()
    torch.testing.assert_close(found["gradient of layer.weight"], model.layer.weight.grad)
