"""Casts of half-precision logits that a loss alone reads become part of the loss, no others."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright as sw
from shardwright.rules.operators.half_logits import CROSS_ENTROPY
from shardwright.tracing.capture import capture_call
from shardwright.tracing.export.operators import call_op

CLASSES, WIDTH = 11, 6
TORCH = "aten.cross_entropy_loss.default"


class Words(nn.Module):
    """A projection and a loss as models write it, in one of some forms."""

    def __init__(self, form, dtype=torch.bfloat16):
        super().__init__()
        self.form, self.head = form, nn.Linear(WIDTH, CLASSES, dtype=dtype)
        self.register_buffer("weight", torch.linspace(0.5, 2.0, CLASSES))

    def forward(self, x, labels):
        narrow = self.head(x)
        logits = narrow if self.form == "no cast" else narrow.float()
        loss = self.loss(logits, labels)
        return (loss, logits) if self.form == "returned" else loss

    def loss(self, logits, labels):
        flat, labels = logits.reshape(-1, CLASSES), labels.flatten()
        match self.form:
            case "shifted":
                shifted = logits[:, :-1, :].contiguous().view(-1, CLASSES)
                return F.cross_entropy(shifted, labels.view(3, 4)[:, 1:].flatten())
            case "in the middle":
                return F.cross_entropy(logits.transpose(0, 1).flatten(0, 1), labels)
            case "none":
                return F.cross_entropy(flat, labels, reduction="none", ignore_index=3).pow(2).sum()
            case "capped":
                return F.cross_entropy(5.0 * torch.tanh(flat / 5.0), labels)
            case "read twice":
                return F.cross_entropy(flat, labels) + flat.logsumexp(-1).pow(2).mean()
            case "smoothed":
                return F.cross_entropy(flat, labels, label_smoothing=0.1)
            case "weighted":
                return F.cross_entropy(flat, labels, self.weight)
            case "probabilities":
                return F.cross_entropy(flat, F.one_hot(labels, CLASSES).float())
            case "positions":
                return F.cross_entropy(logits.transpose(1, 2), labels.view(3, 4))
        return F.cross_entropy(flat, labels)


FUSED = ("plain", "shifted", "in the middle", "none")
OTHERS = ("no cast", "capped", "read twice", "smoothed", "weighted", "probabilities", "positions")


def _captured(form, dtype=torch.bfloat16, outputs="loss"):
    torch.manual_seed(0)
    model = Words(form, dtype)
    x = torch.randn(3, 4, WIDTH, dtype=dtype, requires_grad=True)
    labels = torch.randint(CLASSES, (3, 4))
    return model, (x, labels), capture_call(model, (x, labels), {}, outputs=outputs).graph


def _losses(graph):
    return [op.target for op in graph.ops if op.kind == "cross_entropy_loss"]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("form", FUSED)
def test_a_loss_reads_half_precision_logits_with_the_same_result(form, dtype):
    model, batch, graph = _captured(form, dtype)
    assert _losses(graph) == [CROSS_ENTROPY]
    assert all(t.dtype != "float32" or len(t.shape) < 2 for t in graph.values if t.requires_grad)
    (loss,) = (op for op in graph.ops if op.kind == "cross_entropy_loss")
    assert (loss.saves, loss.extra_saved) == (loss.operands, 0)
    assert graph.tensor[loss.outputs[0]].dtype == "float32"
    values = {"args.0": batch[0], "args.1": batch[1], **dict(model.named_parameters())}
    for op in graph.ops:
        made = call_op(op, {name: values[name] for name in op.operands}, torch.device("cpu"))
        values.update(zip(op.outputs, made, strict=True))
    found, expected = values[graph.outputs[0]], model(*batch)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    leaves = [batch[0], model.head.weight]
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves),
        torch.autograd.grad(expected, leaves),
        rtol=4 * torch.finfo(dtype).eps,
        atol=torch.finfo(dtype).eps / 8,
    )


@pytest.mark.parametrize("form", OTHERS)
def test_other_losses_stay_as_they_are(form):
    _, _, graph = _captured(form)
    assert _losses(graph) == [TORCH]
    (loss,) = (op for op in graph.ops if op.kind == "cross_entropy_loss")
    logits = graph.tensor[loss.operands[0]]
    assert logits.dtype == ("bfloat16" if form == "no cast" else "float32")


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_logits_that_are_not_in_half_precision_are_read_as_they_were(dtype):
    _, _, graph = _captured("plain", dtype)
    assert _losses(graph) == [TORCH]


def test_a_copy_that_is_returned_stays():
    assert _losses(_captured("returned", outputs="model")[2]) == [TORCH]


def test_a_model_keeps_its_casts_if_asked_in_the_graph_that_it_had():
    model, batch, _ = _captured("plain")
    kept, fused = (sw.capture(model, batch, logits=word) for word in ("model", "fused"))
    assert (_losses(kept), _losses(fused)) == ([TORCH], [CROSS_ENTROPY])
    model, batch, _ = _captured("no cast")
    kept, fused = (sw.capture(model, batch, logits=word) for word in ("model", "fused"))
    assert kept.numerics != fused.numerics
    assert kept.fingerprint == fused.fingerprint, "plans of earlier versions are for this graph"
    with pytest.raises(ValueError, match="logits='some' is not known; write logits='fused' or"):
        sw.capture(model, batch, logits="some")
