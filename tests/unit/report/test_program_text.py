"""Step programs as text: what repeats is printed once, and nothing is lost."""

import re
from dataclasses import replace

from shardwright.program.step.instructions import Free
from shardwright.program.step.optimize import optimized
from shardwright.report.program_text import program_diff, program_summary, program_text
from tests.unit.program.step.test_step_program import naive

TIMES = re.compile(r"( *)# the next (?:line|(\d+) lines) comes? (\d+) times in a row")


def counted(lines):
    """How many lines of the complete text the lines of a folded one are."""
    total, at = 0, 0
    while at < len(lines):
        found = TIMES.match(lines[at])
        at += 1
        if found is None:
            total += 1
            continue
        depth = len(found[1]) + 4
        end = at
        while end < len(lines) and lines[end].startswith(" " * depth):
            end += 1
        inner = counted(lines[at:end])
        assert inner == int(found[2] or 1)
        total += int(found[3]) * inner
        at = end
    return total


def test_micro_batches_are_printed_once_and_counted():
    program = optimized(naive("fully sharded", count=5))
    full, short = str(program).splitlines(), program_text(program).splitlines()
    assert len(short) < 0.7 * len(full)
    regions = [line for line in full if line.startswith(("region", "    "))]
    assert short[1 : 1 + len(regions)] == regions
    head = 1 + len(regions)
    assert counted(short[head:]) == len(full) - head
    assert program_text(program, full=True) == str(program)


def test_a_program_without_repetition_is_complete():
    program = naive("fully sharded", count=1)
    assert program_text(program) == str(program)


def test_runs_of_other_regions_are_not_taken_for_repetitions():
    program = naive("data parallel", count=1)
    names = [Free((f"x{i}",)) for i in range(9)]
    text = program_text(replace(program, instructions=tuple(names)))
    assert "# the next line comes 9 times in a row" in text
    run = next(one for one in program.instructions if hasattr(one, "region"))
    runs = [replace(run, region=i) for i in range(9)]
    assert "in a row" not in program_text(replace(program, instructions=tuple(runs)))


def test_differences_are_those_of_the_complete_texts():
    one, other = naive("fully sharded"), optimized(naive("fully sharded"))
    assert program_diff(one, one, ("a", "b")) == ""
    diff = program_diff(one, other, ("a", "b")).splitlines()
    assert diff[:2] == ["--- a", "+++ b"]
    less = [line for line in diff[2:] if line.startswith("-")]
    more = [line for line in diff[2:] if line.startswith("+")]
    lengths = [len(str(each).splitlines()) for each in (one, other)]
    assert lengths[0] - len(less) + len(more) == lengths[1]


def test_the_summary_counts_collectives():
    program = naive("data parallel", count=3)
    transfers = list(program.transfers())
    text = program_summary(program)
    assert text.startswith(f"{len(program.instructions)} instructions, ")
    assert f"{len(transfers)} all_reduce on dp" in text
    alone = replace(program, instructions=())
    assert program_summary(alone).endswith("regions; no collectives")
