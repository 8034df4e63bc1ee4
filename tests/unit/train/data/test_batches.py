import json
import random
from itertools import islice

import numpy as np
import pytest
import torch

from shardwright.train.data.batch import JobError
from shardwright.train.data.batches import Batches
from shardwright.train.data.randomness import random_states, seed_all, set_random_states
from shardwright.train.json_codec import from_json, to_json


def drawn():
    """Three batches that depend on every generator there is."""
    for i in range(3):
        yield (i, torch.rand(()).item(), random.random(), np.random.rand())


class KnowsItsPlace:
    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 4:
            self.at += 1
            yield (self.at,)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_data_starts_anew_when_it_ends():
    assert list(islice(Batches([(1,), (2,)]), 5)) == [(1,), (2,), (1,), (2,), (1,)]
    assert list(islice(Batches(lambda: iter([(1,)])), 2)) == [(1,), (1,)]


def test_data_that_is_used_up_says_so():
    with pytest.raises(JobError, match=r"Job\.data ended .* give a function that returns a fresh"):
        list(islice(Batches(iter([(1,), (2,)])), 3))


@pytest.mark.parametrize("taken", range(8))
@pytest.mark.parametrize("data", [drawn, KnowsItsPlace, [(1,), (2,), (3,)]])
def test_who_goes_on_from_a_place_gets_what_would_have_come(data, taken):
    seed_all(1)
    undisturbed = Batches(data)
    before = list(islice(undisturbed, taken))
    assert len(before) == taken
    place = json.dumps(to_json({"data": undisturbed.state_dict(), "random": random_states()}))
    rest = list(islice(undisturbed, 6))
    seed_all(99)  # another process
    resumed, state = Batches(data), from_json(json.loads(place))
    resumed.load_state_dict(state["data"])
    set_random_states(state["random"])
    assert list(islice(resumed, 6)) == rest


def test_shorter_data_is_refused():
    batches = Batches([(1,), (2,), (3,)])
    list(islice(batches, 3))
    with pytest.raises(JobError, match="is 3 batches into a pass over the data, which has 2 now"):
        Batches([(1,), (2,)]).load_state_dict(batches.state_dict())
