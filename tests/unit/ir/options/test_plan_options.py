"""Options of a search: one place reads and checks them, and says their defaults."""

import inspect
import math
from dataclasses import fields

import pytest
import torch

import shardwright as sw
from shardwright.ir.layout import Mesh
from shardwright.ir.options.constraints import parse_constraints
from shardwright.ir.options.plan_options import DEFAULTS, OptionsError, PlanOptions


def test_texts_and_lists_are_read():
    found = PlanOptions.of(
        optimizer=torch.optim.SGD,
        constraints=["mesh dp=4"],
        meshes=[Mesh.parse("dp=4")],
        micro_batches=[1, 2],
        memory_limit="1GiB",
        stages=range(1, 3),
    )
    assert found == PlanOptions(
        optimizer="sgd",
        constraints=parse_constraints(["mesh dp=4"]),
        meshes=(Mesh.parse("dp=4"),),
        micro_batches=(1, 2),
        memory_limit=2**30,
        stages=(1, 2),
    )
    assert found.counts == (1, 2)
    assert PlanOptions.of(memory_limit="unlimited").memory_limit == "unlimited"
    assert PlanOptions.of(micro_batches="all").counts is None
    assert PlanOptions.of() == DEFAULTS and DEFAULTS.stages == "auto"


@pytest.mark.parametrize(
    "name, value",
    [
        ("method", "luck"),
        ("exact", 1),
        ("recompute", None),
        ("allow_async", "no"),
        ("micro_batches", "some"),
        ("micro_batches", ()),
        ("micro_batches", (True,)),
        ("seconds", math.nan),
        ("seconds", -1),
        ("processes", 0),
        ("processes", 1.5),
        ("processes", True),
    ],
)
def test_a_value_that_cannot_be_is_an_error_that_names_the_option(name, value):
    with pytest.raises(OptionsError, match=name):
        PlanOptions.of(**{name: value})


def test_a_name_that_is_no_option_is_an_error():
    with pytest.raises(TypeError, match="stage"):
        PlanOptions.of(stage=(1, 2))


@pytest.mark.parametrize("function", [sw.plan, sw.search])
def test_defaults_of_the_public_functions_are_those_of_the_options(function):
    defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    shared = [field.name for field in fields(PlanOptions) if field.name in defaults]
    assert {"optimizer", "constraints", "micro_batches", "memory_limit", "stages"} <= {*shared}
    assert {name: defaults[name] for name in shared} == {
        name: getattr(DEFAULTS, name) for name in shared
    }


def test_every_option_is_an_argument_of_search():
    own = {"whole"}  # which the command `frontier` asks for
    assert {field.name for field in fields(PlanOptions)} - own <= {
        *inspect.signature(sw.search).parameters
    }
