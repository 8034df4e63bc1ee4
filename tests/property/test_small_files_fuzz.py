"""Files and texts that are changed at random are read, or refused by the error of their reader.

Plan files, configs and configs of frameworks have tests of their own.
"""

import copy
import json
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwright.cli.errors import UsageError
from shardwright.cli.runs.run_output import read_run
from shardwright.ir.strategy.recompute import StrategyError
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.files.toml import parse_toml, to_toml
from shardwright.machine.model import Machine, MachineError
from shardwright.machine.presets import preset
from shardwright.program.step.optimize import optimized
from shardwright.program.step.program_json import (
    ProgramError,
    program_content,
    program_from_json,
    program_to_json,
)
from shardwright.runtime.weight_files.dcp_index import CheckpointError
from shardwright.runtime.weight_files.safetensors_paths import INDEX, weight_files
from shardwright.train.checkpoint.digests import TENSORS
from shardwright.train.checkpoint.folder import FORMAT, RECORD, read_record
from shardwright.train.checkpoint.reading import read_digests
from tests.unit.program.step.test_step_program import STRATEGIES, naive

SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
VALUES = st.sampled_from(
    (
        *(None, True, 0, -1, 2**62, 2**70, 10**400, 1.5, -1e-9, 1e308, float("nan")),
        *(float("inf"), "", "x", "\x1b[2J", "a\nb", "\u202e", "../x", "dp", "9" * 400, "nan"),
        *([], {}, [1], [[]], [[1, 2]], {"a": 1}),
    )
)
TOML = st.sampled_from(
    (
        *("0", "-1", "1e400", "nan", "inf", "-inf", "true", '""', '"x"', '"\\u001b[2J"', "[]"),
        *(
            "{}",
            "9" * 400,
            '"1e99 GB/s"',
            '"-3 GB/s"',
            "[[1, 2]]",
            '[["1FLOP", 2.0]]',
            "2020-01-01",
        ),
    )
)
PIECES = st.sampled_from(
    ("", " ", "=", "(", ")", "dp=0", "tp=-1", "mb=9999999999999999999", "ac=every(0)", "loss=x",
     "order=tp,tp", "\x1b", "\u202e", "pp=2", "schedule=zz", "fp8", "mlp=chunked(1)", "9" * 99)
)  # fmt: skip


class Damaged(NamedTuple):
    """A JSON file: where it lies, its content, its reader, and the error of the reader."""

    name: str
    content: object
    read: object
    error: type


FILES = {
    "output of a run": Damaged(
        "run.json",
        {
            "predicted_step_seconds": 0.5, "measured_step_seconds": 0.6,
            "predicted_peak_bytes": 10, "measured_peak_bytes": None,
            "measured_steps": [0.5, 0.7], "setup": {"plan": "a", "torch": "2"},
        },
        lambda folder: read_run(str(folder / "run.json")),
        UsageError,
    ),
    "index of weights": Damaged(
        INDEX,
        {"metadata": {"total_size": 8}, "weight_map": {"w": "a.safetensors", "b": "b.safetensors"}},
        weight_files,
        CheckpointError,
    ),
    "record of a checkpoint": Damaged(
        RECORD,
        {"format": FORMAT, "version": 1, "step": 5, "files": {"w": 3}, "data": {"at": [1, 2]}},
        read_record,
        CheckpointError,
    ),
    "digests of tensors": Damaged(
        TENSORS, [["w", 0, 8, "ab"], ["b", 8, 8, "cd"]], read_digests, CheckpointError
    ),
}  # fmt: skip


def paths(value, at=()):
    """The paths to all values inside of a JSON value."""
    yield at
    inside = dict(enumerate(value)) if isinstance(value, list) else value
    if isinstance(inside, dict):
        for key, one in inside.items():
            yield from paths(one, (*at, key))


@st.composite
def changed(draw, content):
    """A JSON value in which one to three values are others, or gone."""
    content = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, 3))):
        every = [path for path in paths(content) if path]
        if not every:
            return content
        *before, last = draw(st.sampled_from(every))
        inside = content
        for key in before:
            inside = inside[key]
        if draw(st.booleans()):
            inside[last] = copy.deepcopy(draw(VALUES))
        else:
            del inside[last]
    return content


@st.composite
def cut(draw, text):
    """A text from which a part is missing, or in which it occurs twice."""
    begin, end = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    return draw(st.sampled_from((text[:begin] + text[end:], text[:end] + text[begin:])))


@pytest.mark.parametrize("kind", FILES)
def test_damaged_files_are_read_or_refused(kind, tmp_path):
    one = FILES[kind]
    folder = tmp_path / "step-00000005"
    folder.mkdir()
    (folder / "w").write_bytes(b"abc")
    whole = json.dumps(one.content)
    (folder / one.name).write_text(whole)
    one.read(folder)

    @SETTINGS
    @given(changed(one.content).map(json.dumps) | cut(whole))
    def check(text):
        (folder / one.name).write_text(text)
        try:
            one.read(folder)
        except one.error as e:
            assert str(e)

    check()


def test_damaged_machine_files_are_read_or_refused():
    lines = to_toml(preset("8x8xH100")).splitlines()
    fields = [i for i, line in enumerate(lines) if "=" in line]

    @st.composite
    def text(draw):
        found = list(lines)
        for _ in range(draw(st.integers(1, 3))):
            at = draw(st.sampled_from(fields))
            name = found[at].partition("=")[0]
            found[at] = draw(st.sampled_from((f"{name}= {draw(TOML)}", "", f"{name}x = 1", name)))
        return "\n".join(found)

    @SETTINGS
    @given(text() | cut("\n".join(lines)))
    def check(given_text):
        try:
            machine = parse_toml(given_text)
        except MachineError as e:
            assert str(e)
        else:  # what is read can be written
            assert isinstance(machine, Machine) and parse_toml(to_toml(machine)) == machine

    check()


def test_damaged_programs_are_read_or_refused():
    program = optimized(naive(next(iter(STRATEGIES)), 0, 1))
    content = program_content(program)
    whole = program_to_json(program)

    @SETTINGS
    @given(changed(content).map(json.dumps) | cut(whole))
    def check(text):
        try:
            str(program_from_json(text))
        except ProgramError as e:
            assert str(e)

    check()


@SETTINGS
@given(st.data())
def test_damaged_strategies_are_read_or_refused(data):
    whole = "dp_replicate=2 dp_shard=4 tp=2 pp=2 mb=8 schedule=1F1B ac=every(2) loss=chunked(4)"
    words = whole.split(" ")
    for _ in range(data.draw(st.integers(1, 3))):
        words[data.draw(st.integers(0, len(words) - 1))] = data.draw(PIECES)
    text = data.draw(st.just(" ".join(words)) | cut(whole))
    try:
        found = Strategy.parse(text)
    except StrategyError as e:
        assert str(e)
    else:
        assert Strategy.parse(str(found)) == found
