"""Safetensors files of `save_pretrained`; `tests/ranks/test_big_models.py` saves tiles."""

import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import shardwright as sw
from shardwright.runtime.weight_files import saving
from shardwright.runtime.weight_files.dcp_index import CheckpointError
from shardwright.runtime.weight_files.safetensors_paths import weight_files
from shardwright.runtime.weight_files.saving import save_sharded
from tests.harness.crash_disk import crash_disk
from tests.harness.ranks import run_ranks


def tensors():
    torch.manual_seed(0)
    return {
        "a": torch.randn(33, 5),
        "b": torch.randn(7).bfloat16(),
        "c": torch.tensor(3),
        "d": torch.randn(0, 4),
        "e": torch.rand(2, 3, 4) > 0.5,
        "f": torch.randn(6, 8).t(),
    }


@pytest.mark.parametrize("size, count", [(10**9, 1), (300, 2)])
def test_files_hold_the_tensors(size, count, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "CHUNK", 100)
    given = tensors()
    save_sharded(given, sorted(given), tmp_path / "new" / "folder", size)
    files = sorted((tmp_path / "new" / "folder").glob("*.safetensors"))
    assert len(files) == count
    found = {key: value for file in files for key, value in load_file(file).items()}
    assert found.keys() == given.keys()
    for key, value in given.items():
        assert found[key].dtype == value.dtype
        assert torch.equal(found[key], value)


def test_files_of_an_earlier_save_are_replaced(tmp_path):
    given = tensors()
    save_sharded(given, sorted(given), tmp_path, 300)
    save_sharded({"a": given["a"]}, ["a"], tmp_path, 10**9)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    save_sharded(given, sorted(given), tmp_path, 300)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in given.values())
    assert not (tmp_path / "model.safetensors").exists()


def read(folder):
    """The tensors that readers of the folder find."""
    return {k: v for file in weight_files(folder) for k, v in load_file(file).items()}


@pytest.mark.parametrize("before, after", [(1, 1), (1, 2), (2, 1), (2, 2), (2, 3)])
def test_after_a_power_cut_at_any_moment_the_old_or_the_new_weights_are_there(
    before, after, tmp_path
):
    """Old files were deleted before the new ones had their names."""
    sizes = {1: 10**9, 2: 300, 3: 200}
    folder = tmp_path / "weights"
    old = tensors()
    new = {key: value.logical_not() if key == "e" else value + 1 for key, value in old.items()}
    save_sharded(old, sorted(old), folder, sizes[before])
    save_sharded(old, sorted(old), folder, sizes[before])  # the second time the names are taken
    with crash_disk(folder) as disk:
        save_sharded(new, sorted(new), folder, sizes[after])
    found = []
    for moment, state in disk.after_crashes(tmp_path / "cut"):
        there = read(state)
        assert there.keys() == old.keys()
        is_new = torch.equal(there["a"], new["a"])
        want = new if is_new else old
        assert all(torch.equal(there[key], want[key]) for key in want)
        found.append((moment, is_new))
    assert {is_new for _, is_new in found} == {False, True}
    assert all(is_new for moment, is_new in found if moment == len(disk.states) - 1)
    assert len(list(folder.iterdir())) == after + (after > 1)


def test_a_key_that_no_rank_has_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no rank has all of b"):
        save_sharded({"a": torch.ones(2)}, ["a", "b"], tmp_path, 100)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write .*file.*choose another path"):
        save_sharded({"a": torch.ones(2)}, ["a"], tmp_path / "file", 100)


@pytest.mark.hf
def test_transformers_read_what_is_saved(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = LlamaConfig(
        **sizes, num_attention_heads=4, vocab_size=128, use_cache=False, tie_word_embeddings=True
    )
    ids = torch.arange(32).reshape(2, 16)
    batch = {"input_ids": ids, "labels": ids}
    with torch.device("meta"):
        graph = sw.capture(LlamaForCausalLM(config), kwargs=batch)
    plan = sw.search(graph, "1xcpu").fastest()
    torch.manual_seed(0)
    module = sw.parallelize(lambda: LlamaForCausalLM(config), plan)
    module.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len([*tmp_path.glob("model-*.safetensors")]) > 1
    torch.manual_seed(0)
    expected = LlamaForCausalLM(config).state_dict()
    found = LlamaForCausalLM.from_pretrained(tmp_path)
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert all(torch.equal(value, expected[key]) for key, value in found.state_dict().items())
    with torch.device("meta"):
        again = LlamaForCausalLM(config)
    loaded = sw.parallelize(again, plan, weights=tmp_path)
    assert all(torch.equal(v, expected[k]) for k, v in loaded.state_dict().items())
    assert torch.equal(loaded(**batch).detach(), module(**batch).detach())


def test_a_module_that_parallelize_did_not_make_is_not_saved(tmp_path):
    from shardwright.runtime.train_module import LastingModule

    with pytest.raises(CheckpointError, match="only modules that parallelize returned"):
        LastingModule().save_pretrained(tmp_path)
    assert isinstance(LastingModule(), nn.Module)


def _one_fails(folder):
    """What a rank says to a tensor that the second one cannot write."""
    weight = torch.ones(2, 2)
    try:
        save_sharded({"w": weight.to_sparse() if dist.get_rank() else weight}, ["w"], folder, 100)
    except CheckpointError as e:
        return str(e)
    return ""


@pytest.mark.ranks
def test_any_error_of_one_rank_is_raised_on_all(tmp_path):
    """The others waited for it."""
    told = run_ranks(2, _one_fails, tmp_path / "out", timeout=100)
    assert told[0] == told[1]
    assert "Error: " in told[0]
