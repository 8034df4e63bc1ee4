"""Constraints never make a search better; `scripts/campaign_constraints.py` tries more of them."""

from functools import cache
from random import Random

import pytest

import shardwright as sw
from shardwright.ir.options.constraints import ConstraintError
from shardwright.planner.meshes.meshes import meshes_of
from tests.harness.layered_graphs import residual_layers
from tests.harness.random_constraints import ROUNDING, Subject, below_bound
from tests.harness.rotation import rotating
from tests.zoo import ZOO

MACHINE = sw.Machine.preset("4xV100")
SEEDS = 12
CHOSEN = {"residual layers": (0, 1, 2, 22, 28, 185), "mlp-mixer": (0, 28, 108), "gpt2": (28,)}


@cache
def subject(name):
    if name == "residual layers":
        return Subject(residual_layers(7))
    module, batch = ZOO[name]()
    return Subject(sw.capture(module, (), batch))


@pytest.mark.parametrize("name", ["residual layers", "gpt2", "mlp-mixer", "mixtral", "resnet"])
def test_what_is_searched_under_constraints_is_part_of_what_is_searched_without(name):
    one, compared = subject(name), 0
    for seed in rotating(range(SEEDS), 2):
        random = Random(seed)
        texts, mesh = one.constraints(random), random.choice(list(meshes_of(MACHINE.devices)))
        try:
            gain = one.gain(MACHINE, mesh, texts)
        except ConstraintError:
            continue
        compared += gain is not None
        assert gain is None or gain <= ROUNDING, f"seed {seed}, {mesh}: {texts}"
    assert compared  # more than half of all seeds are


@pytest.mark.parametrize("name", ["residual layers", "mlp-mixer"])
def test_no_plan_under_constraints_is_below_the_bound_without(name):
    one, compared = subject(name), 0
    free = sw.search(one.graph, MACHINE)
    for seed in range(SEEDS // 3):
        texts = one.constraints(Random(seed))
        try:
            found = sw.search(one.graph, MACHINE, constraints=texts)
        except ConstraintError:
            continue
        compared += 1
        assert found.costs[0][0] >= free.costs[0][0] * (1 - ROUNDING), f"seed {seed}: {texts}"
        assert below_bound(free, found) <= ROUNDING, f"seed {seed}: {texts}"
    assert compared


def test_a_chosen_plan_under_constraints_is_within_the_gap_of_that_without():
    """The draws of these seeds have meshes, also of stages, caps, limits and stages."""
    small = Subject(residual_layers(3))
    subjects = {name: small if name == "residual layers" else subject(name) for name in CHOSEN}

    def question(case):
        name, seed = case
        return subjects[name].question(Random(seed), MACHINE)

    def kinds(case):
        texts, options = question(case)
        said = {text.split()[0] for text in texts} | set(options)
        return said | {f"{kind} of stages" for kind in said if "stages" in options}

    cases = rotating([(name, seed) for name in CHOSEN for seed in CHOSEN[name]], 4, kinds)
    for name, seed in cases:
        texts, options = question((name, seed))
        excess = subjects[name].excess(MACHINE, texts, options)
        assert excess is not None, f"{name}, seed {seed}: nothing to compare"
        assert excess <= ROUNDING, f"{name}, seed {seed}: {texts} {options}"
    drawn = {kind for case in cases for kind in kinds(case)}
    assert drawn >= {"pin", "forbid", "mesh", "mesh of stages", "cap", "stages", "part"}
