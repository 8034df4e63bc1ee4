"""What is read runs no code, and lies where the checkpoint says."""

import pickle
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from shardwright.train.checkpoint.digests import TENSORS
from shardwright.train.checkpoint.reading import (
    INDEX,
    CheckpointError,
    DamageError,
    SafeReader,
    read_digests,
    read_index,
)


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@pytest.fixture
def written(tmp_path):
    folder = tmp_path / "checkpoint"
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones((), dtype=torch.bfloat16)}
    dcp.save(state, checkpoint_id=folder)
    return folder


def sizes(folder):
    return {file.name: file.stat().st_size for file in folder.iterdir()}


def load(folder, state):
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(state, storage_reader=SafeReader(folder, sizes(folder)), planner=planner)


def rewrite(folder, change):
    with (folder / INDEX).open("rb") as file:
        index = pickle.load(file)
    change(index)
    (folder / INDEX).write_bytes(pickle.dumps(index))


def test_tensors_are_read(written):
    state = {"a": torch.zeros(2, 3), "b": torch.zeros((), dtype=torch.bfloat16)}
    load(written, state)
    assert state["a"].flatten().tolist() == list(range(6)) and state["b"] == 1


@pytest.mark.parametrize("text", [None, "", "[[", "3", '[["a", 0, 24]]', "[" * 100_000])
def test_digests_that_cannot_be_read_are_damage(tmp_path, text):
    if text is not None:
        (tmp_path / TENSORS).write_text(text)
    with pytest.raises(DamageError, match=f"{TENSORS} has no digests of tensors: "):
        read_digests(tmp_path)


class Poison:
    def __reduce__(self):
        return Path.touch, (Path("poisoned"),)


def poisoned_index(folder):
    (folder / INDEX).write_bytes(pickle.dumps(Poison()))


def poisoned_part(folder):
    rewrite(folder, lambda index: setattr(index, "planner_data", {"a": Poison()}))


def poisoned_value(folder):
    def change(index):
        index.state_dict_metadata["b"] = BytesStorageMetadata()

    rewrite(folder, change)


def elsewhere(name):
    def change(index):
        for key, at in index.storage_data.items():
            index.storage_data[key] = replace(at, relative_path=name)

    return lambda folder: rewrite(folder, change)


def beyond(folder):
    def change(index):
        for key, at in index.storage_data.items():
            index.storage_data[key] = replace(at, length=10**12)

    rewrite(folder, change)


@pytest.mark.parametrize(
    "damage, message",
    [
        (poisoned_index, "it names pathlib.*touch|it names builtins.getattr"),
        (poisoned_part, "it names pathlib.*touch|it names builtins.getattr"),
        (poisoned_value, "it names .*BytesStorageMetadata, which no checkpoint needs"),
        (elsewhere("../secret"), r"lies in '../secret', no file of it"),
        (elsewhere("/etc/passwd"), "lies in '/etc/passwd', no file of it"),
        (beyond, "lies beyond the end of"),
        (lambda folder: (folder / INDEX).write_bytes(b""), "is no index of a checkpoint"),
        (lambda folder: (folder / INDEX).write_bytes(pickle.dumps([1])), "it is a list"),
    ],
)
def test_what_is_no_index_of_tensors_is_refused(written, damage, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    damage(written)
    with pytest.raises(CheckpointError, match=message):
        read_index(written, sizes(written))
    with pytest.raises(dcp.CheckpointException):
        load(written, {"b": torch.zeros(())})
    assert not Path("poisoned").exists()


def test_a_poisoned_tensor_is_refused(written, tmp_path, monkeypatch):
    """Where a tensor should be lies a pickle of something else; the index does not say so."""
    monkeypatch.chdir(tmp_path)
    (file,) = written.glob("*.distcp")
    torch.save(Poison(), file)

    def change(index):
        for key, at in index.storage_data.items():
            index.storage_data[key] = replace(at, offset=0, length=file.stat().st_size)

    rewrite(written, change)
    with pytest.raises(dcp.CheckpointException, match="holds more than tensors"):
        load(written, {"a": torch.zeros(2, 3)})
    assert not Path("poisoned").exists()


def test_every_cut_of_an_index_is_refused(written):
    whole = (written / INDEX).read_bytes()
    for length in range(0, len(whole), 7):
        (written / INDEX).write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            read_index(written, sizes(written))
