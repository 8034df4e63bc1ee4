"""Notes on what is compared in place of a plan's own numerics."""

from dataclasses import replace

import pytest

from shardwright.ir.options.numerics import Numerics
from shardwright.runtime.verify.verify_reference import notes
from tests.harness.layered_graphs import residual_layers


@pytest.mark.parametrize(
    "given, begin",
    [
        ({}, []),
        ({"rng": "fast"}, ["rng='fast' draws"]),
        ({"precision": "bf16"}, ["precision='bf16' rounds"]),
        ({"batch_norm": "local", "precision": "bf16"}, ["precision='bf16'", "batch_norm='local'"]),
    ],
)
def test_only_numerics_that_make_plans_incomparable_have_a_note(given, begin):
    found = notes(replace(residual_layers(1), numerics=Numerics(**given)))
    assert len(found) == len(begin)
    assert all(note.startswith(words) for note, words in zip(found, begin, strict=True))
