"""Files are written whole and last; what others wrote is read up to a size."""

import errno
import os

import pytest

from shardwright.ir.atomic_io import (
    FileSizeError,
    check_file,
    check_folder,
    read_text_up_to,
    replace_durably,
    write_atomically,
)
from tests.harness.crash_disk import crash_disk


def _by_hand(path, text):
    written = path.with_name("written")
    with open(written, "w") as file:
        file.write(text)
    replace_durably(written, path)


@pytest.mark.parametrize("write", [write_atomically, _by_hand])
def test_after_a_power_cut_at_any_moment_a_file_is_the_old_or_the_new_one(write, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_text("old")
    with crash_disk(folder) as disk:
        write(folder / "file", "new")
    found = [
        (moment, (state / "file").read_text())
        for moment, state in disk.after_crashes(tmp_path / "cut")
    ]
    assert {text for _, text in found} == {"old", "new"}
    assert {text for moment, text in found if moment == len(disk.states) - 1} == {"new"}
    assert os.listdir(folder) == ["file"]


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "file", "text")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error, raised", [(errno.EINVAL, False), (errno.EIO, True)])
def test_only_folders_of_systems_that_cannot_sync_them_are_not_synced(
    error, raised, tmp_path, monkeypatch
):
    real = os.fsync

    def fails(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(error, os.strerror(error))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fails)
    if raised:
        with pytest.raises(OSError, match=os.strerror(error)):
            write_atomically(tmp_path / "file", "text")
    else:
        write_atomically(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"


def test_places_that_cannot_be_written_are_refused_before(tmp_path):
    (tmp_path / "file").write_text("text")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(IsADirectoryError):
        check_file(tmp_path)
    with pytest.raises(OSError, match="no regular file"):
        check_file(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError):
        check_file(tmp_path / "new" / "file")
    check_file(tmp_path / "new" / "file", make_folder=True)
    check_file(tmp_path / "other")
    with pytest.raises(NotADirectoryError, match="is a file"):
        check_folder(tmp_path / "file" / "inner")
    assert sorted(os.listdir(tmp_path)) == ["file", "pipe"]


def test_no_more_than_a_size_is_read_and_no_pipe_is_waited_for(tmp_path):
    (tmp_path / "file").write_text("é" * 4)
    assert read_text_up_to(tmp_path / "file", 8) == "é" * 4
    with pytest.raises(FileSizeError, match="8 bytes, at most 7 are read"):
        read_text_up_to(tmp_path / "file", 7)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        read_text_up_to(tmp_path / "pipe", 7)
    with pytest.raises(OSError, match="a int is no path"):
        read_text_up_to(0, 7)
