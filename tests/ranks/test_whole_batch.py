"""A step of a whole batch on two ranks: hooks run while gradients of other buckets are computed."""

from unittest import mock

import pytest

import shardwright as sw
from shardwright.runtime.executor import transfers
from tests.harness.ranks import run_ranks
from tests.ranks.test_gathering import LAYERS, baselines, even

pytestmark = pytest.mark.ranks


def test_hooks_run_as_each_bucket_of_gradients_is_final():
    run_ranks(2, _hooked, [baselines(*even())[name] for name in ("ZeRO-2", "fully sharded")])


def _hooked(texts):
    for text in texts:
        order, places = _places_of_hooks(text)
        assert order == list(reversed(range(LAYERS))), order
        assert len(set(places)) == LAYERS, "each behind a wait of its own"


def _places_of_hooks(text):
    """Layers whose weights' hooks ran, in order, and how many waits had been over by then."""
    model, batch = even()
    module = sw.parallelize(model, sw.Plan.from_json(text))
    waited, seen = [], {}

    def note(number):
        def noted(_):
            seen[number] = len(waited)

        return noted

    for number in range(LAYERS):
        weight = module.get_parameter(f"layers.{number}.weight")
        weight.register_post_accumulate_grad_hook(note(number))
    with mock.patch.object(transfers, "wait_for", lambda work, _: waited.append(work.wait())):
        module(**batch).backward()
    return list(seen), list(seen.values())
