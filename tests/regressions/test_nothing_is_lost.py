"""A checkpoint that has its name is whole, and comes back as it was written, or is passed over.

The files of checkpoints were compared by size alone: a flipped bit, or a file of another step of
the same size, was trained on. Plans inside of them were not synced. Damaged checkpoints of later
steps counted among those to keep, so that after a resume the next one was deleted as it was saved.
Where all were damaged, training began anew and deleted them. Two runs could share a folder.
"""

import errno
import io
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from itertools import count, cycle, pairwise

import pytest
import torch

from shardwright.train.checkpoint.checkpoint import Checkpoints
from shardwright.train.checkpoint.folder import CheckpointFolder, sealed
from shardwright.train.checkpoint.reading import CheckpointError, SafeReader, read_digests
from tests.harness.crash_disk import crash_disk
from tests.unit.train.checkpoint.test_checkpoint import PLAN, Serial, job, losses, saving, start

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Checkpoints of steps 5 and 10, and the losses after each."""
    folder = tmp_path_factory.mktemp("runs") / "kept"
    torch.manual_seed(0)
    found = losses(start(Serial(), job()), 15, saving(folder))
    shutil.rmtree(folder / "step-00000015")
    return folder, found


@pytest.fixture
def runs(trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "runs")
    return tmp_path / "runs"


def resumed(folder):
    run = start(Serial(), job())
    saves = saving(folder)
    saved, wrong = saves.checkpoints.resume(run)
    return saved.step, wrong, losses(run, 15, saves)


FILES = [".metadata", "__0_0.distcp", "digests.json", "plan.json", "state.json"]


def test_these_are_all_files(trained):
    assert sorted(p.name for p in (trained[0] / "step-00000010").iterdir()) == FILES


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("part", (0.05, 0.35, 0.65, 0.95))
def test_a_flipped_bit_is_found_and_the_checkpoint_before_is_taken(name, part, trained, runs):
    file = runs / "step-00000010" / name
    data = bytearray(file.read_bytes())
    places = len(data) - 1
    if name == "__0_0.distcp":  # damage a tensor and no padding
        ends = [(offset, length) for _, offset, length in read_digests(file.parent)]
        offset, length = sorted(ends)[int(part * len(ends))]
        data[offset + length // 2] ^= 4
    else:
        data[int(part * places)] ^= 4
    file.write_bytes(data)
    step, (wrong,), after = resumed(runs)
    assert step == 5 and str(file) in wrong and "\n" not in wrong
    assert after == trained[1][5:]
    assert (runs / "step-00000010.damaged" / name).exists()


def test_a_shard_of_another_step_is_found(trained, runs):
    for name in ("__0_0.distcp", "digests.json"):
        shutil.copy(runs / "step-00000005" / name, runs / "step-00000010" / name)
    step, (wrong,), after = resumed(runs)
    assert step == 5 and "step-00000010" in wrong and after == trained[1][5:]


def test_bytes_without_digests_that_cannot_be_unpickled_are_damaged_too(runs, trained):
    """Checkpoints of 0.1.0 have none: the run ended where the unpickler did."""
    for folder in sorted(runs.glob("step-*")):
        record = json.loads((folder / "state.json").read_text())
        for name in ("digest", "digests"):
            del record[name]
        del record["files"]["digests.json"]
        (folder / "state.json").write_text(json.dumps({**record, "version": 1}))
    file = folder / "__0_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data.replace(b"PK\x03\x04", b"PK\xff\x04"))
    step, (wrong,), after = resumed(runs)
    assert step == 5 and str(file) in wrong and "is not what was written (" in wrong
    assert after == trained[1][5:]


@pytest.mark.parametrize("change", ["members", "state", "random"])
def test_a_record_of_something_else_is_one_line(change, runs):
    """It has a digest of its own, as one who writes a whole checkpoint would give it."""
    file = runs / "step-00000010" / "state.json"
    record = json.loads(file.read_text())
    del record["digest"]
    inner = record["optimizer"] if change in record["optimizer"] else record
    inner[change] = {"layer.weight": [[]], "layer.bias": "x"} if change == "state" else [2**70, -1]
    file.write_text(sealed(record))
    with pytest.raises(CheckpointError, match=r"^cannot go on from .*step-00000010: ") as refused:
        resumed(runs)
    assert "\n" not in str(refused.value)


def test_after_a_damaged_one_the_next_that_are_saved_stay(runs):
    (runs / "step-00000010" / "plan.json").write_text("")
    run = start(Serial(), job())
    checkpoints = Checkpoints(runs, PLAN, keep=1)
    checkpoints.resume(run)
    losses(run, 7)
    checkpoints.save(run)
    assert checkpoints.folder.names() == ["step-00000007"]


def test_where_no_checkpoint_is_whole_nothing_is_begun_anew(runs):
    for step in (5, 10):
        (runs / f"step-{step:08}" / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be read .*restore one, or"):
        Checkpoints(runs, PLAN).resume(start(Serial(), job()))
    assert sorted(p.name for p in runs.glob("step-*")) == ["step-00000005", "step-00000010"]


def _verified(folder):
    """The step of the latest checkpoint, all of which is what was written; None without one."""
    saved, _ = CheckpointFolder(folder).latest()
    if saved is None:
        return None
    digests = read_digests(saved.folder)
    reader = SafeReader(saved.folder, saved.sizes, digests)
    assert all(reader.tile(place, "a tensor") is not None for place in digests)
    return saved.step


def test_after_a_power_cut_at_any_moment_there_is_a_whole_checkpoint(tmp_path):
    """Also while the one before is deleted; and the new one lasts once `save` has returned."""
    runs = tmp_path / "runs"
    run = start(Serial(), job())
    losses(run, 1)
    checkpoints = Checkpoints(runs, PLAN, keep=1)
    checkpoints.save(run)
    losses(run, 2)
    with crash_disk(runs) as disk:
        checkpoints.save(run)
    assert len(disk.states) > 20
    found = [(moment, _verified(state)) for moment, state in disk.after_crashes(tmp_path / "cut")]
    assert {step for _, step in found} == {1, 2}
    assert found[-1] == (len(disk.states) - 1, 2)
    last = {step for moment, step in found if moment == len(disk.states) - 1}
    assert last == {2}
    assert all(a[0] <= b[0] for a, b in pairwise(found))


def test_a_power_cut_while_a_run_is_resumed_loses_no_checkpoint(runs, tmp_path):
    (runs / "step-00000010" / "plan.json").write_text("")
    (runs / "step-00000007.partial").mkdir()
    with crash_disk(runs) as disk:
        saved, _ = Checkpoints(runs, PLAN).resume(start(Serial(), job()))
    found = [_verified(state) for _, state in disk.after_crashes(tmp_path / "cut")]
    assert saved.step == 5 and len(found) > 2 and set(found) == {5}


def test_the_disk_forgets_what_is_not_synced(tmp_path, monkeypatch):
    """The test above can fail: without syncs there are moments with no whole checkpoint."""
    runs = tmp_path / "runs"
    run = start(Serial(), job())
    checkpoints = Checkpoints(runs, PLAN, keep=1)
    checkpoints.save(run)
    losses(run, 2)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    with crash_disk(runs) as disk:
        disk.synced = lambda path: None
        checkpoints.save(run)
    steps = [_verified(state) for _, state in disk.after_crashes(tmp_path / "cut")]
    assert None in steps


@contextmanager
def failing_at(number, error):
    """The file system refuses the call with this number of those that change it, and all later."""
    calls = count()

    def guarded(call, changes=lambda *args, **kwargs: True):
        def refused(*args, **kwargs):
            if changes(*args, **kwargs) and next(calls) >= number:
                raise OSError(error, os.strerror(error))
            return call(*args, **kwargs)

        return refused

    def writes(file, mode="r", *args, **kwargs):
        return not isinstance(file, int) and bool(set(mode) & set("wax+"))

    with pytest.MonkeyPatch.context() as patch:
        for name in ("rename", "replace", "mkdir", "fsync"):
            patch.setattr(os, name, guarded(getattr(os, name)))
        for name in ("builtins.open", "io.open"):
            patch.setattr(name, guarded(io.open, writes))
        yield


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_where_the_disk_fails_at_any_call_the_checkpoint_before_stays(error, tmp_path):
    """It is full, a quota is used up, it became read-only, or it breaks; later it works again."""
    run = start(Serial(), job())
    losses(run, 1)
    checkpoints = Checkpoints(tmp_path, PLAN, keep=1)
    checkpoints.save(run)
    losses(run, 2)
    for number in count():
        saved = True
        with failing_at(number, error):
            try:
                checkpoints.save(run)
            except CheckpointError as e:
                saved = False
                assert os.strerror(error) in str(e) and "\n" not in str(e)
        assert _verified(tmp_path) in ((2,) if saved else (1, 2))
        if saved:
            break
    assert number > 8
    again = Checkpoints(tmp_path, PLAN, keep=1)
    losses(run, 3)
    again.save(run)
    assert again.folder.names() == ["step-00000003"]


def test_a_clock_that_jumps_changes_nothing(trained, runs, monkeypatch):
    """Days ahead and years back, while a run is resumed, saves and waits for a lock."""
    times = cycle([4e9, 1.0, 2e9, 0.0])
    monkeypatch.setattr(time, "time", lambda: next(times))
    step, wrong, after = resumed(runs)
    assert (step, wrong, after) == (10, [], trained[1][10:])
    assert CheckpointFolder(runs).names()[0] == "step-00000015"


HOLDER = """
import sys
from tests.unit.train.checkpoint.test_checkpoint import PLAN
from shardwright.train.checkpoint.checkpoint import Checkpoints
Checkpoints(sys.argv[1], PLAN)
print("open", flush=True)
sys.stdin.read()
"""


def test_two_runs_do_not_share_a_folder(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout.readline() == "open\n"
        with pytest.raises(CheckpointError, match=rf"process {other.pid} on .* uses .*another"):
            Checkpoints(tmp_path, PLAN, patience=0.2)
        other.stdin.close()
    Checkpoints(tmp_path, PLAN)
    Checkpoints(tmp_path, PLAN)  # of the same process
