"""Mutated training configs: a result, or one clean error in one line."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardwright.frameworks.errors import FrameworkError
from shardwright.frameworks.reading import read_text
from shardwright.frameworks.registry import FRAMEWORKS
from shardwright.ir.strategy.strategy import Strategy
from tests.harness import published_configs

TEXTS = sorted(
    text
    for name, text in vars(published_configs).items()
    if name.isupper() and not name.startswith("_")
)
VALUES = st.sampled_from(
    (
        *("0", "-1", "7", "1e9", "99999999999999999999", "nan", "true", "null", '"x"', "[1, 2]"),
        *("{}", "$TP", "${A:-$B}", "$((1/0))", "!!python/object:os.system x", "&a [*a]", "<<: *a"),
        *("(((", "]", '"', "'", "\\", "\t", "#", "\x00", "\ufeff", "1__0", "0x10", "2020-99-99"),
    )
)


@st.composite
def mutated(draw):
    """A config with a few lines, words or characters deleted, repeated or replaced."""
    text = draw(st.sampled_from(TEXTS))
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(("value", "delete", "insert", "line", "repeat")))
        lines = text.split("\n")
        at = draw(st.integers(0, len(lines) - 1))
        if kind == "value":
            head, mark, _ = lines[at].rpartition(draw(st.sampled_from("=: ")))
            lines[at] = f"{head}{mark} {draw(VALUES)}"
        elif kind == "line":
            del lines[at]
        elif kind == "repeat":
            lines.insert(at, lines[draw(st.integers(0, len(lines) - 1))])
        text = "\n".join(lines)
        place = draw(st.integers(0, len(text)))
        if kind == "delete":
            text = text[:place] + text[place + draw(st.integers(1, 9)) :]
        elif kind == "insert":
            text = text[:place] + draw(VALUES) + text[place:]
    return text


@given(text=mutated(), devices=st.sampled_from((None, 8, 64)), named=st.booleans(), data=st.data())
@pytest.mark.slow
def test_a_mutated_config_is_read_or_refused_in_one_line(text, devices, named, data):
    framework = data.draw(st.sampled_from((*FRAMEWORKS, None))) if named else None
    check(text, devices, framework)


def check(text, devices=8, framework=None):
    try:
        config = read_text(text, devices=devices, framework=framework)
    except FrameworkError as e:
        assert "\n" not in str(e) and len(str(e)) < 1000, e
    else:
        assert Strategy.parse(str(config.strategy)) == config.strategy
        lines = text.count("\n") + 1
        assert all(1 <= key.line <= lines for key in (*config.used, *config.unused))


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
