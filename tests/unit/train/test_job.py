from itertools import islice

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from shardwright.ir.options.plan_options import PlanOptions
from shardwright.runtime.plan_transfer import shapes_of
from shardwright.train.data.batch import JobError
from shardwright.train.data.shapes import fitted
from shardwright.train.job import Job
from shardwright.train.targets.target import optimizer_name

BATCH = {"x": torch.zeros(4, 2)}


def job(**changes):
    given = {
        "model": lambda: nn.Linear(2, 1),
        "batch": BATCH,
        "optimizer": torch.optim.SGD,
        "data": [BATCH],
        "steps": 3,
    }
    return Job(**{**given, **changes})


def test_a_mapping_calls_by_keyword_and_a_tuple_by_position():
    assert job().call() == ((), BATCH)
    assert job(batch=(1, 2)).call() == ((1, 2), {})
    assert job(batch=lambda: {"y": 1}).call() == ((), {"y": 1})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model": nn.Linear(2, 1).state_dict()}, "Job.model is a OrderedDict, not a function"),
        ({"model": nn.Linear(2, 1)}, "Job.model is a Linear, not a function that makes the model"),
        ({"optimizer": "adamw"}, "Job.optimizer is a str, not a function .*lambda parameters: …"),
        ({"data": 3}, "Job.data is a int; give batches, a function of none"),
        ({"schedule": 3}, "Job.schedule is a int, not a function .*lambda optimizer: …"),
        ({"clip_norm": 0.0}, "Job.clip_norm is 0.0; it must be more than 0"),
        ({"discount_steps": -1}, "Job.discount_steps is -1; it must be at least 0"),
        ({"accumulate": 0}, "Job.accumulate is 0; it must be at least 1"),
        ({"evaluation": 3}, "Job.evaluation is a int; give batches"),
        ({"steps": 0}, "Job.steps is 0; it must be at least 1"),
    ],
)
def test_a_wrong_field_is_named(changes, message):
    with pytest.raises(JobError, match=message):
        job(**changes)


def test_a_class_without_arguments_makes_the_model():
    assert job(model=nn.Identity).model is nn.Identity


def test_what_training_needs_is_not_needed_before():
    bare = Job(model=lambda: nn.Linear(2, 1), batch=BATCH)
    assert bare.call() == ((), BATCH)
    assert optimizer_name(bare, bare.model()) == PlanOptions().optimizer
    with pytest.raises(JobError, match=r"no optimizer and no data and no steps, .*; give optimi"):
        bare.require_training()
    with pytest.raises(JobError, match=r"the Job has no optimizer and no data, so"):
        bare.require_training(steps=2)
    for use, missing in (
        (bare.batches, "data"),
        (lambda: bare.built_optimizer([]), "optimizer"),
        (lambda: bare.last_step, "steps"),
    ):
        with pytest.raises(JobError, match=f"the Job has no {missing}, so"):
            use()
    job().require_training()


def test_a_batch_of_another_kind_is_refused():
    with pytest.raises(JobError, match=r"Job\.batch gives a list; give a mapping"):
        job(batch=[1, 2]).call()


@pytest.mark.parametrize(
    "data, message",
    [
        ([{"x": torch.zeros(3, 2)}], r"Job.data gives x \(3, 2\); known are x \(4, 2\): give b"),
        ([{"y": torch.zeros(4, 2)}], r"Job.data gives y \(4, 2\); known are x \(4, 2\): give b"),
        ([{**BATCH, "y": torch.zeros(1)}], r"Job.data gives x \(4, 2\), y \(1,\); known are"),
        ([3], "Job.data gives a int; give a mapping"),
        ([], "Job.data ended and gave nothing"),
    ],
)
def test_data_unlike_the_example_batch_is_refused(data, message):
    with pytest.raises(JobError, match=message):
        job(data=data).check_data()


def test_data_like_the_example_batch_passes():
    job(data=[{"x": torch.ones(4, 2)}]).check_data()
    job(batch=(torch.zeros(4), 1), data=[(torch.ones(4), 2)]).check_data()


RAGGED = {"x": torch.ones(3, 2), "y": torch.ones(3)}
FULL = {"x": torch.ones(4, 2), "y": torch.ones(4)}


def test_smaller_batches_are_padded_where_the_job_says_with_what():
    padded = fitted(RAGGED, [shapes_of((), FULL)], {"x": 0, "y": -1})
    assert padded["x"].tolist() == [[1, 1]] * 3 + [[0, 0]]
    assert padded["y"].tolist() == [1, 1, 1, -1]
    assert fitted((torch.ones(1),), [shapes_of((torch.ones(2),), {})], {0: 5})[0].tolist() == [1, 5]
    known = [shapes_of((torch.ones(n),), {}) for n in (8, 2, 4)]
    assert len(fitted((torch.ones(3),), known, {0: 5})[0]) == 4  # the smallest that holds it


@pytest.mark.parametrize(
    "padding, batch, message",
    [
        ({"x": 0}, RAGGED, "has to be padded, and Job.padding has no value for y; it has x"),
        ({}, RAGGED, "or give Job.padding to fill smaller ones up"),
        ({"x": 0, "y": 0}, {**FULL, "x": torch.ones(5, 2)}, r"Job.data gives x \(5, 2\), y \(4,\)"),
    ],
)
def test_a_batch_that_cannot_be_padded_is_refused(padding, batch, message):
    with pytest.raises(JobError, match=message):
        job(batch=FULL, data=[batch], padding=padding).check_data()


class Rows(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        return {"x": torch.full((2,), float(i))}


def test_a_dataset_gives_every_sample_once_in_each_pass_in_another_order():
    given = job(data=Rows(10)).batches()
    passes = [[int(v) for b in islice(given, 3) for v in b["x"][:, 0]] for _ in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(10))
    assert passes[0] != passes[1] and passes[0] != list(range(10))
    plain = job(data=Rows(10), shuffle=False).batches()
    assert [int(v) for b in islice(plain, 3) for v in b["x"][:, 0]] == list(range(10))
    (rest,) = job(data=Rows(10)).other_calls()
    assert rest[1]["x"].shape == (2, 2)
    assert job(data=Rows(8)).other_calls() == []


@pytest.mark.parametrize("taken", range(7))
def test_a_dataset_goes_on_where_it_was(taken):
    undisturbed = job(data=Rows(10)).batches()
    list(islice(undisturbed, taken))
    place = undisturbed.state_dict()
    rest = [b["x"].tolist() for b in islice(undisturbed, 5)]
    resumed = job(data=Rows(10)).batches()
    resumed.load_state_dict(place)
    assert [b["x"].tolist() for b in islice(resumed, 5)] == rest


def test_another_dataset_is_refused():
    place = job(data=Rows(10)).batches()
    next(place)
    with pytest.raises(JobError, match=r"is of a Dataset of 10 samples, Job\.data has 11"):
        job(data=Rows(11)).batches().load_state_dict(place.state_dict())
