"""Buckets of parameters behave as the parameters one by one: gradients, hooks, optimizers."""

import copy
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.ir.buckets import gradient_buckets
from shardwright.ir.redistribution import Collective
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.program.step.passes import bucket
from shardwright.runtime.parameters.dtensor_spec import DTensorSpec
from tests.harness.ranks import run_ranks, whole

WORDS, WIDTH = 11, 6


class Net(nn.Module):
    """Two outputs; parameters that share a gradient, a tied one, one for the second output only."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.first, self.second = (nn.Parameter(torch.ones(5, 4, WIDTH)) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.other = nn.Linear(WIDTH, 3)

    def forward(self, ids):
        x = self.embed(ids) + (self.first + self.second)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x), self.other(x)


def ids(seed=0):
    return torch.randint(WORDS, (5, 4), generator=torch.Generator().manual_seed(seed))


def model():
    torch.manual_seed(0)
    return Net().double()


def loss_of(module, batch, outputs=(0, 1)):
    returned = module(batch)
    return sum((returned[i].sin() * (1 + returned[i].square())).sum() for i in outputs)


@pytest.mark.ranks
def test_buckets_are_parameters_to_the_user():
    graph = sw.capture(model(), (ids(),))
    frontier = sw.search(graph, sw.Machine.preset("2xcpu"))
    (plan,) = (plan for plan in frontier.baselines if plan.name == "data parallel")
    run_ranks(2, _all_checks, plan_to_json(plan))


def _with_limit(sizes, _most, limit):
    return gradient_buckets(sizes, limit)


def _all_checks(text):
    for limit in (1, 500, 10**9):  # bytes of a bucket: each parameter alone, some, all together
        bucket.gradient_buckets = partial(_with_limit, limit=limit)
        module = sw.parallelize(model(), sw.Plan.from_json(text))
        for check in CHECKS:
            check(model(), copy.deepcopy(module))


def same_gradients(serial, module, **tolerance):
    for key, p in serial.named_parameters():
        q = module.get_parameter(key)
        assert (p.grad is None) == (q.grad is None), key
        if p.grad is not None:
            assert isinstance(q.grad, DTensor)
            same(q.grad, p.grad, key, **tolerance)


def same(ours, theirs, key="", **tolerance):
    tolerance = {"rtol": 1e-10, "atol": 1e-10, **tolerance}
    torch.testing.assert_close(
        whole(ours).reshape(theirs.shape), theirs, msg=lambda text: f"{key}: {text}", **tolerance
    )


def _accumulate(serial, module):
    for to_none in (True, False):
        for one in (serial, module):
            one.zero_grad(set_to_none=to_none)
            for seed in range(3):
                loss_of(one, ids(seed)).backward()
        same_gradients(serial, module)


def _one_output_only(serial, module):
    for outputs in ((0,), (1,)):
        for one in (serial, module):
            one.zero_grad()
            loss_of(one, ids(), outputs).backward()
        same_gradients(serial, module)
        assert (module.other.weight.grad is None) == (outputs == (0,))


def _backward_twice(serial, module):
    for one in (serial, module):
        loss = loss_of(one, ids())
        loss.backward(retain_graph=True)
        loss.backward()
    same_gradients(serial, module)


def _gradients_by_name(serial, module):
    names = [name for name, _ in serial.named_parameters()]
    theirs = torch.autograd.grad(loss_of(serial, ids()), tuple(serial.parameters()))
    parameters = [module.get_parameter(name) for name in names]
    ours = torch.autograd.grad(loss_of(module, ids()), parameters)
    for name, a, b in zip(names, ours, theirs, strict=True):
        same(a, b, name)
    at = names.index("layers.1.weight")
    (alone,) = torch.autograd.grad(loss_of(module, ids()), [parameters[at]])
    same(alone, theirs[at])


def _clipped(serial, module):
    norms = []
    for one in (serial, module):
        loss_of(one, ids()).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5))
    same(norms[1], norms[0])
    same_gradients(serial, module)


def _hooks(serial, module):
    seen = []
    parameter = module.get_parameter("layers.0.bias")
    parameter.register_hook(lambda grad: seen.append("before") or grad * 2)
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    serial.get_parameter("layers.0.bias").register_hook(lambda grad: grad * 2)
    for one in (serial, module):
        loss_of(one, ids()).backward()
    assert seen[0] == "before" and seen[1] is parameter.grad and len(seen) == 2
    same_gradients(serial, module)


def _frozen(serial, module):
    for one in (serial, module):
        one.get_parameter("layers.1.weight").requires_grad_(False)
        loss_of(one, ids()).backward()
    assert module.get_parameter("layers.1.weight").grad is None
    same_gradients(serial, module)


def _new_values(serial, module):
    for one in (serial, module):
        one.load_state_dict({key: value * 1.5 for key, value in one.state_dict().items()})
        loss_of(one, ids()).backward()
    same_gradients(serial, module)


def _other_precision(serial, module):
    known = DTensorSpec(module.get_parameter("first"))
    loss_of(module, ids()).backward()  # where they lie is known before
    module.zero_grad()
    for one in (serial, module):
        loss_of(one.float(), ids()).backward()
    assert module.get_parameter("first").grad.dtype == torch.float32
    assert not known.suits(module.get_parameter("first"))
    same_gradients(serial, module, rtol=1e-4, atol=1e-5)
    mixed = module.get_parameter("layers.2.bias")
    assert isinstance(mixed, DTensor)


def _lie_like_parameters(serial, module):
    del serial
    loss_of(module, ids()).backward()
    for key, p in module.named_parameters():
        alike = DTensor.from_local(
            p.grad.to_local(), p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
        )
        told = [
            (type(one), one.shape, one.stride(), one.dtype, one.placements, one.requires_grad,
             one.is_leaf, one.device_mesh == p.device_mesh, one.to_local().shape)
            for one in (p.grad, alike)
        ]  # fmt: skip
        assert told[0] == told[1], key
        assert torch.equal(p.grad.full_tensor(), alike.full_tensor()), key


def _no_gradients(serial, module):
    with torch.no_grad():
        same(loss_of(module, ids()), loss_of(serial, ids()))
    assert loss_of(module, ids()).requires_grad


def _copied(serial, module):
    twin = copy.deepcopy(module)
    for one in (serial, module, twin):
        loss_of(one, ids()).backward()
    same_gradients(serial, twin)
    same_gradients(serial, module)
    assert all(p is not q for p, q in zip(module.parameters(), twin.parameters(), strict=True))


def _optimizers(serial, module):
    del serial
    for options in ({}, {"foreach": True}, {"fused": True}):
        pair = model(), copy.deepcopy(module)
        for one in pair:
            optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2, **options)
            for seed in range(3):
                optimizer.zero_grad()
                loss_of(one, ids(seed)).backward()
                optimizer.step()
        for key, p in pair[0].named_parameters():
            same(pair[1].get_parameter(key), p.detach(), key, rtol=1e-8, atol=1e-8)


def _sums_are_asynchronous(serial, module):
    del serial
    loss_of(module, ids()).backward()  # the first batch is compared over the ranks
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        loss_of(module, ids()).backward()
    transfers = module._sw_program.program.transfers()
    buckets = [one for one in transfers if one.collective is Collective.ALL_REDUCE]
    assert buckets and all_reduce.call_count == len(buckets)
    assert all(call.kwargs["async_op"] for call in all_reduce.call_args_list)


CHECKS = (
    _accumulate,
    _one_output_only,
    _backward_twice,
    _gradients_by_name,
    _clipped,
    _hooks,
    _frozen,
    _new_values,
    _other_precision,
    _lie_like_parameters,
    _no_gradients,
    _copied,
    _optimizers,
    _sums_are_asynchronous,
)


def test_one_device_without_a_process_group_has_plain_parameters():
    serial = model()
    module = sw.parallelize(serial, sw.plan(serial, (ids(),), machine=sw.Machine.preset("1xcpu")))
    assert not any(isinstance(p, DTensor) for p in module.parameters())
    assert set(module.state_dict()) == set(serial.state_dict())
    for _ in range(2):
        for one in (serial, module):
            loss_of(one, ids()).backward()
    for key, p in serial.named_parameters():
        assert torch.equal(p.grad, module.get_parameter(key).grad.reshape(p.shape)), key
