"""A constraint made the answer better: two `--forbid` gave Qwen3-235B a faster, smaller plan.

What is searched under constraints was no part of what is searched without. A constraint on one
layer parted the run of repeated layers, and the parts too short to be repeats were cut into other
pieces to recompute. So plans were found that the free search did not have, below its lower bounds.
"""

from shardwright.ir.constraints import parse_constraints
from shardwright.ir.layout import Mesh
from shardwright.ir.machine import Machine
from shardwright.search.constrain import NO_MARKS, Marks
from shardwright.search.sources import Sources
from tests.unit.search.layers import residual_layers

MACHINE, MESH = Machine.preset("8xH100"), Mesh.parse("dp=8")


def pieces(graph, *texts):
    """Operators of all copies, by what they are recomputed with."""
    marks = Marks.on(graph, parse_constraints(texts)) if texts else NO_MARKS
    sources = Sources(graph, marks, recompute=True)
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
