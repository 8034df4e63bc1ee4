"""A step of a whole batch on two ranks: hooks between buckets, errors, and foreign gradients."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import Replicate

import shardwright as sw
from shardwright.runtime.comm import collectives
from shardwright.runtime.executor.failures import StepFailedError
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
    with mock.patch.object(collectives, "wait_for", lambda work, _: waited.append(work.wait())):
        module(**batch).backward()
    return list(seen), list(seen.values())


def test_more_buckets_ahead_give_the_same_gradients():
    run_ranks(2, _ahead, baselines(*even())["fully sharded"])


def _ahead(text):
    model, batch = even()
    found, in_flight = [], []
    for ahead in (1, 3):
        plan = replace(sw.Plan.from_json(text), ahead=ahead)
        module = sw.parallelize(model, plan)
        for loss in (module(**batch), None):  # a call, and a whole step
            if loss is not None:
                loss.backward()
            else:
                module.zero_grad()
                module.forward_backward(batch)
            found.append({k: p.grad.to_local().clone() for k, p in module.named_parameters()})
        text_of = str(module._sw_program.program)
        in_flight.append(text_of.partition(" = forward")[0].count("all_gather"))
    assert in_flight[1] == in_flight[0] + 2, in_flight
    for other in found[1:]:
        assert all(torch.equal(other[key], gradient) for key, gradient in found[0].items())


class StopError(Exception):
    """A step that fails."""


def test_after_an_error_nothing_runs_until_the_ranks_agree():
    run_ranks(2, _fails, baselines(*even())["ZeRO-2"])


def _fails(text):
    model, batch = even()
    module = sw.parallelize(model, sw.Plan.from_json(text))
    module(**batch).backward()
    expected = {name: p.grad.to_local().clone() for name, p in module.named_parameters()}
    parts = module._sw_program.regions.parts
    assert len(parts) > 2
    for backward in (False, True):
        _stopped(module, batch, parts[1], backward)
        with pytest.raises(StepFailedError, match=r"call recover\(\) on every rank"):
            module(**batch)
        module.recover()
        module.zero_grad()
        module(**batch).backward()
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter.grad.to_local(), expected[name]), name
    _gradients_elsewhere_are_refused(module, batch, expected)
    # Rank 1 has started one more gather: nobody may wait for it.
    _stopped(module, batch, parts[torch.distributed.get_rank()], False)
    with pytest.raises(StepFailedError, match="failed in different places"):
        module.recover()
    with pytest.raises(StepFailedError, match="other ranks may be elsewhere"):
        module(**batch)


def _stopped(module, batch, region, backward):
    """A call, or its backward pass, fails in a region."""

    def stop(*_):
        raise StopError

    def stop_backward(_region, _given, results):
        for one in results:
            one.register_hook(stop)

    hook = region.register_forward_hook(stop_backward if backward else stop)
    with pytest.raises(StopError):
        module(**batch).backward()
    hook.remove()


def _gradients_elsewhere_are_refused(module, batch, expected):
    """A gradient that lies otherwise than its parameter is not added to."""
    parameter = next(p for p in module.parameters() if not p.placements[0].is_replicate())
    parameter.grad = parameter.grad.redistribute(placements=[Replicate()])
    with pytest.raises(RuntimeError, match="gradients are added where their parameter lies"):
        module(**batch).backward()
    module.zero_grad()
    module(**batch).backward()
    module(**batch).backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad.to_local(), 2 * expected[name])
