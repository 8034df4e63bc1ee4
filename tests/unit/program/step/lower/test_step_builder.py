"""When gradients of parameters are reduced."""

import pytest

import shardwright as sw
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.instructions import Backward, Transfer
from shardwright.program.step.lower.purposes import Purpose, purposes
from shardwright.program.step.lower.rank_steps import step_program
from shardwright.rules.analysis import analyze
from tests.harness import models

LAYERS = 3


@pytest.mark.parametrize("strategy", ["dp_replicate=4 zero=0", "dp_shard=4 reshard=off"])
def test_gradients_of_a_recomputed_layer_are_reduced_while_its_backward_pass_runs(strategy):
    """Its parameters are read before it, but each gradient is complete before the last one is."""
    model, batch = models.small_llama(LAYERS, 16, 4, 8, 16)
    graph = sw.capture(model, (), batch)
    analysis = analyze(graph)
    plan = sw.price(graph, "4xH100", f"{strategy} ac=full", "adamw")
    found = step_program(graph, analysis, read_plan(plan, graph, analysis), 0, ())
    purpose, made, waiting = purposes(found), {}, []
    for number, one in enumerate(found.instructions):
        if isinstance(one, Backward):
            made |= {name: number for name in one.made if name}
        elif isinstance(one, Transfer) and purpose.get(one.handle) is Purpose.GRADIENT:
            complete = max(made[part.value] for part in one.parts)
            between = found.instructions[complete + 1 : number]
            waiting.append(sum(isinstance(other, Backward) for other in between))
    assert len(waiting) > 3 * LAYERS
    assert not any(waiting)
