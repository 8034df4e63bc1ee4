"""A parallel module is used as the module that it was made of."""

import re
import time
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.ir.plan import PlanError
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.runtime.backend.base import wait_for
from shardwright.runtime.batch import BatchError
from shardwright.runtime.comm import collectives
from tests.harness import models
from tests.harness.ranks import run_ranks, whole

pytestmark = pytest.mark.ranks


def example(name):
    """A model and its batch, in float64 where that does not depend on a Hugging Face loss."""
    if name == "tied":
        return models.gpt2(heads=2, hidden=12, dropout=0.0)
    if name == "running mean":
        return models.double(*models.mlp())
    if name == "batch norm":
        model, batch = models.cnn(channels=(4, 6), norm=True)
        for layer in model.modules():
            if isinstance(layer, torch.nn.Dropout):
                layer.p = 0.0
        return models.double(model, batch)
    if name == "dropout":
        return models.double(*models.cnn(channels=(4, 6)))
    return models.double(*models.no_loss(as_tuple=name == "tuple"))


def planned(name, choice="fully sharded", devices=2):
    model, batch = example(name)
    frontier = sw.search(sw.capture(model, (), batch), sw.Machine.preset(f"{devices}xcpu"))
    return plan_to_json({plan.name: plan for plan in frontier.baselines}[choice])


def parallel(name, text, seed=0):
    model, batch = example(name)
    return model, batch, sw.parallelize(model, sw.Plan.from_json(text), seed=seed)


@pytest.mark.hf
@pytest.mark.parametrize("choice", ["fully sharded", "tensor parallel"])
def test_it_is_a_drop_in(choice):
    run_ranks(2, _drop_in, planned("tied", choice))


def _drop_in(text):
    model, batch, module = parallel("tied", text)
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in module.named_parameters()] == names
    assert list(module.state_dict()) == list(model.state_dict())
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    stored = sum(p.to_local().numel() for p in module.parameters())
    assert stored < sum(p.numel() for p in model.parameters())
    tied = module.get_parameter("lm_head.weight")
    assert tied is module.get_parameter("transformer.wte.weight")

    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, module)]
    for _ in range(2):
        serial, loss = model(**batch).loss, module(**batch)
        torch.testing.assert_close(loss, serial)
        for optimizer, one in zip(optimizers, (serial, loss), strict=True):
            optimizer.zero_grad()
            one.backward()
        for (name, p), (_, q) in zip(
            model.named_parameters(), module.named_parameters(), strict=True
        ):
            torch.testing.assert_close(
                whole(q.grad).reshape(p.shape), p.grad, msg=lambda text, name=name: f"{name} {text}"
            )
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(whole(tied).reshape(37, 12), model.lm_head.weight.detach())


@pytest.mark.parametrize("name", ["running mean", "batch norm"])
def test_buffers_follow_those_of_the_module(name):
    run_ranks(2, _buffers, name, planned(name, "data parallel"))


def _buffers(name, text):
    model, batch, module = parallel(name, text)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, module)]
    for _ in range(3):
        for one, optimizer in zip((model, module), optimizers, strict=True):
            optimizer.zero_grad()
            one(**batch).backward()
            optimizer.step()
    assert list(module.state_dict()) == list(model.state_dict())
    for key, buffer in model.named_buffers():
        assert buffer.any(), "it changes"
        torch.testing.assert_close(module.get_buffer(key), buffer, rtol=1e-10, atol=1e-10)
    _does_not_wait_for_its_loss(model, module, optimizers[1], batch)


def _does_not_wait_for_its_loss(model, module, optimizer, batch):
    """Which is summed along with gradients."""
    waited = []

    def wait(work, what):
        waited.append(what)
        wait_for(work, what)

    with mock.patch.object(collectives, "wait_for", wait):
        loss = module.train_step(optimizer, batch)
    sums = [what for what in waited if "all_reduce" in what and "%grad/" in what]
    assert sums, "the gradients are summed"
    (output,) = module._sw_program.program.outputs
    (made,) = (
        part.value
        for one in module._sw_program.program.transfers()
        for part in one.parts
        if part.result == output
    )
    assert [what for what in waited if f"%{made})" in what or f"%{made}," in what] == sums[-1:]
    torch.testing.assert_close(loss, model(**batch).detach(), rtol=1e-10, atol=1e-10)


def test_a_rank_may_bring_only_its_part_of_the_batch():
    run_ranks(2, _local_batch, planned("dropout", "data parallel"))


def _local_batch(text):
    _, batch, module = parallel("dropout", text)
    module.eval()
    local = module.local_batch(batch)
    rank = torch.distributed.get_rank()
    sizes = [len(value) for value in local.values()]
    assert sizes == ([3, 3] if rank == 0 else [2, 2])
    assert torch.equal(local["images"], batch["images"].split([3, 2])[rank])
    assert torch.equal(module(**local), module(**batch))
    assert all(torch.equal(local[key], value) for key, value in module.local_batch(local).items())
    with pytest.raises(BatchError) as wrong:
        module(images=batch["images"][:4], classes=batch["classes"])
    assert str(wrong.value) == (
        "the argument images has shape [4, 3, 12, 12]; the plan is for a global batch of"
        f" [5, 3, 12, 12] (or this rank's part of it, [{3 - rank}, 3, 12, 12]): pad the batch, or"
        " plan for its shape"
    )
    with pytest.raises(BatchError) as missing:
        module(images=batch["images"])
    assert str(missing.value) == (
        "the call does not fit the module: missing a required argument: 'classes'"
    )


def test_a_plan_needs_its_world_size_and_its_model():
    wrong = planned("dropout", "data parallel", devices=4), planned("dict", "data parallel")
    with pytest.raises(PlanError, match=r"for 4 devices \(host4=4\) but there is no process group"):
        parallel("dropout", wrong[0])
    run_ranks(2, _wrong_plans, *wrong)


def _wrong_plans(too_large, of_another):
    with pytest.raises(PlanError) as wrong:
        parallel("dropout", too_large)
    assert str(wrong.value) == (
        "the plan is for 4 devices (host4=4) but there are 2 processes; start it with torchrun"
        " --nproc-per-node 4, or plan for 2"
    )
    model, _ = example("dict")
    model.layer.bias = None
    with pytest.raises(PlanError) as other:
        sw.parallelize(model, sw.Plan.from_json(of_another))
    assert re.fullmatch(
        r"the plan was made for another model or other shapes \(graph \w{16}, this one is \w{16}\);"
        r" plan this model with this batch again",
        str(other.value),
    )
    meta = example("dict")[0].to("meta")
    with pytest.raises(PlanError, match="NoLoss has parameters on the meta device, without values"):
        sw.parallelize(meta, sw.Plan.from_json(of_another))


def test_dropout_depends_on_seed_and_step_and_is_off_in_eval_mode():
    run_ranks(2, _dropout, planned("dropout", "data parallel"))


def _dropout(text):
    model, batch, module = parallel("dropout", text, seed=7)
    first = [module(**batch).item() for _ in range(3)]
    assert len(set(first)) == 3, "the step changes the mask"
    again = parallel("dropout", text, seed=7)[2]
    assert [again(**batch).item() for _ in range(3)] == first
    other = parallel("dropout", text, seed=8)[2]
    assert not {other(**batch).item() for _ in range(3)} & set(first)

    module.eval()
    model.eval()
    serial = model(**batch)
    for _ in range(2):
        torch.testing.assert_close(module(**batch), serial, rtol=1e-12, atol=0.0)
    module.train()
    again(**batch)
    assert module(**batch).item() != serial.item()
    # Steps in eval mode do not count: both modules are at their fifth step.
    assert module(**batch).item() == again(**batch).item()


@pytest.mark.parametrize("name", ["dict", "tuple"])
def test_a_module_without_loss_returns_what_it_returned(name):
    run_ranks(2, _no_loss, name, planned(name, "data parallel"))


def _no_loss(name, text):
    model, batch, module = parallel(name, text)
    theirs, ours = model(**batch), module(**batch)
    assert type(ours) is type(theirs)
    pairs = {key: (theirs[key], ours[key]) for key in ([0, 1] if name == "tuple" else theirs)}
    for serial, tiled in pairs.values():
        torch.testing.assert_close(tiled, serial)
    weights = torch.linspace(-1, 1, 45, dtype=torch.float64).view(5, 9)
    for scores in next(iter(pairs.values())):
        (scores * weights).sum().backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(
            whole(module.get_parameter(key).grad).reshape(parameter.shape), parameter.grad
        )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(BatchError, match=re.escape(f"this one returns {name}: compute the loss")):
        module.train_step(optimizer, batch)


def test_an_error_on_one_rank_comes_with_its_traceback():
    with pytest.raises(Exception, match=r"(?s)_fail_on_the_last.*only rank 1 fails"):
        run_ranks(2, _fail_on_the_last)


def test_ranks_that_hang_are_ended():
    with pytest.raises(TimeoutError, match=r"2 ranks of .*_hang_on_the_last.* ran for 5 s"):
        run_ranks(2, _hang_on_the_last, timeout=5)


def _fail_on_the_last():
    if torch.distributed.get_rank() == 1:
        raise ValueError("only rank 1 fails")
    torch.distributed.barrier()


def _hang_on_the_last():
    if torch.distributed.get_rank() == 1:
        time.sleep(600)
