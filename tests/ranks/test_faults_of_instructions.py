"""Instructions of each kind on ranks: what runs is the program, and errors in it end all ranks.

After an error all say whose it was, and none goes on.
"""

import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step import instructions as known
from shardwright.program.step.instructions import Relayout
from shardwright.program.step.lower.rank_steps import step_program
from shardwright.rules.analysis import analyze
from shardwright.runtime.executor.executor import StepExecutor
from shardwright.runtime.executor.failures import StepFailedError
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.ranks

RECOVERED = "recovered"
PATIENCE = 1.0  # seconds that a rank waits for another one
ENDED = 20.0  # seconds within which both ranks have ended, on a busy host


class Shared(nn.Module):
    """Reads its weights twice, so that their gradients are sums."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        for _ in range(2):
            x = x + self.down(torch.relu(self.up(x)))
        return x.square().mean()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.relu(self.linear(x))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


MODELS = {"shared": Shared, "stack": Stack}
# The model, its strategy, and instructions: the name of the class, and of a part of a pass.
CASES = (
    ("shared", "dp_shard=2", "Forward Transfer Wait Add Free Seed Backward Accumulate Update"),
    ("shared", "relayout", "Relayout"),
    ("stack", "pp=2 mb=2", "Send Recv"),
    ("stack", "pp=2 mb=4 schedule=InterleavedZeroBubble", "Backward:inputs Backward:weights"),
    ("stack", "dp_shard=2 offload=optimizer,parameters", "Fetch StoreGradient"),
    ("stack", "dp_replicate=2 ac=full offload=activations", "Offload"),
)
ELSEWHERE = {"Version"}  # of asynchronous pipelines: test_async_pipeline.py


def subject(name):
    torch.manual_seed(0)
    return MODELS[name](), {"x": torch.randn(96, 8)}


def plans():
    """The text of each case's plan."""
    found = {}
    for name, strategy, _ in CASES:
        model, batch = subject(name)
        graph = sw.capture(model, (), batch)
        if strategy == "relayout":
            plan = next(one for one in sw.search(graph, "2xcpu") if _has_relayout(graph, one))
        else:
            plan = sw.price(graph, "2xcpu", strategy)
        found[name, strategy] = plan_to_json(plan)
    return found


def _has_relayout(graph, plan):
    analysis = analyze(graph)
    program = step_program(graph, analysis, read_plan(plan, graph, analysis), 0)
    return any(isinstance(one, Relayout) for one in program.instructions)


def test_all_kinds_of_instructions_are_tried():
    tried = {kind.partition(":")[0] for _, _, kinds in CASES for kind in kinds.split()}
    kinds = {one.__name__ for one in known.StepInstruction.__args__}
    assert tried | ELSEWHERE == kinds


def test_an_error_at_any_kind_of_instruction_ends_all_ranks(tmp_path):
    first, second = run_ranks(2, _cases, plans(), tmp_path.as_posix(), timeout=200)
    for said, other in zip(first, second, strict=True):
        case, alone, seconds, text = said
        assert (case, alone) == other[:2]
        assert max(seconds, other[2]) < ENDED
        assert text == other[3]
        if text != RECOVERED:
            assert text.startswith("the ranks failed in different places"), said
            assert ": start again from a checkpoint" in text
            places = text.partition("), ")[2]
            assert places.startswith("rank 1 at ") or not alone, said
            assert "InjectedError: no more memory" in places, said
        unknown = case.split()[-1] in ("Transfer", "Wait") or case.startswith("pp=")
        assert (text == RECOVERED) is not (alone or unknown), said


class InjectedError(Exception):
    """An error of a rank."""


def _cases(texts, folder):
    """For each case: its name, whether one rank failed alone, seconds, and what all were told."""
    armed, step, begin = [], StepExecutor._step, StepExecutor.begin

    def wrapped(self, one):
        method, given = step(self, one)
        part = getattr(one, "part", None)
        names = {type(one).__name__, f"{type(one).__name__}:{part.value if part else ''}"}

        def run(*args):
            if armed and armed[0] in names:
                raise InjectedError("no more memory")
            method(*args)

        return run, given

    runs = []

    def traced(self, given, state, trace=None):
        trace = [] if trace is None else trace
        runs.append((self.program, trace))
        return begin(self, given, state, trace)

    for name, strategy, _ in CASES:  # as they are, without what is wrapped
        with mock.patch.object(StepExecutor, "begin", traced):
            module, optimizer, batch = _made(name, texts[name, strategy])
            module.train_step(optimizer, batch)
        ((program, trace),) = runs
        assert tuple(trace) == program.instructions, strategy
        runs.clear()
    found = []
    with mock.patch.object(StepExecutor, "_step", wrapped):
        for name, strategy, kinds in CASES:
            for kind in kinds.split():
                for alone in (False, True):
                    said = _case(name, strategy, texts[name, strategy], kind, alone, armed)
                    found.append((f"{strategy}: {kind}", alone, *said))
                    if said[1] != RECOVERED:  # no group survives a wait that ended
                        _meet_again(f"{folder}/store{len(found)}")
    return found


def _meet_again(store):
    rank = torch.distributed.get_rank()
    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )


def _made(name, text):
    model, batch = subject(name)
    module = sw.parallelize(model, sw.Plan.from_json(text))
    return module, torch.optim.SGD(module.parameters(), lr=0.0), batch


def _case(name, strategy, text, kind, alone, armed):
    module, optimizer, batch = _made(name, text)
    expected = module.train_step(optimizer, batch)
    gradients = _gradients(module)
    rank = torch.distributed.get_rank()
    module.set_timeout(timedelta(seconds=PATIENCE))

    armed[:] = [kind] * (rank == 1 or not alone)
    start, error = time.monotonic(), ""
    try:
        module.train_step(optimizer, batch)
    except (InjectedError, RuntimeError) as e:  # its own, or a wait for the other rank
        error = str(e).partition("\n")[0]
        with pytest.raises(StepFailedError, match="other ranks may be elsewhere") as refused:
            module.train_step(optimizer, batch)
        assert error in str(refused.value)
    seconds = time.monotonic() - start
    armed.clear()
    if rank == 1 if alone else "pp=" not in strategy:  # where a stage may wait for another before
        assert error == "no more memory"
    try:
        module.recover()
    except StepFailedError as e:
        return seconds, str(e)
    module.set_timeout(timedelta(seconds=60))
    assert torch.equal(module.train_step(optimizer, batch), expected)
    again = _gradients(module)
    assert all(torch.equal(again[key], gradient) for key, gradient in gradients.items())
    return seconds, RECOVERED


def _gradients(module):
    found = {key: parameter.grad for key, parameter in module.named_parameters()}
    return {
        key: (x.to_local() if hasattr(x, "to_local") else x).clone()
        for key, x in found.items()
        if x is not None
    }
