"""A constraint made the answer better: two `--forbid` gave Qwen3-235B a faster, smaller plan.

What is searched under constraints was no part of what is searched without, so plans were found that
the free search did not have, below its lower bounds. A constraint on one layer parted the run of
repeated layers, and the parts too short to be repeats were cut into other pieces to recompute. An
operator that could no longer follow another led a cluster of its own, in front of which values may
be redistributed. And readers that were left the same choices shared what they read.
"""

import pytest

import shardwright as sw
from shardwright.ir.layout import Mesh
from shardwright.ir.options.constraints import parse_constraints
from shardwright.machine.presets import preset
from shardwright.planner.space.constrain import NO_MARKS, Marks
from shardwright.planner.space_factory import SpaceFactory
from tests.harness.layered_graphs import residual_layers
from tests.harness.random_constraints import ROUNDING, Subject
from tests.zoo import ZOO

MACHINE, MESH = preset("8xH100"), Mesh.parse("dp=8")


def pieces(graph, *texts):
    """Operators of all copies, by what they are recomputed with."""
    marks = Marks.on(graph, parse_constraints(texts)) if texts else NO_MARKS
    sources = SpaceFactory(graph, marks, recompute=True)
    space, short = sources.space(MACHINE, MESH, "adamw", 1)
    return {
        op.name: len(space.recomputed.get(short.stands_for.get(op.name, op.name), ()))
        for op in graph.ops
    }


def test_constraints_have_no_say_in_what_may_be_recomputed():
    graph = residual_layers(7)
    free = pieces(graph)
    assert any(free.values())
    for texts in (
        ["forbid layers.3=*:batch"],
        ["forbid layers.1=*:features", "forbid layers.5.down.weight=*:S(0)"],
    ):
        assert pieces(graph, *texts) == free


@pytest.mark.parametrize(
    ("model", "mesh", "texts"),
    [
        ("vit", "dp=4 tp=2", ["forbid *.dropout=*:sequence"]),
        ("gpt2", "dp=4 tp=2", ["forbid transformer.h.*.mlp.act=dp:sequence"]),
    ],
)
def test_constraints_decide_nothing_apart_that_is_decided_together_without(model, mesh, texts):
    module, batch = ZOO[model]()
    one = Subject(sw.capture(module, (), batch))
    assert one.gain(MACHINE, Mesh.parse(mesh), texts) <= ROUNDING


def test_members_of_a_cluster_that_may_do_nothing_together_are_taken_apart():
    module, batch = ZOO["gpt2"]()
    texts = ["pin *.mlp.c_fc=dp:features", "pin *.mlp.act=dp:whole", "mesh dp=8"]
    found = sw.search(sw.capture(module, (), batch), MACHINE, constraints=texts)
    assert found.plans
