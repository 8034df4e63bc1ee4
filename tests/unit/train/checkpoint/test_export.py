"""Weights leave and come back under the model's own keys; other plans: tests/ranks."""

import json
import pickle
import struct
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.runtime.shape_variants import ShapeVariants
from shardwright.train.checkpoint.export import (
    check_export,
    export_pretrained,
    export_safetensors,
    load_safetensors,
    load_weights,
)
from shardwright.train.checkpoint.reading import CheckpointError
from shardwright.train.job import Job
from shardwright.train.targets.target import build_model


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
    module = ShapeVariants(model, plan, [])
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


def test_without_safetensors_it_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(CheckpointError, match=r"pip install 'shardwright\[hf\]'"):
        check_export(Net(), tmp_path / "model.safetensors")


def test_a_folder_of_several_files_is_read_and_nothing_outside_of_it(tmp_path):
    from safetensors.torch import save_file

    torch.manual_seed(1)
    model, other = Net(), Net()
    state = {k: v for k, v in model.state_dict().items() if k != "embed.weight"}  # the tied twin
    names = {key: f"model-{i % 2}.safetensors" for i, key in enumerate(state)}
    for file in set(names.values()):
        save_file({k: v.clone() for k, v in state.items() if names[k] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    load_weights(other, tmp_path)
    assert torch.equal(other.embed.weight, model.embed.weight)
    job = Job(Net, (torch.arange(6),), torch.optim.SGD, [], 1, weights=tmp_path)
    assert torch.equal(build_model(job).embed.weight, model.embed.weight)
    for name in ("../a.safetensors", "/etc/passwd", "..", "", 3):
        index.write_text(json.dumps({"weight_map": {"head.weight": name}}))
        with pytest.raises(CheckpointError, match="which is no plain file name"):
            load_weights(other, tmp_path)
    for text in ("", "[]", "{}", "[" * 100_000, '{"weight_map": 3}', '{"weight_map": {"a": []}}'):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=r"index\.json is no index"):
            load_weights(other, tmp_path)
    with index.open("w") as stream:
        stream.truncate(2**28 + 1)
    with pytest.raises(CheckpointError, match="268435457 bytes, at most"):
        load_weights(other, tmp_path)
    index.unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors"):
        load_weights(other, tmp_path)


@pytest.mark.hf
def test_a_hugging_face_folder_is_read_by_from_pretrained(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    ids = torch.arange(8).view(2, 4)
    batch = {"input_ids": ids, "labels": ids}
    plan = sw.plan(model, (), batch, machine=sw.Machine.preset("1xcpu"))
    module = ShapeVariants(model, plan, [])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    module.forward_backward(batch)
    optimizer.step()
    export_pretrained(module, model, tmp_path)
    again = GPT2LMHeadModel(model.config)
    model.save_pretrained(tmp_path / "small", max_shard_size="2KB")  # in several files
    assert (tmp_path / "small" / "model.safetensors.index.json").exists()
    load_weights(again, tmp_path / "small")
    assert torch.equal(again.transformer.wte.weight, model.transformer.wte.weight)
    load_weights(again, tmp_path)
    assert torch.equal(again.lm_head.weight, module.main.transformer.wte.weight.view(11, 8))
    found = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    module.train(False)
    with torch.no_grad():
        torch.testing.assert_close(found(**batch).loss, module.loss(batch), rtol=1e-6, atol=0)
