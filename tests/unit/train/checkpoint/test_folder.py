"""Which checkpoints count: whole ones of ours, whatever else lies in the folder."""

import json
import os

import pytest

from shardwright.train.checkpoint.folder import RECORD, CheckpointFolder, read_record, sealed
from shardwright.train.checkpoint.lock import LOCK
from shardwright.train.checkpoint.reading import CheckpointError

FILES = ("data", ".metadata")


def save(folder, step, size=10):
    staging = folder.begin(step)
    for name in FILES:
        (staging / name).write_bytes(b"x" * size)
    return folder.finish(step, {"note": step})


@pytest.fixture
def folder(tmp_path):
    folder = CheckpointFolder(tmp_path / "runs", keep=2)
    folder.open()
    return folder


def test_the_last_ones_are_kept_and_the_latest_is_found(folder):
    for step in (5, 10, 100):
        save(folder, step)
    assert folder.names() == ["step-00000100", "step-00000010"]
    saved, wrong = folder.latest()
    assert (saved.step, saved.record["note"], wrong) == (100, 100, [])
    assert saved.sizes == {"data": 10, ".metadata": 10}


def test_an_empty_or_missing_folder_has_none(folder, tmp_path):
    assert folder.latest() == (None, [])
    assert CheckpointFolder(tmp_path / "nowhere").latest() == (None, [])


def test_what_is_not_complete_is_not_seen_and_goes(folder):
    save(folder, 1)
    (folder.begin(2) / "data").write_bytes(b"half")
    assert folder.latest()[0].step == 1
    folder.open()
    assert sorted(p.name for p in folder.path.iterdir()) == [LOCK, "step-00000001"]


def test_a_failure_between_any_two_calls_of_the_system_leaves_a_whole_checkpoint(folder):
    """`os` fails at its n-th call that changes anything, for every n until all is done."""
    save(folder, 1)
    for n in range(20):
        done = _fails_at(n, lambda: save(folder, 2))
        saved, wrong = folder.latest()
        assert saved.step in (1, 2) and not wrong
        if done:
            break
        folder.open()
    assert done and n > 3 and saved.step == 2


def _fails_at(n, do):
    calls = iter(range(100))

    def guarded(function):
        def call(*args, **kwargs):
            if next(calls) == n:
                raise OSError(28, "No space left on device")
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("rename", "fsync", "mkdir"):
            patch.setattr(os, name, guarded(getattr(os, name)))
        try:
            do()
        except OSError:
            return False
    return True


def _cut(path):
    (path / "data").write_bytes(b"x" * 9)


def _cut_index(path):
    (path / ".metadata").write_bytes(b"x" * 9)


def _grow(path):
    (path / "data").write_bytes(b"x" * 11)


def _remove(path):
    (path / "data").unlink()


def _link(path):
    (path / "data").rename(path.parent / "elsewhere")
    (path / "data").symlink_to(path.parent / "elsewhere")


def _record(**changes):
    def change(path):
        record = json.loads((path / RECORD).read_text())
        del record["digest"]
        (path / RECORD).write_text(sealed({**record, **changes}))

    return change


def _flip(name):
    """One bit is another, and the file as long as it was."""

    def change(path):
        data = bytearray((path / name).read_bytes())
        data[len(data) // 2] ^= 1
        (path / name).write_bytes(data)

    return change


def _text(text):
    return lambda path: (path / RECORD).write_text(text)


def _huge(path):
    with (path / RECORD).open("r+b") as file:
        file.truncate(2**28 + 1)  # of holes


@pytest.mark.parametrize(
    "damage, message",
    [
        (_cut, "data has 9 bytes, 10 were written"),
        (_cut_index, ".metadata has 9 bytes, 10 were written"),
        (_grow, "data has 11 bytes, 10 were written"),
        (_remove, "data is missing"),
        (_link, "data is no plain file"),
        (_text(""), "state.json is damaged"),
        (_text('{"format": "shardw'), "state.json is damaged"),
        (_text("[" * 100_000), "state.json is damaged"),
        (_text("{}"), "is no checkpoint of ours"),
        (_huge, "at most 268435456 are read"),
        (_flip("data"), "data is damaged: its digest is another"),
        (_flip(RECORD), "state.json is damaged"),
        (_record(digests=["data"]), "does not list the digests of its files"),
        (_record(digests={"../data": ""}), "does not list the digests of its files"),
        (_record(version=3), "has format 3, this version reads 2"),
        (_record(step=3), "is of step 3, its folder is called step-00000002"),
        (_record(files=["data"]), "does not list its files"),
        (_record(files={"../../step-00000001/data": 10}), "which is no plain file name"),
        (_record(files={"/etc/passwd": 1}), "which is no plain file name"),
        (_record(files={"..": 1}), "which is no plain file name"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_named(folder, damage, message):
    save(folder, 1)
    damage(save(folder, 2))
    saved, (wrong,) = folder.latest()
    assert saved.step == 1
    assert message in wrong


def test_a_folder_of_someone_else_is_no_checkpoint(folder):
    for name in ("step-00000009", "step-7", "step-00000008.partial.bak"):
        (folder.path / name).mkdir()
    assert folder.latest() == (
        None,
        [f"cannot read {folder.path / 'step-00000009' / RECORD}: No such file or directory"],
    )
    with pytest.raises(CheckpointError, match="No such file"):
        read_record(folder.path / "step-7")


def test_a_checkpoint_of_the_first_format_is_read(folder):
    """It has no digests."""
    file = save(folder, 1) / RECORD
    record = json.loads(file.read_text()) | {"version": 1}
    del record["digest"], record["digests"]
    file.write_text(json.dumps(record))
    (saved, wrong) = folder.latest()
    assert (saved.step, saved.has_digests, wrong) == (1, False, [])


def test_damaged_checkpoints_of_later_steps_are_set_aside(folder):
    """They counted among those to keep, so that the next one that was saved was deleted at once."""
    for step in (1, 2, 3):
        (folder.begin(step) / "data").write_bytes(b"x")
        CheckpointFolder(folder.path, keep=3).finish(step, {})
    folder.set_aside_after(1)
    save(folder, 2)
    assert folder.names() == ["step-00000002", "step-00000001"]
    assert (folder.path / "step-00000003.damaged" / "data").exists()


def test_a_step_may_be_saved_again_over_a_damaged_one(folder):
    _cut(save(folder, 4))
    save(folder, 4)
    assert folder.latest()[0].step == 4


def test_a_checkpoint_is_saved_although_an_older_one_cannot_be_deleted(folder, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError("a file of it is in use")

    for step in (1, 2):
        save(folder, step)
    monkeypatch.setattr(os, "rmdir", refuse)
    save(folder, 3)
    assert folder.names() == ["step-00000003", "step-00000002"]


def test_a_folder_that_cannot_be_made_is_a_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot use .*file.* give another folder"):
        CheckpointFolder(tmp_path / "file").open()
    with pytest.raises(CheckpointError, match="at least 1"):
        CheckpointFolder(tmp_path, keep=0)
