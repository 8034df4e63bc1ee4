"""Causal attention over a split sequence equals one device, whatever lies between its layers."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwright as sw
from shardwright.program.plan_decoder import read_plan
from shardwright.rules.analysis import analyze
from shardwright.rules.placements import parse_tiling, tiling_text
from tests.harness import models
from tests.harness.causal_decoder import Decoder, Running, words
from tests.harness.ranks import run_ranks
from tests.ranks.test_random_tilings import TOLERANCE, Widened, error

pytestmark = pytest.mark.ranks

EVEN = 24  # as strategies ask for
CASES = {  # what is behind each layer, and the length of the sequence
    "even": (None, EVEN),
    "odd": (None, 23),
    "dropout": (nn.Dropout(0.5), EVEN),
    "running": (Running(), 21),
}
STRATEGIES = {
    2: ["cp=2", "cp=2 cp_style=all-gather", "cp=2 ac=full", "cp=2 mb=2"],
    3: ["cp=3", "cp=3 cp_style=all-gather"],
    4: ["cp=4", "cp=2 tp=2", "dp_shard=2 cp=2 ac=full"],
}


@pytest.mark.parametrize("world", STRATEGIES)
def test_sequences_in_zigzag_order_equal_one_device(world):
    subjects = {}
    for name, (between, length) in CASES.items():
        torch.manual_seed(0)
        model, batch = models.double(Decoder(between), words(4, length))
        one = Widened(model, batch)
        subjects[name] = one, one.run(one.one_device()), _decisions(model, one, world)
    run_ranks(world, _compare, subjects)


def _decisions(model, one, world):
    """Those of the strategies, made for a sequence that they cut evenly."""
    graph = sw.capture(model, (), words(4, EVEN))
    analysis = analyze(graph)
    found = {}
    for text in STRATEGIES[world]:
        decided = read_plan(sw.price(graph, f"{world}xcpu", text, "sgd"), graph, analysis)
        tilings = {
            name: parse_tiling(one.analysis.rules[name], tiling_text(tiling))
            for name, tiling in decided.tilings.items()
        }
        found[text] = replace(decided, tilings=tilings)
    return found


def _compare(subjects):
    for name, (one, serial, decisions) in subjects.items():
        for text, decided in decisions.items():
            mesh = decided.mesh
            device_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names)
            module = one.module(
                mesh,
                decided.tilings,
                decided.storage,
                device_mesh,
                decided.regathered,
                decided.segments,
                decided.micro_batches,
            )
            found = one.run(module)
            errors = {key: error(serial[key], found[key]) for key in serial}
            worst = max(errors, key=errors.get)
            assert len(errors) > 5 and errors[worst] <= TOLERANCE, (
                f"{name} under {text}: {worst} is {errors[worst]:.1e} off"
            )
