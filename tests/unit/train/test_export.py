"""Weights leave and come back under the model's own keys; other plans: tests/ranks."""

import pickle
import struct
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.runtime.shapes import ManyShapes
from shardwright.train.export import export_pretrained, export_safetensors, load_safetensors
from shardwright.train.reading import CheckpointError


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.norm(self.embed(ids))).square().mean()


class Poison:
    def __reduce__(self):
        return Path.touch, (Path("poisoned"),)


def header(text, data=b""):
    return struct.pack("<Q", len(text)) + text.encode() + data


def test_one_device_gives_and_takes_the_models_own_keys(tmp_path):
    batch = (torch.arange(6),)
    model = Net()
    plan = sw.plan(model, batch, machine=sw.Machine.preset("1xcpu"), optimizer="sgd")
    module = ManyShapes(model, plan, [])
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module.forward_backward(batch)
    optimizer.step()
    export_safetensors(module, model, tmp_path / "new/model.safetensors")
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["model.safetensors"]
    other = Net()
    load_safetensors(other, tmp_path / "new/model.safetensors")
    assert other.head.weight is other.embed.weight
    assert not torch.equal(other.embed.weight, model.embed.weight)
    assert torch.equal(other.embed.weight, module.main.embed.weight)
    assert other.norm.num_batches_tracked == 1
    with pytest.raises(CheckpointError, match="Net is no Hugging Face model"):
        export_pretrained(module, model, tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot write .*choose another path"):
        export_safetensors(module, model, tmp_path / "new/model.safetensors/under")
    with pytest.raises(CheckpointError, match=r"has embed.weight of shape \(7, 6\), the model's"):
        load_safetensors(Net(5), tmp_path / "new/model.safetensors")
    with pytest.raises(CheckpointError, match=r"is of another model: .* is in one of them only"):
        load_safetensors(nn.Linear(2, 2), tmp_path / "new/model.safetensors")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        pickle.dumps(Poison()),
        struct.pack("<Q", 2**60) + b"{}",
        header("{}")[:-1],
        header('{"embed.weight": {"dtype": "F32", "shape": [7, 6], "data_offsets": [0, 168]}}'),
        header('{"a": {"dtype": "F32", "shape": [9999999999], "data_offsets": [0, 4]}}', b"\0" * 4),
        header('{"../../a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', b"\0" * 4),
    ],
)
def test_files_that_are_no_weights_are_refused(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_safetensors(Net(), "model.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    with pytest.raises(CheckpointError, match="cannot read nowhere"):
        load_safetensors(Net(), "nowhere")


@pytest.mark.hf
def test_a_hugging_face_folder_is_read_by_from_pretrained(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    ids = torch.arange(8).view(2, 4)
    batch = {"input_ids": ids, "labels": ids}
    plan = sw.plan(model, (), batch, machine=sw.Machine.preset("1xcpu"))
    module = ManyShapes(model, plan, [])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    module.forward_backward(batch)
    optimizer.step()
    export_pretrained(module, model, tmp_path)
    found = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    module.train(False)
    with torch.no_grad():
        torch.testing.assert_close(found(**batch).loss, module.loss(batch), rtol=1e-6, atol=0)
