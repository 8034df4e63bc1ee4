"""Uniform strategies send what PyTorch's own composition of them sends, or less by a stated rule.

Gradients are those of one device on both sides. Rules for fewer bytes are in `expected`.
"""

import pytest
import torch

import shardwright as sw
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.presets import preset
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.instructions import Send
from shardwright.program.step.lower.plan_lowering import PlanLowering
from shardwright.rules.analysis import analyze
from tests.harness import torch_composition as composition
from tests.harness.ranks import run_ranks, whole

pytestmark = pytest.mark.ranks

TOLERANCE = 1e-12
CASES = {
    2: (
        "dp_shard=2",
        "dp_shard=2 reshard=off",
        "dp_shard=2 mb=2",
        "dp_shard=2 mb=2 sync=last",
        "dp_shard=2 mb=2 zero=1",
        "dp_shard=2 ac=full",
        "tp=2",
        "tp=2 sp=off",
        "tp=2 mb=2 sp=off",
        "pp=2 mb=2 cut=2,2",
    ),
    4: (
        "dp_replicate=2 dp_shard=2",
        "dp_shard=2 tp=2",
        "dp_shard=2 tp=2 sp=off ac=full",
        "pp=2 dp_shard=2 mb=2 cut=2,2 sync=last",
        "pp=2 tp=2 mb=2 cut=2,2 sp=off",
    ),
}


def both(text, graph_of):
    """Bytes of PyTorch's composition and of ours on this rank, and the worst gradient errors."""
    theirs, gradients = composition.trained(text)
    model, ids = composition.subject()
    serial, _ = composition.subject()
    serial(ids).backward()
    plan, program = graph_of[text]
    parallel = sw.parallelize(model, plan)
    parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.0), {"ids": ids})
    errors = {"theirs": 0.0, "ours": 0.0}
    ours = {
        name: whole(p.grad)
        for name, p in parallel.named_parameters()
        if p.grad is not None and p.numel()
    }
    for side, found in (("theirs", gradients), ("ours", ours)):
        for name, gradient in found.items():
            exact = serial.get_parameter(name).grad
            error = float((gradient - exact).abs().max() / exact.abs().max())
            errors[side] = max(errors[side], error)
    rank = torch.distributed.get_rank()
    return theirs, sent_by(program[rank]), errors


def sent_by(program):
    """Bytes of a step program by kind and axis."""
    found = {}
    for one in program.transfers():
        key = one.collective.value, one.channel.split(":")[0]
        found[key] = found.get(key, 0) + one.bytes
    for one in program.messages():
        if isinstance(one, Send):
            size = sum(torch.Size(part.shape).numel() * 8 for part in one.payload)
            found["send", "pp"] = found.get(("send", "pp"), 0) + size
    return found


def compare(cases):
    return {text: both(text, cases) for text in cases}


@pytest.mark.parametrize("world", CASES)
def test_strategies_send_what_torch_sends(world):
    model, ids = composition.subject()
    graph = sw.capture(model, (), {"ids": ids})
    analysis = analyze(graph)
    cases = {}
    for text in CASES[world]:
        plan = sw.price(graph, f"{world}xcpu", text, "sgd")
        alone = preset(f"{world}xcpu").backend_spec.alone_bytes
        lowering = PlanLowering(graph, analysis, read_plan(plan, graph, analysis), alone)
        cases[text] = plan, [lowering.program(rank) for rank in range(world)]
    for rank, found in enumerate(run_ranks(world, compare, cases)):
        assert found.keys() == set(CASES[world])
        for text, (theirs, ours, errors) in found.items():
            assert max(errors.values()) <= TOLERANCE, f"{text}: {errors}"
            strategy = Strategy.parse(text)
            last = rank // (world // strategy.pp) == strategy.pp - 1
            assert ours == expected(theirs, strategy, last=last), f"{text} on rank {rank}"


def expected(theirs, strategy, *, last):
    """Bytes that a rank, of the last stage or not, sends: PyTorch's, and what differs by a rule.

    * The loss is a number on every device: it is summed over each axis that splits it, once for
      each micro-batch, and over pipeline groups once. PyTorch leaves each device its own term.
    * Under sequence parallelism gradients of norms are terms on each device of `tp`. PyTorch leaves
      them so, or sums them whole where `fully_shard` wants them; we sum them after data
      parallelism has scattered them, which is as many bytes less.
    """
    found = dict(theirs)
    split = ["dp_replicate", "dp_shard", *(["tp"] if strategy.sequence_parallel else [])]
    for name, degree in strategy.axes:
        times = strategy.micro_batches if last else 0
        key = "all_reduce", name
        if name in split and degree > 1 and times:
            found[key] = found.get(key, 0) + 8 * times
        if name == "pp":
            found[key] = found.get(key, 0) + 8
        if name == "tp" and strategy.sequence_parallel:
            norms = 2 * composition.WIDTH * composition.LAYERS * 8
            found[key] = norms // strategy.dp_shard + 8 * times
    return found
