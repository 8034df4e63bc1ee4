"""Syntaxes of config files: keys with lines and places, and single keys changed in place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.frameworks.documents.document import MOST_ENTRIES
from shardwright.frameworks.documents.forms import edited, parse_document
from shardwright.frameworks.documents.python_text import Code
from shardwright.frameworks.errors import FrameworkError

JSON = '{\n  "a": 1, "b": {"c": [1, 2], "d": {}},\n  "e": "x"\n}\n'
TOML = '# head\n[a]\nx = 1 # one\ny = [\n  1, # a\n  2]\n[b.c]\nz = "q#"\ni = {k = 1}\n'
YAML = "# head\na: 1 # one\ns:\n  x: FULL # c\n  l:\n  - 1\n  - 2\n\nd: {}\nn:\nf: {g: 1}\n"
FLAGS = (
    "#!/bin/bash\n#SBATCH --nodes=4\nTP=${TP:-8}\nN=$((2*TP))\nARGS=(\n  --size $TP # hm\n"
    "  --flag\n  --world=$N\n)\nOPT=\"--a 1 --b 'x'\"\nif x; then\n  ARGS+=(--lr 1e-3)\nfi\n"
)
PYTHON = (
    "def base():\n    return T.Config(training=TC(a=1, b=[C.D(z=2)]), ac=Full.Config())\n\n\n"
    "def config():\n    config = base()\n    config.training.a = 4\n    return config\n"
)


def values(text):
    return parse_document("file", text).values()


def lines(text):
    return {key: entry.line for key, entry in parse_document("file", text).entries.items()}


def test_keys_have_values_and_lines():
    assert values(JSON) == {"a": 1, "b.c": [1, 2], "b.d": {}, "e": "x"}
    assert lines(JSON) == {"a": 2, "b.c": 2, "b.d": 2, "e": 3}
    assert values(TOML) == {"a.x": 1, "a.y": [1, 2], "b.c.z": "q#", "b.c.i.k": 1}
    assert lines(TOML) == {"a.x": 3, "a.y": 4, "b.c.z": 8, "b.c.i.k": 9}
    assert values(YAML) == {"a": 1, "s.x": "FULL", "s.l": [1, 2], "d": {}, "f.g": 1}
    assert lines(YAML) == {"a": 2, "s.x": 4, "s.l": 5, "d": 9, "n": 10, "f.g": 11}
    assert values(FLAGS) == {
        **{"#SBATCH.nodes": "4", "$TP": "8", "$N": "16", "$ARGS": "", "$OPT": ""},
        **{"size": "8", "flag": True, "world": "16", "a": "1", "b": "x", "lr": "1e-3"},
    }
    assert parse_document("file", FLAGS).conditional == {11, 12, 13}
    assert values(PYTHON)["training.a"] == 4
    assert values(PYTHON)["training.b.0.z"] == 2
    assert values(PYTHON)["ac"] == "Full.Config"


def test_edits_change_single_keys():
    def changed(text, changes, near=None):
        return edited(parse_document("file", text), changes, near).text

    assert changed(JSON, {"a": 5, "e": None, "b.q": True}) == (
        '{\n  "a": 5, "b": {"c": [1, 2], "d": {}, "q": true}\n}\n'
    )
    assert changed(TOML, {"a.x": 5, "a.n": "s", "b.c.z": None, "m.o": [1]}) == (
        '# head\n[a]\nx = 5 # one\ny = [\n  1, # a\n  2]\nn = "s"\n[b.c]\ni = {k = 1}\n'
        "\n[m]\no = [1]\n"
    )
    assert changed(YAML, {"a": 5, "s.l": [3], "s.z": "no", "d.k": 3, "n.q": 1, "f.h": 2}) == (
        "# head\na: 5 # one\ns:\n  x: FULL # c\n  l: [3]\n  z: 'no'\n\nd:\n  k: 3\nn:\n  q: 1\n"
        "f: {g: 1, h: 2}\n"
    )
    assert changed(FLAGS, {"size": 4, "flag": None, "world": 2, "new": True}, "size") == (
        FLAGS.replace("--size $TP # hm\n  --flag\n", "--size 4 --new # hm\n").replace(
            "=$N\n", "=2\n"
        )
    )
    assert changed(PYTHON, {"training.a": 5, "ac": Code("None", None), "q.r": "s"}) == (
        PYTHON.replace("a = 4", "a = 5").replace(
            "    return config\n",
            "    config.ac = None\n    config.q.r = 's'\n    return config\n",
        )
    )


@pytest.mark.parametrize("text", [TOML, YAML, JSON, PYTHON])
@given(st.text(max_size=12), st.integers(-9, 9), st.booleans())
def test_values_are_read_back_as_they_were_written(text, word, number, switch):
    document = parse_document("file", text)
    new = {"p.word": word, "p.number": number, "p.switch": switch, "p.list": [word, number]}
    try:
        after = edited(document, new, None)
    except FrameworkError:
        # A syntax may have no way to write a control character; then nothing is written.
        assert not word.isprintable()
        return
    assert after.values() == {**document.values(), **new}


def test_what_cannot_be_changed_alone_is_refused():
    inline = parse_document("file", TOML)
    with pytest.raises(FrameworkError, match=r"line 9: b\.c\.i\.k cannot be changed in place"):
        edited(inline, {"b.c.i.k": 2}, None)
    merged = parse_document("file", "a: &a {x: 1}\nb: {<<: *a}\n")
    with pytest.raises(FrameworkError, match="cannot be changed without changing other keys"):
        edited(merged, {"a.x": 2}, None)


def test_files_of_very_many_keys_are_refused():
    rows = ", ".join(f'"{n}": 0' for n in range(MOST_ENTRIES + 1))
    with pytest.raises(FrameworkError, match="more than 20000 keys"):
        parse_document("file", f"{{{rows}}}")
