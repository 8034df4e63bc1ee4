"""Nothing that is read runs code, leaves its place or takes the memory: one clear line each.

Four kinds of files come from others: plans, machines, checkpoints and weights. Each is tried
with a pickle that would run code, a name that leads out of its folder, and as one that is too
large, empty, or cut short.
"""

import io
import json
import pickle
import random
import shutil
import struct
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from shardwright.ir.plan import PlanError
from shardwright.machine.files.loading import load_machine
from shardwright.machine.files.toml import to_toml
from shardwright.machine.model import MachineError
from shardwright.machine.presets import preset
from shardwright.plan_io.files import load_plan, save_plan
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.runtime.weight_files.saving import save_sharded
from shardwright.runtime.weight_files.tensor_files import open_files
from shardwright.train.checkpoint.checkpoint import Checkpoints
from shardwright.train.checkpoint.digests import digest_of_file
from shardwright.train.checkpoint.folder import RECORD, sealed
from shardwright.train.checkpoint.reading import INDEX, CheckpointError
from shardwright.train.job import Job
from shardwright.train.loop import start
from tests.harness import plans

HUGE = 2**40  # bytes, of holes
PLAN = plans.transformer()


class Poison:
    """Leaves a file behind where it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("poisoned"),)


POISON = pickle.dumps(Poison())


class Net(nn.Module):
    """Trained by hand, it is what a run needs of a parallel module."""

    known = (((), ()),)

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)

    def lasting_buffers(self):
        return {}

    def random_state(self):
        return 0, 0

    def set_random_state(self, state):
        del state


def started():
    job = Job(Net, {"x": torch.zeros(2, 3)}, lambda ps: torch.optim.SGD(ps, lr=0.1), [], 1)
    return start(Net(), job)


class PlanFile:
    error = PlanError

    def __init__(self, folder):
        self.file = folder / "plan.json"
        save_plan(PLAN, self.file)

    def read(self):
        return load_plan(self.file)


class MachineFile:
    error = MachineError

    def __init__(self, folder):
        self.file = folder / "machine.toml"
        self.file.write_text(to_toml(preset("2x8xA100")))

    def read(self):
        return load_machine(self.file)


class CheckpointFile:
    error = CheckpointError

    def __init__(self, folder):
        self.folder = folder
        checkpoints = Checkpoints(folder, PLAN)
        checkpoints.save(started())
        self.file = folder / "step-00000000" / INDEX
        self.record = self.file.with_name(RECORD)

    def read(self):
        """The only checkpoint there is."""
        saved, _ = Checkpoints(self.folder, PLAN).resume(started())
        return saved


class WeightsFile:
    error = CheckpointError

    def __init__(self, folder):
        from safetensors.torch import save_file

        self.file = folder / "model.safetensors"
        save_file(Net().state_dict(), self.file)

    def read(self):
        from shardwright.train.checkpoint.export import load_safetensors

        load_safetensors(Net(), self.file)
        return True


KINDS = {"plan": PlanFile, "machine": MachineFile, "checkpoint": CheckpointFile}
KINDS |= {"weights": WeightsFile}


def replaced(content):
    """Every file of the kind, in its place or, for a checkpoint, with its size in the record."""

    def change(kind):
        kind.file.write_bytes(content)
        _tell_size(kind)

    return change


def _tell_size(kind):
    """As someone would who writes a whole checkpoint of his own."""
    if isinstance(kind, CheckpointFile):
        record = json.loads(kind.record.read_text())
        del record["digest"]
        record["files"][kind.file.name] = kind.file.stat().st_size
        if kind.file.stat().st_size < HUGE:
            record["digests"][kind.file.name] = digest_of_file(kind.file)
        kind.record.write_text(sealed(record))


def cut(kind):
    replaced(kind.file.read_bytes()[: kind.file.stat().st_size // 2])(kind)


def grown(kind):
    with kind.file.open("r+b") as file:
        file.truncate(HUGE)
    _tell_size(kind)


DAMAGES = {
    "poisoned": replaced(POISON),
    "poisoned torch file": None,  # made below
    "empty": replaced(b""),
    "cut short": cut,
    "too large": grown,
    "binary": replaced(bytes(range(256))),
    "nested": replaced(b"a = " + b"[" * 10**5),
    "nested JSON": replaced(b'{"format": ' + b"[" * 10**5),
    "a number too long": replaced(b"format = " + b"1" * 10**4),
    "a large header": replaced(struct.pack("<Q", 2**62) + b"{}"),
}


def poisoned_torch_file(kind):
    written = io.BytesIO()
    torch.save(Poison(), written)
    replaced(written.getvalue())(kind)


DAMAGES["poisoned torch file"] = poisoned_torch_file


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def refused(kind):
    """The line that says why."""
    with pytest.raises(kind.error) as caught:
        kind.read()
    assert not Path("poisoned").exists()
    text = str(caught.value)
    assert text and "\n" not in text
    return text


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", KINDS)
def test_what_is_none_of_its_kind_is_refused_in_a_line_that_names_it(name, damage, tmp_path):
    kind = KINDS[name](tmp_path)
    assert kind.read()
    DAMAGES[damage](kind)
    assert str(kind.file) in refused(kind)


OUTSIDE = ["../outside", "/etc/passwd", "..", "a/../../outside"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("path", OUTSIDE)
def test_no_name_leads_out_of_a_checkpoint(path, tmp_path):
    kind = CheckpointFile(tmp_path)
    record = json.loads(kind.record.read_text())
    del record["digest"]
    kind.record.write_text(sealed({**record, "files": {**record["files"], path: 1}}))
    assert f"lists {path!r}, which is no plain file name" in refused(kind)


@pytest.mark.parametrize("path", OUTSIDE)
def test_names_in_plans_and_machines_are_names_and_open_nothing(path, tmp_path):
    """Their texts may say anything: no file but the one that is read is opened."""
    opened = []
    watching = True

    def watch(event, args):
        if watching and event in ("open", "os.listdir", "os.scandir", "exec", "import"):
            opened.append((event, args[0]))

    plan = json.loads(plan_to_json(PLAN))
    plan = json.loads(plan_to_json(PLAN).replace(json.dumps(plan["parameters"][0][0]), f'"{path}"'))
    plan |= {"name": path, "machine": path, "notes": [path]}
    plan["ops"][0][-4] = path
    Path("plan.json").write_text(json.dumps(plan))
    text = to_toml(preset("2xcpu")).replace('"2xcpu"', json.dumps(path))
    Path("machine.toml").write_text(text)
    assert load_plan("plan.json").machine == path and load_machine("machine.toml").name == path
    sys.addaudithook(watch)
    try:
        load_plan("plan.json")
        load_machine("machine.toml")
    finally:
        watching = False
    assert set(opened) == {("open", "plan.json"), ("open", "machine.toml")}


@pytest.mark.parametrize("path", OUTSIDE)
def test_names_of_weights_are_keys_and_nothing_else(path, tmp_path):
    from safetensors.torch import save_file

    kind = WeightsFile(tmp_path)
    save_file({path: torch.zeros(2)}, kind.file)
    assert f"{path} is in one of them only" in refused(kind)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["here", "model.safetensors"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["model.safetensors", "model.pt", "dcp", "several"])
def test_weights_with_other_bytes_are_tensors_or_one_line(kind, tmp_path):
    """Some ended in a KeyError, or in torch's advice, in bold, to load them without checks."""
    from safetensors.torch import save_file

    tensors = {"a": torch.randn(33, 5), "b": torch.randn(7).bfloat16(), "c": torch.tensor(3)}
    whole, changed = tmp_path / kind, tmp_path / f"changed_{kind}"
    if kind == "dcp":
        dcp.save(tensors, checkpoint_id=whole)
    elif kind == "several":
        save_sharded(tensors, list(tensors), whole, 300)
    else:
        (save_file if "safe" in kind else torch.save)(tensors, whole)
    draw, refusals = random.Random(0), []
    for _ in range(60):
        shutil.rmtree(changed, ignore_errors=True)
        (shutil.copytree if whole.is_dir() else shutil.copy)(whole, changed)
        file = draw.choice(sorted(changed.iterdir())) if changed.is_dir() else changed
        data = bytearray(file.read_bytes())
        for _ in range(draw.choice((1, 2, 5))):
            most = draw.choice((len(data), min(len(data), 300)))
            data[draw.randrange(most)] = draw.randrange(256)
        file.write_bytes(data[: draw.randrange(len(data))] if draw.random() < 0.2 else data)
        try:
            files = open_files(changed)
            for key, one in files.tensors.items():
                files.read(key, tuple((0, size) for size in one.shape))
        except CheckpointError as e:
            refusals.append(str(e))
    assert 20 < len(refusals) < 60
    assert not [t for t in refusals if "\n" in t or "weights_only" in t or len(t) > 600]
