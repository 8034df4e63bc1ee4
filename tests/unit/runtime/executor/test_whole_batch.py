"""A module that runs a step program is a module: what own training loops may do with a call.

On one device nothing is sent, and autograd runs the step (`executor/direct.py`); every test is run
by the executor of programs too.
"""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.program.step.instructions import Backward, Relayout, Update, Wait
from shardwright.runtime.executor import whole_batch
from shardwright.runtime.executor.direct import is_direct
from shardwright.runtime.executor.executor import StepExecutor
from tests.harness.models import MeanSquare

ONE = sw.Machine.preset("1xcpu")


class Net(nn.Module):
    """Draws random numbers, writes buffers, and returns two tensors."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.drop, self.down, self.other = nn.Dropout(0.3), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x):
        hidden = self.drop(torch.tanh(self.norm(self.up(x))))
        return self.down(hidden), self.other(hidden)


def batch():
    return torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def by_instructions(monkeypatch):
    """Nothing is left to autograd."""
    monkeypatch.setattr(whole_batch, "is_direct", lambda program: False)


@pytest.fixture(params=["direct", "by_instructions"])
def module(request, monkeypatch):
    if request.param == "by_instructions":
        request.getfixturevalue("by_instructions")
    return made()


def made():
    torch.manual_seed(0)
    model = Net().double()
    return sw.parallelize(model, sw.plan(model, (batch(),), machine=ONE))


def loss_of(module):
    first, second = module(batch())
    return first.square().sum() + (first[:, :2] * second).sum()


def gradients(module):
    return {name: p.grad.clone() for name, p in module.named_parameters()}


@pytest.fixture
def runs(monkeypatch):
    """The runs of programs that begin, and the instructions that each has played."""
    begin, found = StepExecutor.begin, []

    def begun(self, given, state, trace=None):
        trace = [] if trace is None else trace
        run = begin(self, given, state, trace)
        found.append((weakref.ref(run), self.program, trace))
        return run

    monkeypatch.setattr(StepExecutor, "begin", begun)
    return found


def test_what_runs_is_the_program(by_instructions, runs):
    module = made()
    loss = loss_of(module)
    ((_, program, trace),) = runs
    assert 0 < len(trace) < len(program.instructions), "the backward part waits for backward"
    loss.backward()
    assert tuple(trace) == program.instructions


class WithLoss(Net):
    def forward(self, x):
        first, second = super().forward(x)
        return first.square().sum() + (first[:, :2] * second).sum()


def trained(model):
    module = sw.parallelize(model, sw.plan(model, (batch(),), machine=ONE))
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(2):
        module.train_step(optimizer, (batch(),))
    return module.state_dict()


@pytest.mark.parametrize("strategy", ["mb=5", "mb=5 offload=optimizer,parameters"])
def test_what_runs_in_micro_batches_is_the_program(runs, strategy):
    model = MeanSquare(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))).double()
    plan = sw.price(sw.capture(model, (batch(),)), ONE, strategy)
    module = sw.parallelize(model, plan)
    module.train_step(torch.optim.AdamW(module.parameters()), (batch(),))
    ((_, program, trace),) = runs
    assert tuple(trace) == program.instructions
    assert sum(isinstance(one, Backward) for one in trace) >= 5
    assert isinstance(trace[-1], Update)


def test_a_training_step_ends_with_the_update_of_its_program(by_instructions, runs):
    torch.manual_seed(0)
    model = WithLoss().double()
    found = trained(model)
    for _, program, trace in runs:
        assert tuple(trace) == program.instructions
        assert isinstance(trace[-1], Update)
    runs.clear()
    # The same by hand: a program without an update, whose gradients an optimizer takes.
    module = sw.parallelize(model, sw.plan(model, (batch(),), machine=ONE))
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        module(batch()).backward()
        optimizer.step()
    assert not any(isinstance(one, Update) for _, _, trace in runs for one in trace)
    for name, x in module.state_dict().items():
        assert torch.equal(x, found[name]), name


def test_a_step_without_communication_is_the_graph_of_its_regions(runs):
    module = made()
    loss = loss_of(module)
    loss.backward()
    assert not runs
    whole = module._sw_program
    (program,) = whole._call_programs.values()
    assert program.direct is not None
    several = replace(whole.program.regions[0], variants=whole.program.regions[0].variants * 2)
    assert is_direct(whole.program)
    assert not is_direct(replace(whole.program, regions=(several,)))
    for one in (Wait("t1", ()), Relayout("a", "b", (), (), (), "float32")):
        assert not is_direct(
            replace(whole.program, instructions=(*whole.program.instructions, one))
        )


def test_a_result_that_is_dropped_frees_what_its_call_kept(by_instructions, runs):
    module = made()
    gc.collect()
    gc.disable()
    try:
        loss = loss_of(module)
        ((run, _, _),) = runs
        assert run() is not None
        del loss
        assert run() is None
        loss = loss_of(module)
        loss.backward()
        assert runs[1][0]() is None, "though the loss is still there"
    finally:
        gc.enable()


def test_a_second_backward_draws_the_same_and_writes_no_buffer(module):
    loss = loss_of(module)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    loss.backward(retain_graph=True)
    once = gradients(module)
    loss.backward()
    for name, gradient in gradients(module).items():
        torch.testing.assert_close(gradient, 2 * once[name], rtol=1e-12, atol=1e-14)
    assert all(torch.equal(buffers[name], buffer) for name, buffer in module.named_buffers())
    assert module.get_buffer("norm.num_batches_tracked") == 1
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_outputs_one_after_the_other_are_both_at_once(module):
    state = module.random_state()
    first, second = module(batch())
    (first.sum() + 3 * second.sum()).backward()
    together = gradients(module)
    module.zero_grad()
    module.set_random_state(state)
    first, second = module(batch())
    first.sum().backward(retain_graph=True)
    assert module.get_parameter("other.weight").grad is None
    (3 * second.sum()).backward()
    for name, gradient in gradients(module).items():
        torch.testing.assert_close(gradient, together[name], rtol=1e-12, atol=1e-14)


def test_a_parameter_that_changed_is_found_before_it_is_read_again(module):
    loss = loss_of(module)
    loss.backward(retain_graph=True)
    with torch.no_grad():
        module.get_parameter("down.weight").mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
        loss.backward()


def test_a_step_after_an_error_is_as_any_other(module):
    state = module.random_state()
    loss_of(module).backward()
    expected = gradients(module)
    module.zero_grad()
    regions = module._sw_program.regions.parts

    class StopError(Exception):
        """A step that fails."""

    def stop(*_):
        raise StopError

    def stop_backward(_region, _given, results):
        for one in results:
            if one.requires_grad:
                one.register_hook(stop)

    hook = regions[0].register_forward_hook(stop)
    with pytest.raises(StopError):
        loss_of(module)
    hook.remove()
    module.set_random_state(state)
    hooks = [region.register_forward_hook(stop_backward) for region in regions]
    loss = loss_of(module)
    for hook in hooks:
        hook.remove()
    with pytest.raises(StopError):
        loss.backward()
    module.set_random_state(state)
    loss_of(module).backward()
    for name, gradient in gradients(module).items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=0)


def test_without_parameters_to_train_nothing_is_saved(by_instructions, runs):
    module = made()
    module.requires_grad_(False)
    first, _ = module(batch())
    assert not first.requires_grad
    ((_, program, _),) = runs
    assert not program.gradients


def test_second_derivatives_are_those_of_the_module(module):
    module.eval()
    torch.manual_seed(0)
    serial = Net().double().eval()
    for one in (serial, module):
        parameters = list(one.parameters())
        slopes = torch.autograd.grad(loss_of(one), parameters, create_graph=True)
        sum(slope.square().sum() for slope in slopes).backward()
    for name, gradient in gradients(module).items():
        theirs = serial.get_parameter(name).grad
        torch.testing.assert_close(gradient, theirs, rtol=1e-10, atol=1e-12)
