"""Text that commands print fits a narrow terminal, and is as it was in a pipe."""

import io

import pytest
from rich.console import Console
from rich.progress import Progress

from shardwright.cli import console

FACT = "memory        14.8 GiB of 78.1 GiB, fits: gradients 8.46 GiB, workspace 2.32 GiB"


@pytest.fixture
def terminal(monkeypatch, capsys):
    def shown(columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr("sys.stdout.isatty", lambda: columns > 0, raising=False)
        console.say(FACT)
        print(console.wrapped("note: " + 30 * "words "))
        return capsys.readouterr().out.splitlines()

    return shown


def test_lines_follow_a_narrow_terminal(terminal):
    for columns in (40, 60, 79):
        lines = terminal(columns)
        assert max(map(len, lines)) <= columns
        assert lines[1].startswith(14 * " ") and lines[1][14] != " "


def test_facts_stay_one_line_in_a_pipe(terminal):
    lines = terminal(0)
    assert lines[0] == FACT
    assert 90 < max(map(len, lines[1:])) <= 100


def test_paragraphs_stay_short_on_a_wide_terminal(terminal):
    assert max(map(len, terminal(200)[1:])) <= 100


@pytest.mark.parametrize("done, says", [(None, ""), (0.25, "about 1:30 left"), (1.0, "")])
def test_the_time_left_follows_the_speed_so_far(done, says):
    now = [0.0]
    column = console.TimeLeftColumn()
    with Progress(column, console=Console(file=io.StringIO()), get_time=lambda: now[0]) as shown:
        task = shown.add_task("searching", total=None)
        if done is not None:
            shown.update(task, total=1.0, completed=0.0)
            for step in (10.0, 20.0, 30.0):
                now[0] = step
                shown.update(task, completed=done * step / 30)
        (row,) = shown.tasks
        assert str(column.render(row)) == says
