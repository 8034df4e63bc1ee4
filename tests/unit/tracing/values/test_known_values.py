"""Sizes and decisions that come from the values of a call's inputs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright as sw
from shardwright.ir.graph import LeafKind, TensorValue
from shardwright.plan_io.graph_text import graph_from_json, graph_to_json
from shardwright.plan_io.plan_text import plan_from_json, plan_to_json
from shardwright.tracing.arguments import BatchError
from shardwright.tracing.call import CaptureError
from shardwright.tracing.capture import capture_call
from tests.harness.graph_comparison import compared
from tests.zoo.subject import Subject

WIDTH, IMAGE = 6, 9  # IMAGE stands for a row of an image in a text


class Pictures(nn.Module):
    """Rows of images of given sizes, each averaged in blocks, take the places of one token."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, WIDTH)
        self.rows, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, ids, patches, grid, labels):
        if (ids == IMAGE).sum() > 100:
            raise ValueError("too many images")
        found, spots = self.rows(patches), []
        for part, (height, width) in zip(found.split(grid.prod(-1).tolist()), grid, strict=True):
            ids_of = torch.arange(height * width, device=grid.device) % width
            mixed = part + self.words(ids_of)
            spots.append(mixed.view(height, width, WIDTH).mean(1))
        x = self.words(ids)
        mask = (ids == IMAGE).unsqueeze(-1)
        x = x.masked_scatter(mask.expand_as(x), torch.cat(spots))
        return F.cross_entropy(self.head(x.cumsum(1)).flatten(0, 1), labels.flatten())


def pictures():
    torch.manual_seed(0)
    ids = torch.tensor([[1, IMAGE, IMAGE, 2], [IMAGE, 3, 4, IMAGE], [5, 6, IMAGE, 7]])
    batch = {
        "ids": ids,
        "patches": torch.randn(11, 4),
        "grid": torch.tensor([[2, 2], [2, 3], [1, 1]]),
        "labels": ids.roll(-1, 1),
    }
    return Pictures(), batch


class Masked(nn.Module):
    """Selections by masks, of some and of all rows, a decision by data, and a masked loss."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask, real, targets):
        assert mask.dtype == torch.bool and mask.sum() > 0
        x = x[real.any(1)]
        if (targets < 0).all():
            x = 2 * x
        y = self.layer(x)
        y[mask] = y[mask] * 2.0
        if not torch.isfinite(y).all():
            y = torch.zeros_like(y)
        return F.mse_loss(y[mask], targets) + torch.masked_select(y[..., 0], ~mask).square().sum()


def masked():
    torch.manual_seed(0)
    mask = torch.tensor([[1, 0, 1, 0], [0, 1, 1, 0], [1, 1, 1, 0]], dtype=torch.bool)
    return Masked(), {
        "x": torch.randn(3, 4, WIDTH),
        "mask": mask,
        "real": torch.ones(3, 2, dtype=torch.int64),
        "targets": torch.randn(7, WIDTH),
    }


class Speech(nn.Module):
    """The CTC loss of labels of different lengths, selected as Hugging Face does."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x, labels):
        if labels.max() >= 5:
            raise ValueError("an unknown label")
        mask = labels >= 0
        log_probs = self.head(x).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((x.shape[0],), x.shape[1])
        return F.ctc_loss(log_probs, labels.masked_select(mask), lengths, mask.sum(-1), blank=0)


def speech():
    torch.manual_seed(0)
    labels = torch.tensor([[1, 2, -100], [3, -100, -100], [-100, 4, 1], [2, 3, 4]])
    return Speech(), {"x": torch.randn(4, 7, WIDTH), "labels": labels}


class Concatenated(nn.Module):
    """The CTC loss of concatenated labels, of texts whose lengths start each sample."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x, labels, lengths):
        log_probs = self.head(x).log_softmax(-1).transpose(0, 1)
        frames = torch.full((x.shape[0],), x.shape[1])
        return F.ctc_loss(log_probs, labels, frames, lengths, blank=0)


def concatenated():
    torch.manual_seed(0)
    labels, lengths = torch.tensor([1, 2, 3, 4, 1, 2, 3]), torch.tensor([2, 1, 3, 1])
    return Concatenated(), {"x": torch.randn(4, 7, WIDTH), "labels": labels, "lengths": lengths}


class Grouped(nn.Module):
    """Python reads the kinds of tokens that are no padding, as Qwen2-VL does."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, WIDTH)

    def forward(self, ids, kinds, padding):
        rows = []
        for row, kind, real in zip(self.words(ids), kinds, padding, strict=True):
            scales = [1.0 + one for one in kind[real.bool()].tolist()]
            rows.append((row[real.bool()] * torch.tensor(scales)[:, None]).sum(0))
        return torch.stack(rows).square().sum()


def grouped():
    torch.manual_seed(0)
    ids, padding = torch.arange(8).view(2, 4), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    return Grouped(), {"ids": ids, "kinds": ids % 3, "padding": padding}


class Padded(nn.Module):
    """Images of zeros are left out, and the others counted for each text, as in Idefics."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, images):
        real = (images == 0).sum(-1) != WIDTH
        if not any(real.flatten()):
            real[0, 0] = True
        parts = self.layer(images[real]).split(real.sum(1).tolist())
        return torch.stack([part.mean(0) for part in parts]).square().sum()


def padded():
    torch.manual_seed(0)
    return Padded(), {"images": torch.randn(3, 2, WIDTH)}


def test_counts_of_a_mask_are_those_of_the_example():
    model, batch = padded()
    module = sw.parallelize(model, sw.plan(model, (), batch, machine="1xcpu"))
    torch.testing.assert_close(module(**batch), model(**batch))
    other = batch["images"].clone()
    other[1, 1] = 0
    with pytest.raises(RuntimeError, match=r"elements of a mask|decides by a value of this batch"):
        module(other)
    other[0, 0], other[1, 1] = 0, 1  # compared with what the module computes, with one image less
    found = compared(model, {"images": other})
    assert found.ok, str(found)


MODELS = {
    "padded": padded,
    "concatenated": concatenated,
    "grouped": grouped,
    "pictures": pictures,
    "masked": masked,
    "speech": speech,
}


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_is_what_the_module_computes(name):
    model, batch = MODELS[name]()
    found = compared(model, batch)
    assert found.ok, str(found)


def test_inputs_that_sizes_depend_on_are_constants_and_others_are_not():
    model, batch = pictures()
    graph = capture_call(model, (), batch).graph
    grid = TensorValue("int64", (3, 2), (2, 2, 2, 3, 1, 1))
    assert dict(graph.constants) == {"kwargs.grid": grid}
    inputs = {leaf.keys[0] for leaf in graph.leaves_of(LeafKind.INPUT)}
    assert inputs == {"kwargs.ids", "kwargs.patches", "kwargs.labels"}
    assert "grid (" in graph.note and "test_known_values.py:" in graph.note
    assert graph_from_json(graph_to_json(graph)) == graph


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_captures_the_model_again_without_the_batch(name):
    model, batch = MODELS[name]()
    plan = sw.search(sw.capture(model, (), batch), "1xcpu").fastest("unlimited")
    found = sw.parallelize(model, plan_from_json(plan_to_json(plan)))(**batch)
    torch.testing.assert_close(found, model(**batch))


OTHERS = {
    "another grid": (
        "pictures",
        {"grid": torch.tensor([[2, 3], [2, 2], [1, 1]])},
        BatchError,
        r"argument grid is int64\[3, 2\] with other values .* sizes of the captured graph",
    ),
    "too many rows": (
        "pictures",
        {"ids": torch.full((3, 4), IMAGE)},
        RuntimeError,
        "12 elements of the mask .* rows for 5",
    ),
    "another count": (
        "masked",
        {"mask": torch.ones(3, 4, dtype=torch.bool)},
        RuntimeError,
        "12 elements of a mask .* made with 7",
    ),
    "a row that is left out": (
        "masked",
        {"real": torch.tensor([[1, 1], [0, 0], [1, 1]])},
        RuntimeError,
        "2 elements of a mask .* made with 3",
    ),
    "a check that fails": (
        "speech",
        {"labels": torch.full((4, 3), 7)},
        RuntimeError,
        r"the check of values at .*test_known_values.py:\d+ fails for this batch",
    ),
    "another decision": (
        "masked",
        {"targets": torch.full((7, WIDTH), -1.0)},
        RuntimeError,
        r"test_known_values.py:\d+ decides by a value of this batch otherwise",
    ),
    "not finite": (
        "masked",
        {"x": torch.full((3, 4, WIDTH), float("inf"))},
        RuntimeError,
        r"test_known_values.py:\d+ decides by a value of this batch otherwise",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_batch_with_other_sizes_is_refused(name):
    kind, change, error, message = OTHERS[name]
    subject = Subject(*MODELS[kind](), wide=False)
    with pytest.raises(error, match=message):
        subject.one_device()(**{**subject.batch, **change})


def test_a_batch_with_other_labels_is_computed():
    model, batch = speech()
    labels = torch.tensor([[1, -100, -100], [3, 2, 1], [4, 1, -100], [-100, -100, 2]])
    found = Subject(*speech(), wide=False).one_device()(**{**batch, "labels": labels})
    torch.testing.assert_close(found, model(**{**batch, "labels": labels}))


class ByWords(nn.Module):
    """As many steps as the largest of the words says, which differ from batch to batch."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, WIDTH)

    def forward(self, ids):
        x = self.words(ids)
        for number in ids.unique().tolist():
            x = x * number
        return x.sum()


def test_data_are_no_sizes():
    with pytest.raises(CaptureError, match="decides on the value of a tensor"):
        capture_call(ByWords(), (), {"ids": torch.tensor([[1, 2], [3, 4]])})


class InPlace(nn.Module):
    """Sizes that are overwritten through a view, by what a layer makes of data or by the data."""

    def __init__(self, known):
        super().__init__()
        self.known, self.layer = known, nn.Linear(2, 2)

    def forward(self, x, sizes):
        counts = sizes.clone()
        counts[:1].copy_((x if self.known else self.layer(x)).argmax(0)[:1] + 1)
        return self.layer(x)[: counts[0]].sum()


@pytest.mark.parametrize("known", [True, False])
def test_sizes_that_are_overwritten_are_those_of_what_is_written(known):
    batch = {"x": torch.randn(4, 2), "sizes": torch.tensor([3, 1])}
    with pytest.raises(CaptureError, match="takes a number out of a tensor"):
        capture_call(InPlace(known), (), batch)


class MaskedLosses(nn.Module):
    """Losses of selected elements only, of which every batch has another number."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 5)

    def forward(self, x, labels):
        y, mask = self.layer(x), labels > 1
        loss = F.cross_entropy(y[mask], labels[mask])
        return loss + y[mask].mean() + y[mask].sum()


def test_losses_of_selected_elements_take_any_number_of_them():
    torch.manual_seed(0)
    labels = torch.tensor([[0, 2, 3], [1, 4, 2]])
    batch = {"x": torch.randn(2, 3, WIDTH), "labels": labels}
    model = MaskedLosses()
    assert compared(model, batch).ok
    one = Subject(MaskedLosses(), batch, wide=False)
    other = {"x": batch["x"], "labels": torch.tensor([[0, 1, 1], [3, 4, 2]])}
    model.load_state_dict(one.weights)
    torch.testing.assert_close(one.one_device()(**other), model(**other))


def test_without_values_nothing_is_known():
    with torch.device("meta"):
        model, batch = pictures()
    with pytest.raises(CaptureError, match="decides on the value of a tensor"):
        capture_call(model, (), batch)


class Weighted(nn.Module):
    """The cross entropy of selected elements, with weights of classes."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 4.0]))

    def forward(self, x, labels, mask):
        return F.cross_entropy(self.head(x)[mask], labels[mask], weight=self.weight)


def test_weights_of_classes_stay_in_a_loss_of_selected_elements():
    """Whether any option was left was asked of a tensor, and the model was refused."""
    torch.manual_seed(0)
    model, mask = Weighted(), torch.tensor([[True, False, True], [False, True, True]])
    batch = {"x": torch.randn(2, 3, WIDTH), "labels": torch.tensor([[0, 1, 2], [1, 2, 0]])}
    plan = sw.plan(model, (), {**batch, "mask": mask}, machine="1xcpu")
    module = sw.parallelize(model, plan)
    for chosen in (mask, ~mask | mask.roll(1, 1)):  # also another number of elements
        torch.testing.assert_close(module(**batch, mask=chosen), model(**batch, mask=chosen))
