"""Mutated training configs: a result, or one clean error in one line."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardwright.frameworks.errors import FrameworkError
from shardwright.frameworks.reading import read_text
from shardwright.frameworks.registry import FRAMEWORKS
from tests.harness.mutated_configs import check, mutated

SEEN = Path(__file__).parents[2] / "scripts" / "campaign_configs.json"


@given(text=mutated(), devices=st.sampled_from((None, 8, 64)), named=st.booleans(), data=st.data())
@pytest.mark.slow
def test_a_mutated_config_is_read_or_refused_in_one_line(text, devices, named, data):
    framework = data.draw(st.sampled_from((*FRAMEWORKS, None))) if named else None
    check(text, devices, framework)


@given(st.text(max_size=200))
@example("a: &a [*a, *a]")
@example("a: &a\n  b: *a")
@example("x: &x {a: 1}\ny: &y {<<: *x}\nz: {<<: [*y, *y]}")
@example("[" * 5000)
@example("{" * 5000)
@example("[a]\nb = " + "[" * 5000)
@example('{"a": ' * 3000 + "1" + "}" * 3000)
@example("def f():\n    return " + "(" * 300 + ")" * 300)
@example("--tensor-model-parallel-size " + "9" * 5000)
@example("distributed_type: FSDP\nnum_processes: " + "9" * 5000)
@example('{"zero_optimization": {"stage": ' + "9" * 5000 + "}}")
@example("[parallelism]\ntensor_parallel_degree = " + "9" * 5000)
@example("A=$A$A\n" * 50 + "--tensor-model-parallel-size $A")
@example("MODEL_ARGS:\n  --pipeline-model-parallel-layout: '" + "(" * 50 + "t*9999)*9999'")
def test_any_text_is_read_or_refused_in_one_line(text):
    check(text)


def test_layouts_that_expand_without_bound_are_refused():
    text = "t" + "*9999" * 9
    sizes = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2"
    flags = f"{sizes} --pipeline-model-parallel-layout '({text}|)*9999L'"
    with pytest.raises(FrameworkError, match="a layout such as"):
        read_text(flags, devices=8)


def test_a_thousand_mutated_configs_were_tried():
    tried = json.loads(SEEN.read_text())
    assert tried["files"] >= 1000 and tried["read"] + tried["refused"] == tried["files"]
    assert tried["read"] > 100 and tried["refused"] > 100
