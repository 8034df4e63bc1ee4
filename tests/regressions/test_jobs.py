"""Jobs and optimizers that ended in a traceback, or were called with what they did not expect.

A user's `Job.optimizer` put weight decay on matrices alone and was called with one made-up vector,
so that it got an empty list; `optimizer=torch.optim.AdamW` was "has no attribute lower"; a
`Job.model` that raised, returned None or a module without parameters failed far from its cause.
"""

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.ir.options.optimizers import OptimizerError
from shardwright.train.data.batch import JobError
from shardwright.train.job import Job
from shardwright.train.loop import start
from shardwright.train.targets.target import build_model, optimizer_name

ONE = sw.Machine.preset("1xcpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 3)

    def forward(self, x):
        return self.up(x).square().sum()


def job(model=Net, optimizer=torch.optim.AdamW):
    return Job(model, (torch.zeros(2, 4),), optimizer, [(torch.zeros(2, 4),)], 1)


def by_dimensions(parameters):
    return torch.optim.SGD([p for p in parameters if p.ndim >= 2], lr=0.1, momentum=0.9)


def test_factories_see_the_parameters_of_the_model():
    assert optimizer_name(job(), build_model(job(), meta=True)) == "adamw"
    given = job(optimizer=by_dimensions)
    assert optimizer_name(given, build_model(given, meta=True)) == "sgd_momentum"


class Idle:
    """A stage of a pipeline that holds no parameter."""

    def parameters(self):
        return iter(())


def test_factories_that_choose_by_dimensions_make_one_for_an_idle_stage():
    assert isinstance(start(Idle(), job(optimizer=by_dimensions)).optimizer, torch.optim.SGD)


def bad_model():
    raise RuntimeError("no weights\nhere")


def bad_optimizer(parameters):
    raise TypeError("which lr?")


WRONG = {
    "raises": (
        {"model": bad_model},
        r"Job\.model raised RuntimeError at .*test_jobs\.py:\d+: no",
    ),
    "no module": ({"model": lambda: None}, r"Job\.model returned a NoneType; it must return an nn"),
    "nothing": ({"model": nn.ReLU}, r"a ReLU without parameters that require a gradient"),
    "frozen": ({"model": lambda: Net().requires_grad_(False)}, r"so there is nothing to train"),
    "optimizer": ({"optimizer": bad_optimizer}, r"Job\.optimizer raised TypeError at .*: which lr"),
    "no optimizer": ({"optimizer": lambda ps: ps}, r"Job\.optimizer returned a list; it must"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("meta", [True, False])
def test_a_job_that_cannot_be_trained_says_why_in_one_line(what, meta):
    options, said = WRONG[what]
    with pytest.raises(JobError, match=said) as error:
        optimizer_name(job(**options), build_model(job(**options), meta=meta))
    assert "\n" not in str(error.value)


def test_optimizers_are_known_by_name_class_and_object():
    model, x = Net(), torch.zeros(2, 4)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for given, name in (
        ("AdamW", "adamw"),
        (torch.optim.Adam, "adam"),
        (torch.optim.SGD, "sgd"),
        (sgd, "sgd_momentum"),
    ):
        assert sw.plan(model, (x,), machine=ONE, optimizer=given).optimizer == name
    assert sw.search(sw.capture(model, (x,)), ONE, torch.optim.RMSprop)[0].optimizer == "rmsprop"


@pytest.mark.parametrize(
    "given", [torch.optim.Adafactor, torch.optim.Rprop, "lion", torch.optim.SparseAdam]
)
def test_an_optimizer_that_is_not_known_is_an_error_before_any_work(given):
    with pytest.raises(OptimizerError, match=r"is not known; use one of sgd, .*most like it"):
        sw.plan(nn.Linear(2, 2), ("no tensor",), machine=ONE, optimizer=given)
    with pytest.raises(OptimizerError, match="optimizer is a function; give a name"):
        sw.plan(nn.Linear(2, 2), ("no tensor",), machine=ONE, optimizer=by_dimensions)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_dense_ones_of_the_same_values(kind):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = kind(7, 3, sparse=True)

        def forward(self, ids):
            return self.words(ids).square().sum()

    model, ids = Words(), torch.tensor([[1, 2, 2], [0, 2, 6]])
    plan = sw.plan(model, (ids,), machine=ONE)
    assert any(note.startswith("gradients of words are dense") for note in plan.notes)
    parallel = sw.parallelize(model, plan)
    parallel(ids).backward()
    model(ids).backward()
    found = next(parallel.parameters()).grad
    assert found.layout is torch.strided and model.words.weight.grad.is_sparse
    torch.testing.assert_close(found, model.words.weight.grad.to_dense())


def test_data_of_another_dtype_than_the_example_is_refused_before_the_search():
    wide = [(torch.zeros(2, 4, dtype=torch.float64),)]
    given = Job(Net, (torch.zeros(2, 4),), torch.optim.AdamW, wide, 1)
    with pytest.raises(JobError, match=r"Job\.data gives 0 in torch\.float64, and Job\.batch"):
        given.check_data()
    job().check_data()
