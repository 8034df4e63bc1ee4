"""State of the optimizer on the host: exact steps, a peak that falls as predicted, state dicts."""

import copy
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.ir.plan import PlanError
from shardwright.program.plan_decoder import read_plan
from shardwright.rules.analysis import analyze
from shardwright.runtime.parameters.host_state import is_home
from shardwright.tracing.discovery.discover import capture_with_rules
from tests.harness.peak_memory import counted, predicted
from tests.harness.ranks import run_ranks, whole
from tests.ranks.test_offload import Blocks
from tests.ranks.test_random_tilings import error

pytestmark = pytest.mark.ranks

OFFLOAD = " offload=optimizer"
ADAM_MODULE = sys.modules["torch.optim.adam"]  # which `torch.optim` hides
TEXTS = (
    "dp_replicate=2",
    "dp_shard=2",
    "tp=2",
    "pp=2 mb=4",
    "dp_shard=2 mb=3 ac=full",
)
GROUP = 2**14  # bytes of parameters that are updated at once; a weight of a block has 16 KiB


def subject():
    torch.manual_seed(0)
    return Blocks(0.0).double(), {"x": torch.randn(24, 8, dtype=torch.float64)}


def planned(graph, text):
    """The plan of a strategy, with groups as small as the model."""
    plan = sw.price(graph, "2xcpu", text)
    return replace(plan, update_group_bytes=GROUP) if text.endswith(OFFLOAD) else plan


def test_steps_are_exact_and_the_measured_peak_falls_as_predicted():
    model, batch = subject()
    graph = capture_with_rules(model, (), batch).graph
    analysis, plans, expected = analyze(graph), {}, {}
    both = TEXTS[-1] + " offload=activations,optimizer"
    for text in (both, *(one + end for one in TEXTS for end in ("", OFFLOAD))):
        plans[text] = planned(graph, text)
        decisions = read_plan(plans[text], graph, analysis)
        name = "adamw_on_host" if "optimizer" in text else "adamw"
        expected[text] = [predicted(graph, analysis, decisions, rank, name) for rank in range(2)]
    ranks = run_ranks(2, measured, plans)
    for text, memories in expected.items():
        for memory, rank in zip(memories, ranks, strict=True):
            assert rank[text]["error"] < 1e-10  # AdamW divides by small gradients
            assert rank[text]["loaded"]
            assert (rank[text]["home"] > 0) is ("optimizer" in text)
            assert memory.optimizer_state == 0 or "optimizer" not in text
            if "activations" not in text:
                assert memory.host == rank[text]["home"]
    check_peaks_and_weights(expected, ranks, TEXTS, OFFLOAD, 0.85)


def check_peaks_and_weights(expected, ranks, texts, offload, share):
    """Peaks of ranks are `expected`, and with `offload` at most a `share` of those without it.

    Weights after the same steps are equal to the bit.
    """
    for text, memories in expected.items():
        most = max(rank[text]["peak"] for rank in ranks)
        if not text.startswith("tp"):  # there Gloo's threads let go of results a moment late
            assert abs(max(one.peak for one in memories) / most - 1) < 0.02
    for text in texts:
        kept, offloaded = (max(one[text + e]["peak"] for one in ranks) for e in ("", offload))
        assert offloaded < share * kept
        for rank in ranks:
            pairs = zip(rank[text]["weights"], rank[text + offload]["weights"], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)


def measured(plans):
    """Of each plan the error of three steps, bytes at the peak of one, and of state on the host.

    Also whether a new optimizer goes on from the state dict as this one does.
    """
    found, updated, update = {}, [], ADAM_MODULE.adam

    def noted_update(parameters, *args, **kwargs):
        updated.extend(parameters)
        update(parameters, *args, **kwargs)

    ADAM_MODULE.adam = noted_update
    model, batch = subject()
    made = partial(torch.optim.AdamW, lr=1e-2)
    serial = copy.deepcopy(model)
    reference = made(serial.parameters())
    for _ in range(3):
        reference.zero_grad()
        serial(**batch).backward()
        reference.step()
    for text, plan in plans.items():
        module = sw.parallelize(copy.deepcopy(model), plan)
        optimizer = made(module.parameters(), foreach=False)
        seen = []
        for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
            register(lambda one, *_, seen=seen: seen.append(ids(one)))
        for _ in range(2):
            module.train_step(optimizer, batch)
        assert seen == [[*map(id, module.parameters())]] * 4  # no tiles, whose norms are others
        assert all(
            isinstance(value, DTensor) and value.placements == parameter.placements
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
            if key != "step"
        )
        assert updated and not any(isinstance(one, DTensor) for one in updated)
        updated.clear()
        saved = copy.deepcopy(optimizer.state_dict())
        closure = partial(computed, module, optimizer, batch)
        optimizer.step(closure=closure) if "tp" in text else optimizer.step(closure)
        errors = (
            error(serial.get_parameter(name).detach(), whole(parameter))
            for name, parameter in module.named_parameters()
        )
        found[text] = {"error": max(errors)}
        found[text]["weights"] = [local(one.detach()).clone() for one in module.parameters()]
        found[text]["loaded"] = goes_on(made, module, optimizer, saved, batch)
        found[text]["home"] = home_bytes(optimizer)
        found[text]["peak"] = counted(module, batch)
    return found


def computed(module, optimizer, batch):
    """What a loop of one's own does in a closure, which goes through the groups."""
    optimizer.zero_grad()
    return module.forward_backward(batch)


def goes_on(made, module, optimizer, saved, batch):
    """Whether an optimizer that loads `saved` has the state of `optimizer` after its next step."""
    before = copy.deepcopy(saved)
    other = made(module.parameters(), foreach=False)
    other.load_state_dict(saved)
    assert home_bytes(other) == home_bytes(optimizer)
    other.step()  # with the gradients of the last step
    pairs = zip(other.state.values(), optimizer.state.values(), strict=True)
    assert before.keys() == saved.keys()
    return all(torch.equal(local(a[key]), local(b[key])) for a, b in pairs for key in b)


def ids(optimizer):
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def home_bytes(optimizer):
    tensors = (value for state in optimizer.state.values() for value in state.values())
    return sum(local(value).nbytes for value in tensors if is_home(value))


def local(value):
    return value.to_local() if isinstance(value, DTensor) else value


def test_optimizers_that_are_not_updated_by_parameter_are_refused():
    model, batch = subject()
    plan = sw.price(sw.capture(model, (), batch), "1xcpu", "dp_shard=1" + OFFLOAD)
    module = sw.parallelize(model, plan)
    module(**batch).backward()
    with pytest.raises(PlanError, match="LBFGS may need that of several parameters at once"):
        torch.optim.LBFGS(module.parameters()).step(lambda: module(**batch))
    with pytest.raises(ValueError, match="optimizer muon may need all of its state at once"):
        sw.price(sw.capture(subject()[0], (), batch), "1xcpu", "dp_shard=1" + OFFLOAD, "muon")
