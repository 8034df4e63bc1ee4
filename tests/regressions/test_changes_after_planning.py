"""Changes of a parallel module that its program would ignore are refused in a line.

A user set `module.beta = 0.5` to anneal a loss, `layer.momentum` or the `p` of a dropout, put a
hook on a layer, replaced a layer, or called the module under autocast: the plan went on with what
it was made of, and nothing said so. What a plan can follow it follows
(`tests/harness/script_habits.py`).
"""

import copy
import types
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune

import shardwright as sw
from shardwright.ir.plan import PlanError
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.tracing.arguments import BatchError
from shardwright.tracing.call import CaptureError
from tests.harness.ranks import run_ranks
from tests.harness.training_models import MLP

ONE = sw.Machine.preset("1xcpu")
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Annealed(nn.Module):
    kind = "a"

    def __init__(self):
        super().__init__()
        self.beta, self.sizes, self.table = 0.5, (8, 16), {"a": 1.0}
        self.body, self.drop, self.norm = MLP(), nn.Dropout(0.1), nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        hidden = self.norm(self.body(self.drop(x)))
        return hidden.square().mean() * self.scale + self.beta * self.table["a"]


@pytest.fixture
def module():
    torch.manual_seed(0)
    model = Annealed()
    return sw.parallelize(model, sw.plan(model, (X,), machine=ONE))


def _assign(path, value):
    def change(module):
        *parts, name = path.split(".")
        setattr(module.get_submodule(".".join(parts)), name, value)

    return change


REFUSED = {
    "a number": (_assign("beta", 0.7), "beta was 0.5 when the plan was made, and a change of it"),
    "a table": (_assign("table", {"a": 2.0}), "table was another value when the plan was made"),
    "momentum": (_assign("norm.momentum", None), r"norm \(BatchNorm1d\): momentum was 0.1 when"),
    "dropout": (_assign("drop.p", 0.0), r"drop \(Dropout\): p was 0.1 when the plan was made"),
    "a layer": (_assign("body.up", nn.Linear(8, 16)), r"body \(MLP\) takes no other module up"),
    "a child": (_assign("body", MLP()), "body cannot be replaced"),
    "a weight": (
        _assign("body.up.weight", nn.Parameter(torch.zeros(16, 8))),
        r"body.up \(Linear\) takes no other parameter weight",
    ),
    "a forward": (
        lambda m: _assign("body.forward", types.MethodType(lambda self, x: x, m.body))(m),
        r"another forward of body \(MLP\) would not run",
    ),
    "a hook": (
        lambda m: m.body.up.register_forward_hook(lambda *_: None),
        r"a hook on body.up \(Linear\) would not run; change the model before sw.parallelize",
    ),
    "a hook before": (lambda m: m.body.register_forward_pre_hook(print), "would not run"),
    "a backward hook": (lambda m: m.body.register_full_backward_hook(print), "would not run"),
    "pruning": (
        lambda m: prune.l1_unstructured(m.body.up, "weight", 0.5),
        "takes no other parameter weight_orig",
    ),
    "a call": (lambda m: m.body(X), r"body \(MLP\) cannot be called: under a plan the model"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_program_would_ignore_is_refused(module, what):
    change, words = REFUSED[what]
    with pytest.raises(PlanError, match=words) as error:
        change(module)
    assert "\n" not in str(error.value)


def test_what_changes_nothing_or_is_followed_is_taken(module):
    module.beta = 0.5
    module.note = "the user's own"
    module.body.note = 1
    module.register_forward_hook(lambda _m, _x, y: 2 * y)
    before = module(X)
    module.scale.fill_(2.0)
    twin = copy.deepcopy(module)
    module.scale = torch.tensor(3.0)
    assert twin.note == "the user's own" and twin.scale == 2
    torch.testing.assert_close((module(X) - 1) / 2, (before - 1) * 3 / 2, atol=1, rtol=0)
    with pytest.raises(PlanError, match=r"beta was 0.5"):
        twin.beta = 0.7


def test_sub_modules_are_found_by_their_class_and_have_its_plain_attributes(module):
    kinds = [type(m) for m in Annealed().modules()]
    shown = [m for m in module.modules() if m is not module and isinstance(m, tuple(kinds))]
    assert [m.__class__ for m in shown] == kinds[1:]
    assert [n for n, _ in module.named_parameters()] == [
        n for n, _ in Annealed().named_parameters()
    ]
    assert (module.norm.momentum, module.drop.p, module.body.up.in_features) == (0.1, 0.1, 8)
    with pytest.raises(AttributeError, match=r"MLP.*has no nothing|no attribute 'nothing'"):
        _ = module.body.nothing


class Contained(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.named = nn.ModuleDict({"last": nn.Sequential(nn.Linear(8, 8), nn.ReLU())})
        self.scales = nn.ParameterList([torch.ones(8), torch.ones(8)])

    def forward(self, x):
        for block, scale in zip(self.blocks, (*self.scales, 1.0), strict=True):
            x = block(x) * scale
        return self.named["last"](x).square().mean()


def test_containers_have_the_items_of_the_models():
    model = Contained()
    module = sw.parallelize(model, sw.plan(model, (X,), machine=ONE))
    for block in copy.deepcopy(module).blocks[:2]:
        assert isinstance(block, nn.Linear)
    for block in module.blocks[:2]:
        block.requires_grad_(False)
    last = module.named["last"]
    assert (len(module.blocks), list(module.named), "last" in module.named) == (3, ["last"], True)
    assert module.blocks[-1].weight is module.get_parameter("blocks.2.weight")
    assert [type(m).__name__ for m in model.named["last"]] == [m.__class__.__name__ for m in last]
    assert module.scales[1] is module.get_parameter("scales.1")
    assert not last[1]._parameters
    module(X).backward()
    trained = [block.weight.grad is not None for block in module.blocks]
    assert trained == [False, False, True]
    with pytest.raises(PlanError, match="takes no other module 3"):
        module.blocks.append(nn.Linear(8, 8))


class Named(nn.Module):
    """Its child has the name of a property of parallel modules, two names are of one module."""

    def __init__(self):
        super().__init__()
        self.graph = nn.Linear(8, 8, bias=False)
        self.again = self.graph

    def forward(self, x):
        return self.again(self.graph(x)).square().mean()


def test_names_of_children_may_be_those_of_methods():
    model = Named()
    module = sw.parallelize(model, sw.plan(model, (X,), machine=ONE))
    torch.testing.assert_close(module(X), model(X))
    assert module.state_dict().keys() == model.state_dict().keys()
    assert module.again.bias is None


@pytest.mark.parametrize("planned", [False, True])
def test_a_call_under_another_autocast_is_refused(planned):
    torch.manual_seed(0)
    model = MLP()
    with torch.autocast("cpu", torch.bfloat16, enabled=planned):
        expected = model(X)
        module = sw.parallelize(model, sw.plan(model, (X,), machine=ONE))
        found = module(X)
    assert found.dtype == expected.dtype and torch.equal(found, expected)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=not planned),
        pytest.raises(BatchError, match=r"autocast is .* in this call and was .* when the plan"),
    ):
        module(X)


def test_an_unfrozen_layer_of_a_module_kept_whole_is_refused():
    class Decides(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8).requires_grad_(False)

        def forward(self, x):
            return self.layer(x) if x.sum() > 0 else self.layer(-x)

    model = nn.Sequential(Decides(), nn.Linear(8, 8))
    module = sw.parallelize(model, sw.plan(model, (X,), machine=ONE))
    module(X)
    module.requires_grad_(True)
    with pytest.raises(PlanError, match=r"0.layer.weight was frozen when the plan was made"):
        module(X)


def test_a_wrapped_model_is_refused_by_its_wrapper():
    with pytest.raises(
        CaptureError, match=r"shares out its batch; give what it wraps, its .module"
    ):
        sw.plan(nn.DataParallel(MLP()), (X,), machine=ONE)


def test_an_optimizer_of_the_models_parameters_is_refused():
    """It was made before `parallelize`, whose module has parameters of its own."""
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters())
    module = sw.parallelize(model, sw.plan(model, (X,), machine=ONE))
    module(X).square().mean().backward()
    with pytest.raises(PlanError, match=r"given to sw.parallelize; the module that it returned"):
        optimizer.step()
    model(X).square().mean().backward()
    optimizer.step()  # the model itself may be trained too
    with pytest.raises(PlanError, match=r"the optimizer has no parameter of this module"):
        module.train_step(optimizer, (X,))


def _unequal(plan, seeds):
    """What two ranks say whose weights and batches, or weights alone, are of their own seeds."""
    weights, batch = (dist.get_rank() if own else 0 for own in seeds)
    torch.manual_seed(weights)
    model = MLP()
    torch.manual_seed(batch)
    x = torch.randn(4, 8)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        module = sw.parallelize(model, sw.Plan.from_json(plan))
    told = [str(one.message) for one in found if "differs between ranks" in str(one.message)]
    try:
        module(x)
    except BatchError as e:
        told.append(str(e))
    return told


def unequal_ranks(plan):
    return [_unequal(plan, seeds) for seeds in ((False, False), (True, False), (False, True))]


def halves(plan):
    """What two ranks say to their halves of a batch, to ones, and to a batch of half the size."""
    told = []
    padded = torch.cat([X[:2], torch.zeros(2, 8)])  # the second rank's half is of one value
    for given in (*(x.chunk(2)[dist.get_rank()] for x in (X, padded)), torch.ones(2, 8), X[:2]):
        module = sw.parallelize(MLP(), sw.Plan.from_json(plan))
        try:
            module(X)
            told.append(tuple(module(given).shape))
        except BatchError as e:
            told.append(str(e))
    return told


@pytest.mark.ranks
def test_a_smaller_batch_is_no_part_of_one():
    """A last batch of half the size was taken for what `local_batch` returns, on both ranks."""
    plans = sw.search(sw.capture(MLP(), (X,)), sw.Machine.preset("2xcpu")).baselines
    plan = next(plan for plan in plans if plan.name == "fully sharded")
    for part, padded, ones, smaller in run_ranks(2, halves, plan_to_json(plan)):
        assert part == padded == ones == (4, 4)
        assert smaller.startswith("x of shape [2, 8] has the shape of a rank's part, and is the")


@pytest.mark.ranks
def test_ranks_with_other_batches_or_weights_are_told():
    """A DistributedSampler, or seeds of the ranks' own, mixed several batches in silence."""
    plans = sw.search(sw.capture(MLP(), (X,)), sw.Machine.preset("2xcpu")).baselines
    plan = next(plan for plan in plans if plan.name == "tensor parallel")
    for equal, weights, batch in run_ranks(2, unequal_ranks, plan_to_json(plan)):
        assert equal == []
        assert len(weights) == 1 and weights[0].startswith("up.weight differs between ranks")
        assert len(batch) == 1 and batch[0].startswith("x differs between ranks, and every rank")
