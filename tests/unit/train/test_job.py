import pytest
import torch
from torch import nn

from shardwright.train.job import Job, JobError

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
        ({"optimizer": "adamw"}, "Job.optimizer is a str, not a function .*lambda parameters: …"),
        ({"data": 3}, "Job.data is a int; give batches, or a function of none"),
        ({"schedule": 3}, "Job.schedule is a int, not a function .*lambda optimizer: …"),
        ({"steps": 0}, "Job.steps is 0; it must be at least 1"),
    ],
)
def test_a_wrong_field_is_named(changes, message):
    with pytest.raises(JobError, match=message):
        job(**changes)


def test_a_batch_of_another_kind_is_refused():
    with pytest.raises(JobError, match=r"Job\.batch gives a list; give a mapping"):
        job(batch=[1, 2]).call()


@pytest.mark.parametrize(
    "data, message",
    [
        ([{"x": torch.zeros(3, 2)}], r"Job.data gives x \(3, 2\), the example batch has \(4, 2\)"),
        ([{"y": torch.zeros(4, 2)}], r"Job.data gives x nowhere, the example batch has \(4, 2\)"),
        ([{**BATCH, "y": torch.zeros(1)}], r"Job.data gives y \(1,\), the example batch has none"),
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
