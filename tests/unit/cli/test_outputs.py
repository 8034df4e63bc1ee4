"""Paths that commands write to are checked while options are read, before any work.

`run --export` to a folder that cannot be made failed after training, `plan -o` after the search.
"""

import os

import click
import pytest

from shardwright.cli import main
from shardwright.cli.writing import OutputFile, OutputFileOrFolder, OutputFolder
from shardwright.ir.atomic_io import check_file, check_folder, write_atomically

OUTPUTS = [
    (command, option)
    for command in main.commands.values()
    for option in command.params
    if isinstance(option.type, OutputFile | OutputFolder | OutputFileOrFolder)
]


def test_every_option_that_is_written_to_is_checked():
    assert {(command.name, option.opts[-1]) for command, option in OUTPUTS} == {
        *((name, "--output") for name in ("plan", "frontier", "report", "simulate")),
        *((name, "--output") for name in ("export", "recost", "profile")),
        *((name, "--output") for name in ("price", "strategies", "audit", "report-measurement")),
        ("plan", "--config"),
        *(("run", name) for name in ("--export", "--trace", "--checkpoint", "--tensorboard")),
    }
    # Others that are paths are read.
    read = {
        (command.name, option.name)
        for command in main.commands.values()
        for option in command.params
        if type(option.type) is click.Path
    }
    assert {name for _, name in read} == {
        *("plan", "plans", "first", "second", "measured", "trace", "weights", "config", "run"),
    }


@pytest.mark.parametrize("command, option", OUTPUTS, ids=lambda x: getattr(x, "name", None))
def test_a_path_that_cannot_be_written_is_told_before_work(mistake, tmp_path, command, option):
    file = tmp_path / "file"
    file.touch()
    arguments = ["x" for p in command.params if isinstance(p, click.Argument) and p.required]
    for path in ("", file / "below" / "a.html", file / "below" / "a.safetensors"):
        line = mistake(command.name, *arguments, option.opts[-1], path)
        assert option.opts[-1] in line
        assert ("an empty path" if path == "" else f"cannot write {path}: ") in line
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    "command, option",
    [(c, o) for c, o in OUTPUTS if isinstance(o.type, OutputFile)],
    ids=lambda x: getattr(x, "name", None),
)
def test_a_file_needs_its_folder_and_is_none(mistake, tmp_path, command, option):
    arguments = ["x" for p in command.params if isinstance(p, click.Argument) and p.required]
    for path, why in ((tmp_path, "it is a folder"), (tmp_path / "no" / "file", "No such file")):
        assert why in mistake(command.name, *arguments, option.opts[-1], path)
    assert os.listdir(tmp_path) == []


def test_devices_and_pipes_are_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for write in (check_file, lambda path: write_atomically(path, "text")):
        with pytest.raises(OSError, match="it is no regular file"):
            write(pipe)
    assert os.listdir(tmp_path) == ["pipe"]


def test_what_can_be_written_is_left_as_it_is(tmp_path):
    file = tmp_path / "file"
    file.write_text("before")
    check_file(file)
    check_file(tmp_path / "new")
    check_file(tmp_path / "a" / "b" / "new", make_folder=True)
    check_folder(tmp_path / "a" / "b")
    check_folder(tmp_path)
    assert os.listdir(tmp_path) == ["file"]
    assert file.read_text() == "before"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path):
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o555)
    for check in (lambda: check_file(folder / "file"), lambda: check_folder(folder / "below")):
        with pytest.raises(PermissionError):
            check()
