"""Training configs with mutations, and what must hold of each: a result, or one clean error."""

from hypothesis import strategies as st

from shardwright.frameworks.errors import FrameworkError
from shardwright.frameworks.reading import read_text
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


def check(text, devices=8, framework=None):
    """Whether a text is read; one that is refused is so in one line."""
    try:
        config = read_text(text, devices=devices, framework=framework)
    except FrameworkError as e:
        assert "\n" not in str(e) and len(str(e)) < 1000, e
        return False
    else:
        assert Strategy.parse(str(config.strategy)) == config.strategy
        lines = text.count("\n") + 1
        assert all(1 <= key.line <= lines for key in (*config.used, *config.unused))
    return True
