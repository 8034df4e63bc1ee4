"""Which pipelines are tried, with searches of a mesh that only write down what they are asked."""

import math
from types import SimpleNamespace

import pytest

from shardwright.ir.layout import Mesh
from shardwright.planner.pipeline.pipeline_search import PipelineSearch
from shardwright.planner.pipeline.stage_assignment import NOTHING


class Loop:
    """A main loop whose fastest plan so far is on `fastest`, and whose pipelines are no gain."""

    def __init__(self, fastest, known=(), counts=None):
        self.machine = SimpleNamespace(devices=32)
        self.factory = SimpleNamespace(batch=32, possible=lambda counts: (counts, ()))
        self.options = SimpleNamespace(counts=counts, constraints=())
        self.fastest, self.found, self.best = {Mesh.parse(fastest): 1.0}, (), None
        self.knows = known.__contains__
        self.asked = []

    def pipe(self, mesh, groups, count, seconds, *, compare, schedule, each):
        self.asked.append((str(mesh), count, compare))
        return NOTHING


def asked(**given):
    loop = Loop("dp=2 tp=8", **given)
    PipelineSearch(loop, True, math.inf, lambda *_: None)._groups(2)
    return loop.asked


@pytest.mark.parametrize("counts, first", [((16, 32), 16), ((2, 4, 8, 16), 8), ((64,), 64)])
def test_a_pipeline_begins_with_enough_micro_batches_or_the_fewest_there_are(counts, first):
    search = PipelineSearch(Loop("dp=2"), True, math.inf, lambda *_: None)
    assert search._first(counts, Mesh.parse("dp=2"), 2) == first


def test_after_two_meshes_of_no_use_only_the_baseline_on_one_axis_is_missing():
    nearest = [("dp=2 tp=8", 8, False), ("dp=4 tp=4", 8, False)]
    assert asked() == [*nearest, ("dp=16", 2, True)]
    assert asked(known=("even pipeline",)) == nearest


def test_numbers_of_micro_batches_that_are_asked_for_are_all_tried():
    given = asked(known=("even pipeline",), counts=(2, 32))
    assert given == [(mesh, n, False) for mesh in ("dp=2 tp=8", "dp=4 tp=4") for n in (2, 32)]
