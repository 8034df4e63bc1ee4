"""Stages: run one after the other they are the whole graph, whatever the cuts."""

import random
from itertools import pairwise

import pytest
import torch

from shardwright.ir.graph import Graph, Leaf, LeafKind, Op, Ref, Tensor
from shardwright.plan_io.graph_text import graph_from_json, graph_to_json
from shardwright.program.lower.balance import balanced_cuts, operator_work
from shardwright.program.lower.stages import StageError, split
from shardwright.rules.analysis import analyze
from shardwright.runtime.async_pipeline.simulation import AsyncSimulation
from shardwright.runtime.pipeline.stage import cut_stages
from shardwright.tracing.discovery.discover import capture_with_rules
from tests.harness.models import cnn, double, gpt2, mlp, traps, unet
from tests.harness.oracles import enumerate_cuts
from tests.zoo.subject import Subject

MODELS = {
    "gpt2": lambda: gpt2(layers=2),  # tied embeddings, dropout
    "cnn": lambda: cnn(norm=True),  # batch norm: buffers that are updated
    "unet": unet,  # skips
    "traps": traps,
    "mlp": mlp,
}


@pytest.fixture(scope="module", params=MODELS)
def subject(request):
    model, batch = MODELS[request.param]()
    found = Subject(model, batch)
    found.model = model
    return found


def run_stages(subject, cuts):
    """Loss, gradients and buffers of the stages run one after the other, as `Subject.run`'s."""
    stages = cut_stages(subject.captured, len(cuts) + 1, cuts)
    simulation = AsyncSimulation(stages, subject.model, "stale", nothing, seed=3)
    found = {"loss": simulation.train_step(subject.batch)}
    simulation.drain()
    for module in (stage.module for stage in simulation.stages):
        found |= {f"gradient of {k}": p.grad for k, p in module.named_parameters()}
        found |= {f"buffer {k}": module.get_buffer(k) for k, _ in module.stage.graph.updates}
    return found


def nothing(parameters):
    """An optimizer that changes no weight, also of a stage without any."""
    return torch.optim.SGD([*parameters, torch.nn.Parameter(torch.zeros(1))], lr=0.0)


def random_cuts(graph, seed):
    rng = random.Random(seed)
    while True:
        cuts = sorted(rng.sample(range(1, len(graph.ops)), rng.randint(1, 5)))
        try:
            split(graph, cuts)
        except StageError:
            continue
        return cuts


def test_stages_one_after_the_other_are_the_whole_graph(subject):
    whole = subject.run(subject.one_device())
    work = operator_work(subject.graph, subject.analysis)
    cuts = [balanced_cuts(subject.graph, n, work) for n in (1, 2)]
    for chosen in (*cuts, *(random_cuts(subject.graph, seed) for seed in range(3))):
        found = run_stages(subject, chosen)
        for key, value in found.items():
            expected = whole[key]
            if expected is None:
                assert value is None or not value.any(), (chosen, key)
            else:
                expected = expected.reshape(value.shape)
                # What is sent is contiguous, so that products may add up in another order.
                torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)
        assert {k for k in whole if not k.startswith("parameter")} == set(found)


def test_a_stage_is_a_graph_of_its_own(subject):
    first, second = split(subject.graph, random_cuts(subject.graph, 7)[:1])
    for stage in (first, second):
        analyze(stage.graph)
        assert graph_from_json(graph_to_json(stage.graph)) == stage.graph
    names = [subject.graph.fingerprint, first.graph.fingerprint, second.graph.fingerprint]
    assert len(set(names)) == 3


def test_a_tied_weight_lives_on_its_first_stage_and_is_handed_on():
    model, batch = gpt2(layers=2, dropout=0.0)
    graph = capture_with_rules(model, (), batch).graph
    stages = split(graph, balanced_cuts(graph, 3, operator_work(graph, analyze(graph))))
    tied = "transformer.wte.weight"
    lives = [tied in {x.name for x in s.graph.leaves_of(LeafKind.PARAMETER)} for s in stages]
    assert lives == [True, False, False]
    assert [tied in stage.received for stage in stages] == [False, True, True]


def test_masks_and_inputs_are_not_handed_on():
    model, batch = gpt2(layers=2)
    graph = capture_with_rules(model, (), batch).graph
    stages = split(graph, balanced_cuts(graph, 2, operator_work(graph, analyze(graph))))
    assert all(graph.tensor[name].requires_grad for name in stages[1].received)
    inputs = [
        {leaf.keys[0] for leaf in s.graph.leaves_of(LeafKind.INPUT) if leaf.name not in s.received}
        for s in stages
    ]
    assert inputs == [{"kwargs.input_ids"}, {"kwargs.labels"}]


def test_a_frozen_parameter_is_kept_wherever_it_is_read():
    model, batch = traps()
    model.embed.weight.requires_grad_(False)  # tied with the head
    graph = capture_with_rules(model, (), batch).graph
    cut = next(i for i, op in enumerate(graph.ops) if op.kind == "linear")
    first, second = split(graph, [cut])
    for stage in (first, second):
        assert "embed.weight" in {x.name for x in stage.graph.leaves_of(LeafKind.PARAMETER)}
    assert "embed.weight" not in second.received


def test_cuts_that_cannot_be_are_refused():
    model, batch = double(*mlp())
    graph = capture_with_rules(model, (), batch).graph
    with pytest.raises(StageError, match=r"cuts \[3, 3\] of \d+ operators must increase"):
        split(graph, [3, 3])
    (made,) = (i for i, op in enumerate(graph.ops) if op.outputs[0] == graph.updates[0][1])
    with pytest.raises(StageError, match="parts the buffer running"):
        split(graph, [made])
    split(graph, [made + 1])
    with pytest.raises(StageError, match="at most 2 that have parameters of their own"):
        balanced_cuts(graph, 3, operator_work(graph, analyze(graph)))
    with pytest.raises(StageError, match="0 stages were asked for"):
        balanced_cuts(graph, 0, operator_work(graph, analyze(graph)))


def random_graph(rng, length):
    """Operators that each read one or two earlier values; half of them have a parameter."""
    leaves = [Leaf("args.0", LeafKind.INPUT, ("args.0",))]
    values = [Tensor("args.0", (2,), "float32")]
    ops, sizes = [], [rng.randint(1, 9) for _ in range(length)]
    for i in range(length):
        operands = [f"y{rng.randrange(max(0, i - 3), i)}" if i else "args.0" for _ in range(2)]
        if rng.random() < 0.6 or i == 0:
            leaves.append(Leaf(f"w{i}", LeafKind.PARAMETER, (f"w{i}",)))
            values.append(Tensor(f"w{i}", (1,), "float32", requires_grad=True))
            operands.append(f"w{i}")
        refs = tuple(Ref(name) for name in operands)
        ops.append(Op(f"y{i}", "aten.stack.default", (refs,), (), (f"y{i}",)))
        values.append(Tensor(f"y{i}", (sizes[i],), "float32", requires_grad=True))
    return Graph(tuple(leaves), tuple(ops), (f"y{length - 1}",), tuple(values))


@pytest.mark.parametrize("seed", range(25))
def test_balanced_cuts_equal_enumeration(seed):
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(3, 9))
    work = [rng.randint(0, 20) for _ in graph.ops]
    for stages in (1, 2, 3, 4):
        expected = enumerate_cuts(graph, stages, work, slack=0.1)
        if expected is None:
            with pytest.raises(StageError):
                balanced_cuts(graph, stages, work)
            continue
        cuts = balanced_cuts(graph, stages, work)
        parts = split(graph, cuts)
        handed = sum(graph.tensor[name].bytes for part in parts for name in part.received)
        positions = (0, *cuts, len(graph.ops))
        loads = [sum(work[a:b]) for a, b in pairwise(positions)]
        assert (max(loads) <= expected["limit"], handed) == (True, expected["bytes"])
