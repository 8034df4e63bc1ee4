"""Weights and optimizer state saved and loaded the usual ways, under one plan and under another.

A user saved `pm.state_dict()` by `torch.save` on rank 0 and loaded it on all ranks under `tp=2`:
every rank got rank 0's tiles, and weights were off by 0.13 without an error. A tile of another
place is now refused, and says what to use instead; whole tensors, `torch.distributed.checkpoint`
and its full state dicts give the same weights from any plan to any other.
"""

import warnings
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import shardwright as sw
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.runtime.async_pipeline.simulation import async_simulation
from shardwright.runtime.parameters.state_dicts import StateDictError
from tests.harness.ranks import run_ranks, whole
from tests.regressions.test_parameter_shapes import small

FULL = StateDictOptions(full_state_dict=True)


def plans():
    """As text: two ranks tensor parallel, fully sharded, data parallel, in stages; one; four."""
    model, batches = small()
    graph = sw.capture(model, (), batches[0])
    machine = sw.Machine.preset("2xcpu")
    found = {plan.name: plan for plan in sw.search(graph, machine).baselines}
    staged = sw.search(graph, machine, stages=(2,), micro_batches=(2,))
    found["stages"] = next(plan for plan in staged if plan.stages == 2)
    found["one"] = sw.search(graph, sw.Machine.preset("1xcpu"))[0]
    four = {p.name: p for p in sw.search(graph, sw.Machine.preset("4xcpu")).baselines}
    found["four"] = four["fully sharded x tensor parallel"]
    return {name: plan_to_json(plan) for name, plan in found.items()}


def parallel(text):
    """A module with other weights than those that are to be loaded, its optimizer, batches."""
    model, batches = small()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    module = sw.parallelize(model, sw.Plan.from_json(text))
    return module, torch.optim.AdamW(module.parameters(), lr=0.05), batches


def train(module, optimizer, batch):
    optimizer.zero_grad()
    module(**batch).backward()
    optimizer.step()


def same(module, expected):
    """Whether its parameters, those that live here, have these values, under all their names."""
    state = module.state_dict()
    assert state.keys() <= expected.keys()
    for key, value in state.items():
        torch.testing.assert_close(whole(value), expected[key], rtol=0, atol=0, msg=key)


@pytest.mark.ranks
def test_weights_are_the_same_whatever_way_they_go(tmp_path):
    texts = plans()
    model, batches = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for batch in batches[:2]:
        train(model, optimizer, batch)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    train(model, optimizer, batches[2])
    torch.save(model.state_dict(), tmp_path / "next.pt")
    run_ranks(2, _two_ranks, texts, tmp_path)
    _one_device(texts["one"], tmp_path)
    run_ranks(4, _four_ranks, texts["four"], tmp_path)


def test_stages_of_an_asynchronous_pipeline_take_their_part():
    model, batches = small()
    other, _ = small()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    simulated = async_simulation(
        other, (), batches[0], stages=2, weights="stash", optimizer=torch.optim.SGD
    )
    for stage in simulated.stages:
        assert 0 < len(list(stage.module.parameters())) < len(list(model.parameters()))
        stage.module.load_state_dict(model.state_dict())
    found = simulated.state_dict()
    for key, value in model.named_parameters():
        assert torch.equal(found[key], value), key


def _two_ranks(texts, folder):
    expected, later = torch.load(folder / "model.pt"), torch.load(folder / "next.pt")
    module, optimizer, batches = parallel(texts["tensor parallel"])
    module.load_state_dict(expected)  # the module's own, on one device
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))
    same(module, expected)
    rank = dist.get_rank()
    for name, kept in (("weights", module), ("state", optimizer)):
        torch.save(kept.state_dict(), folder / f"{name}{rank}.pt")
    dcp.save(module.state_dict(), checkpoint_id=folder / "dcp")
    full = deepcopy(get_model_state_dict(module, options=FULL))  # what is whole is not copied
    full_state = deepcopy(get_optimizer_state_dict(module, optimizer, options=FULL))
    for key, value in expected.items():
        assert torch.equal(full[key], value)
    dist.barrier()

    _after_one_more_step(module, optimizer, batches, later)
    _tiles_of_rank_0(texts["tensor parallel"], folder, rank, expected, later)
    for name in ("fully sharded", "data parallel"):
        module, optimizer, batches = parallel(texts[name])
        state = module.state_dict()
        dcp.load(state, checkpoint_id=folder / "dcp")  # in place
        same(module, expected)
        module, optimizer, batches = parallel(texts[name])
        set_model_state_dict(module, dict(full), options=FULL)  # torch writes into what it is given
        set_optimizer_state_dict(module, optimizer, deepcopy(full_state), options=FULL)
        same(module, expected)
        _after_one_more_step(module, optimizer, batches, later)

    # What every rank has whole may come from rank 0.
    module, optimizer, batches = parallel(texts["data parallel"])
    module.load_state_dict(expected)
    if rank == 0:
        torch.save(module.state_dict(), folder / "whole.pt")
    dist.barrier()
    module, _, _ = parallel(texts["data parallel"])
    module.load_state_dict(torch.load(folder / "whole.pt"))
    same(module, expected)
    with pytest.raises(StateDictError, match="assign=True"):
        module.load_state_dict(dict(expected), assign=True)

    module, optimizer, batches = parallel(texts["stages"])
    assert 0 < len(module.state_dict()) < len(expected)
    module.load_state_dict(expected)
    same(module, expected)
    dcp.save(module.state_dict(), checkpoint_id=folder / "stages")
    module, optimizer, batches = parallel(texts["tensor parallel"])
    dcp.load(module.state_dict(), checkpoint_id=folder / "stages")
    same(module, expected)


def _after_one_more_step(module, optimizer, batches, later):
    train(module, optimizer, batches[2])
    for key, value in module.named_parameters():
        torch.testing.assert_close(whole(value), later[key], rtol=0, atol=1e-10, msg=key)


def _tiles_of_rank_0(text, folder, rank, expected, later):
    """The user's habit: of this rank they are welcome, of another refused."""
    module, optimizer, batches = parallel(text)
    module.load_state_dict(torch.load(folder / f"weights{rank}.pt"))
    optimizer.load_state_dict(torch.load(folder / f"state{rank}.pt"))
    same(module, expected)
    _after_one_more_step(module, optimizer, batches, later)

    module, optimizer, batches = parallel(text)
    theirs = torch.load(folder / "weights0.pt")
    if rank == 0:
        module.load_state_dict(theirs)
        return
    told = (
        r"is the tile at \(0,\) of tp=2 S\(0\), and this rank is at \(1,\); save with torch\.dist"
    )
    with pytest.raises(StateDictError, match=told):
        module.load_state_dict(theirs)
    with pytest.raises(StateDictError, match=told):  # and so it is without what came with it
        module.load_state_dict(dict(theirs.items()))
    with pytest.raises(StateDictError, match=f"exp_avg of the optimizer's parameter.*{told}"):
        optimizer.load_state_dict(torch.load(folder / "state0.pt"))


def _one_device(text, folder):
    expected = torch.load(folder / "model.pt")
    module, _, _ = parallel(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(module.state_dict(), checkpoint_id=folder / "dcp")
        same(module, expected)
        dcp.save(module.state_dict(), checkpoint_id=folder / "one")
    with pytest.raises(StateDictError, match="one tile of several, tp=2 S"):
        module.load_state_dict(torch.load(folder / "weights0.pt"))
    module, _, _ = parallel(text)
    module.load_state_dict(torch.load(folder / "whole.pt"))
    same(module, expected)


def _four_ranks(text, folder):
    expected = torch.load(folder / "model.pt")
    for source in ("dcp", "one"):
        module, _, _ = parallel(text)
        dcp.load(module.state_dict(), checkpoint_id=folder / source)
        same(module, expected)
    with pytest.raises(StateDictError, match="a tile of another mesh, tp=2 S"):
        module.load_state_dict(torch.load(folder / "weights0.pt"))
