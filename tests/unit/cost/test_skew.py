from dataclasses import replace

import numpy as np
import pytest

from shardwright.cost.compute import operator_seconds
from shardwright.cost.meshless import Meshless
from shardwright.cost.skew import skewed, stretch
from shardwright.ir.machine import Machine
from tests.unit.cost.examples import linear_layer, toy_machine

APART = replace(toy_machine(), arrival_skew_seconds=0.5)


def test_a_wait_costs_more_by_the_root_of_what_is_computed_before_it():
    assert skewed(APART, lambda: 10e-3, 1).collective_launch_seconds == 2.0 + 0.5
    assert skewed(APART, lambda: 40e-3, 1).collective_launch_seconds == 2.0 + 1.0
    assert skewed(APART, lambda: 40e-3, 4).collective_launch_seconds == 2.0 + 0.5
    once = skewed(APART, lambda: 10e-3, 1)
    assert skewed(once, lambda: 10e-3, 1) == once  # and only once


def test_where_ranks_are_not_apart_nothing_is_asked():
    assert skewed(toy_machine(), pytest.fail, 1) == toy_machine()


def test_a_stretch_is_a_pass_of_a_contraction_and_what_goes_with_it():
    graph, analysis = linear_layer()
    machine = toy_machine()
    costs = Meshless(graph, analysis, machine)
    works = [costs.workload(op) for op in graph.ops]
    wholes = [np.array(work.sizes)[:, None] for work in works]
    each = [operator_seconds(*one, machine.device) for one in zip(works, wholes, strict=True)]
    total = float(sum(each)[0])
    assert stretch(graph, analysis, machine) == pytest.approx(total / 2)


def test_a_graph_without_contractions_is_one_stretch():
    graph, analysis = linear_layer()
    only = replace(graph, ops=graph.ops[1:])
    assert stretch(only, analysis, Machine.preset("2xcpu")) > 0
