"""Weights in files: parts of tensors, keys of other names, and refusals before a tensor is read."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import shardwright as sw
from shardwright.ir.plan import PlanError
from shardwright.runtime.deferred.ranges import narrowed
from shardwright.runtime.weight_files import tensor_files
from shardwright.runtime.weight_files.dcp_index import CheckpointError
from shardwright.runtime.weight_files.stored_weights import StoredSources
from shardwright.runtime.weight_files.tensor_files import TensorFiles, open_files


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 6), nn.Linear(6, 40, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("table", torch.arange(6.0), persistent=False)

    def forward(self, x, y):
        hidden = self.norm(self.embed(x)) * self.table
        return nn.functional.cross_entropy(self.head(hidden), y)


BATCH = (torch.arange(10), torch.arange(10))


def state(seed=4):
    torch.manual_seed(seed)
    model = Model()
    model.norm.running_mean.normal_()
    return {k: v for k, v in model.state_dict().items() if k != "head.weight"}


def as_file(path, tensors):
    file = path / "weights.safetensors"
    save_file(tensors, file)
    return file


def as_folder(path, tensors):
    """As `save_pretrained` writes large models: several files and an index."""
    folder, index = path / "folder", {}
    folder.mkdir()
    for i, key in enumerate(tensors):
        index[key] = f"model-{i % 2}.safetensors"
    for name in set(index.values()):
        save_file({k: v for k, v in tensors.items() if index[k] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def as_torch_file(path, tensors):
    torch.save(tensors, path / "weights.pt")
    return path / "weights.pt"


def as_dcp(path, tensors):
    dcp.save(dict(tensors), checkpoint_id=path / "dcp", no_dist=True)
    return path / "dcp"


FORMS = [as_file, as_folder, as_torch_file, as_dcp]


def on_meta():
    with torch.device("meta"):
        return Model()


def sources(path, **how):
    return StoredSources(on_meta(), sw.StoredWeights(path, **how), None)


@pytest.mark.parametrize("form", FORMS)
def test_parts_of_tensors_are_those_that_were_stored(form, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "CHUNK", 100)  # bytes
    tensors = state()
    path = form(tmp_path, tensors)
    found, model = sources(path), on_meta()
    weight = tensors["embed.weight"]
    for tile in (((0, 40), (0, 6)), ((7, 33), (0, 6)), ((0, 40), (2, 5)), ((3, 4), (5, 6))):
        part = found.tile("head.weight", model.head.weight, tile)
        assert torch.equal(part, narrowed(weight, tile))
        assert part.untyped_storage().nbytes() == part.numel() * 4
    count = found.tile("norm.num_batches_tracked", model.norm.num_batches_tracked, ())
    assert torch.equal(count, tensors["norm.num_batches_tracked"])


@pytest.mark.parametrize("form", FORMS)
def test_a_model_starts_from_files(form, tmp_path):
    expected = state()
    path = form(tmp_path, expected)
    plan = sw.plan(Model(), BATCH, machine="1xcpu")
    for given in (Model, on_meta()):
        init = None if given is Model else {"init": lambda m: m.table.copy_(torch.arange(6.0))}
        module = sw.parallelize(given, plan, weights=path, **(init or {}))
        for key, value in expected.items():
            assert torch.equal(module.state_dict()[key], value)
        assert torch.equal(module.table, torch.arange(6.0))
    reference = Model()
    reference.load_state_dict({**expected, "head.weight": expected["embed.weight"]})
    assert torch.allclose(module(*BATCH), reference(*BATCH), rtol=1e-6)


def test_keys_and_orders_of_dimensions_differ(tmp_path):
    tensors = {f"model.{k}": v for k, v in state().items()}
    tensors["model.embed.weight"] = tensors["model.embed.weight"].t().contiguous()
    path = as_file(tmp_path, {**tensors, "step": torch.tensor(3)})

    def key(name):
        return (f"model.{name}", (1, 0)) if name == "embed.weight" else f"model.{name}"

    found = sources(path, keys=key, ignored=["st*"])
    part = found.tile("embed.weight", on_meta().embed.weight, ((3, 9), (1, 2)))
    assert torch.equal(part, state()["embed.weight"][3:9, 1:2])
    assert part.is_contiguous()
    names = {name: key(name) for name in state()}
    assert sources(path, keys=names, ignored=["step"]).digest({}) == found.digest({})


def test_16_bit_weights_are_widened(tmp_path):
    tensors = {k: v.bfloat16() if v.is_floating_point() else v for k, v in state().items()}
    found = sources(as_file(tmp_path, tensors))
    part = found.whole("embed.weight", on_meta().embed.weight)
    assert torch.equal(part, tensors["embed.weight"].float())


WRONG = [
    (lambda t: t.pop("norm.bias"), "it has no norm.bias; name keys"),
    (lambda t: [t.pop("norm.bias"), t.pop("norm.weight")], r"has no norm.weight \(2 such keys\)"),
    (lambda t: t.update(more=torch.ones(2)), "the model has not, more;"),
    (
        lambda t: t.update({"norm.bias": torch.ones(7)}),
        r"norm.bias has shape \(7,\); norm.bias of the model has \(6,\)",
    ),
    (
        lambda t: t.update({"norm.bias": torch.ones(6).double()}),
        r"norm.bias is torch.float64, and values of norm.bias would be rounded to torch.float32",
    ),
    (
        lambda t: t.update({"norm.num_batches_tracked": torch.tensor(1.5)}),
        "norm.num_batches_tracked is torch.float32, and values",
    ),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("change, wrong", WRONG, ids=range(len(WRONG)))
def test_another_model_is_refused_before_a_tensor_is_read(
    form, change, wrong, tmp_path, monkeypatch
):
    tensors = state()
    change(tensors)
    path = form(tmp_path, tensors)
    monkeypatch.setattr(TensorFiles, "read", None)
    with pytest.raises(CheckpointError, match=wrong):
        sources(path)


def test_an_order_that_is_none_is_refused(tmp_path):
    path = as_file(tmp_path, state())
    with pytest.raises(CheckpointError, match=r"read in the order \(0, 2\)"):
        sources(path, keys={"embed.weight": ("embed.weight", (0, 2))})


@pytest.mark.parametrize(
    "name, content, wrong",
    [
        ("x.safetensors", b"nothing", "is no safetensors file"),
        ("x.pt", b"nothing", "is no file of tensors that torch.save wrote"),
        ("missing.pt", None, "there is no"),
    ],
)
def test_files_that_are_none_are_refused(name, content, wrong, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=wrong):
        open_files(tmp_path / name)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors"):
        open_files(tmp_path)


def test_a_buffer_that_no_file_has_is_refused(tmp_path):
    path = as_file(tmp_path, state())
    plan = sw.plan(Model(), BATCH, machine="1xcpu")
    with pytest.raises(PlanError, match="nothing gives table of Model its values"):
        sw.parallelize(on_meta(), plan, weights=path)
    with pytest.raises(PlanError, match="weights is for modules on the meta device"):
        sw.parallelize(Model(), plan, weights=path)


def test_a_tied_tensor_has_the_same_values_under_all_its_keys(tmp_path):
    """Those of the first key were taken in silence."""
    tensors = state()
    tensors["head.weight"] = tensors["embed.weight"].clone()
    plan = sw.plan(Model(), BATCH, machine="1xcpu")
    module = sw.parallelize(Model, plan, weights=as_file(tmp_path, tensors))
    assert torch.equal(module.head.weight, tensors["embed.weight"])
    tensors["head.weight"][-1, -1] += 1
    with pytest.raises(CheckpointError, match=r"weight and head\.weight have other"):
        sw.parallelize(Model, plan, weights=as_file(tmp_path, tensors))
    without = sw.StoredWeights(as_file(tmp_path, tensors), ignored=["head.*"])
    module = sw.parallelize(Model, plan, weights=without)
    assert torch.equal(module.head.weight, tensors["embed.weight"])
