"""Step programs as JSON: whatever is lowered comes back equal, and damage is one line."""

import json
import math

import pytest

import shardwright as sw
from shardwright.ir.graph import Op, Ref, Symbol
from shardwright.ir.layout import Mesh
from shardwright.program.instructions import Compute
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.lower.rank_steps import step_program
from shardwright.program.step.optimize import optimized
from shardwright.program.step.program_json import (
    ProgramError,
    program_content,
    program_from_json,
    program_to_json,
)
from shardwright.program.step.region import Region
from shardwright.program.step.step_program import StepProgram
from shardwright.rules.analysis import analyze
from tests.harness import models
from tests.unit.program.step.test_step_program import STRATEGIES, naive


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("make", [lambda program: program, optimized])
def test_programs_come_back_equal(strategy, make):
    program = make(naive(strategy, 0, 3))
    found = program_from_json(program_to_json(program))
    assert found == program
    assert str(found) == str(program)


@pytest.mark.parametrize("model", [models.gpt2, models.llama, models.mlp])
def test_programs_of_captured_models_come_back_equal(model):
    module, batch = model()
    graph = sw.capture(module, (), batch) if isinstance(batch, dict) else sw.capture(module, batch)
    analysis = analyze(graph)
    frontier = sw.search(graph, sw.Machine.preset("2xcpu"))
    for plan in (*frontier, *frontier.baselines):
        program = step_program(graph, analysis, read_plan(plan, graph, analysis), 1)
        assert program_from_json(program_to_json(program)) == program


def with_arguments(*arguments):
    """A program of one region with one operator that has these arguments."""
    op = Op("v0", "aten.f.default", arguments, (("key", arguments),), ("v0",))
    region = Region(((Compute(op, ((2,),)),),), (), ("v0",), (), (False,), ())
    return StepProgram(Mesh.parse("dp=2"), 0, (region,), (), (), (), (), (), (), (), ())


def test_every_kind_of_argument_comes_back():
    given = with_arguments(
        None,
        True,
        1,
        1.0,
        -math.inf,
        math.inf,
        "text",
        Ref("x"),
        Symbol("dtype", "float32"),
        ((), (1,)),
    )
    text = program_to_json(given)
    assert "Infinity" not in text, "strict readers of JSON refuse it"
    found = program_from_json(text)
    assert found == given
    ((one,),) = found.regions[0].variants
    assert [type(value) for value in one.op.args[1:4]] == [bool, int, float]
    assert math.isnan(
        program_from_json(program_to_json(with_arguments(math.nan)))
        .regions[0]
        .variants[0][0]
        .op.args[0]
    )


def changed(*path, value):
    """The JSON of a program with another value at `path`."""
    data = json.loads(program_to_json(naive("fully sharded")))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    "text, says",
    [
        ("{", "not JSON"),
        ("[]", "format number"),
        (json.dumps({"format": 99}), "reads up to 1"),
        (json.dumps({"format": 1}), "missing"),
        (changed("rank", value="0"), "'0' where a int is needed"),
        (changed("rank", value=True), "True where a int is needed"),
        (changed("mesh", value="dp"), "dp"),
        (changed("instructions", 0, "class", value="Sleep"), "'Sleep', not one of Forward"),
        (changed("instructions", 0, "extra", value=1), "the field 'extra'"),
        (changed("instructions", 2, "collective", value="telepathy"), "telepathy"),
        (changed("alone_bytes", value={}), "an object of class None, not one of"),
        (changed("outputs", value="out"), "where a list is needed"),
        (changed("inputs", 0, value=["x"]), "shorter"),
    ],
)
def test_damage_is_said_in_one_line(text, says):
    with pytest.raises(ProgramError, match=says):
        program_from_json(text)


def test_defaults_are_left_out():
    first = program_content(naive("data parallel"))["instructions"][0]
    assert first["class"] == "Forward" and "again" not in first
