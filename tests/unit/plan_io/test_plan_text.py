"""Plan files: written whole or not at all, read as data, refused in one line that says why."""

import json
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwright as sw
from shardwright.ir.memory import Memory, Moment, Share
from shardwright.ir.plan import FORMAT, Phase, PlanError
from shardwright.plan_io.files import load_plan, save_plan
from shardwright.plan_io.plan_text import plan_from_json, plan_to_json
from shardwright.report.text.explain import explain
from tests.harness import models, plans

PLAN = plans.transformer()
TEXT = plan_to_json(PLAN)
DATA = json.loads(TEXT)
SHARES = (Share("embed", "saved", 100 * plans.MIB), Share(None, "batch", 50 * plans.MIB))
SETTLED = plan_to_json(replace(PLAN, memory=Memory.of(SHARES, rank=0, at="linear, backward")))


def edited(**fields):
    return json.dumps({**json.loads(TEXT), **fields})


def row(table, index, value, text=TEXT):
    """The plan's JSON with one field of the first row of a table replaced."""
    data = json.loads(text)
    data[table][0][index] = value
    return json.dumps(data)


def test_a_plan_file_says_who_chose_the_precision():
    chosen = replace(PLAN, chosen_precision="float32, from config.json")
    assert plan_from_json(plan_to_json(chosen)) == chosen
    assert "trained in    float32, from config.json" in explain(chosen)
    assert "chosen_precision" not in DATA


def test_a_plan_file_says_that_tokens_go_to_hosts_first():
    by_host = replace(PLAN, expert_skew=1.25, host_devices=8)
    assert plan_from_json(plan_to_json(by_host)) == by_host
    page = " ".join(explain(by_host).split())
    assert "1.25 times the mean of rows tokens go once to each host of 8 devices" in page
    assert "host_devices" not in DATA


def test_a_plan_that_is_older_than_fused_logits_runs_on_the_graph_with_their_cast():
    data = json.loads(TEXT)
    assert data.pop("logits") == "fused"
    older = plan_from_json(json.dumps(data))
    assert older == replace(PLAN, numerics=replace(PLAN.numerics, logits="model"))


def test_a_plan_file_is_the_plan(tmp_path):
    save_plan(PLAN, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == PLAN
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_file_has_a_row_per_line_to_be_read_and_compared():
    lines = TEXT.splitlines()
    for op in PLAN.ops:
        assert sum(line.startswith(f'  ["{op.name}", "{op.target}"') for line in lines) == 1


def test_memory_is_read_with_what_modules_have_of_it_and_without():
    plan = plan_from_json(SETTLED)
    assert plan.memory.shares == SHARES
    assert plan.memory.parts()["saved"] == 100 * plans.MIB
    data = json.loads(SETTLED)
    del data["shares"]  # as older versions wrote it
    older = plan_from_json(json.dumps(data))
    assert older.memory == replace(plan.memory, shares=())
    assert explain(older).count("(saved for backward)") == 1


def test_memory_over_the_step_is_kept_and_checked():
    memory = Memory.of(SHARES, rank=0, at="linear, backward")
    moments = (Moment("linear, forward", 1, 2, 3, 4, 5),)
    text = plan_to_json(replace(PLAN, memory=replace(memory, curve=moments)))
    assert plan_from_json(text).memory.curve == moments
    with pytest.raises(PlanError, match="4 sizes"):
        plan_from_json(text.replace('["linear, forward", 1, ', '["linear, forward", '))


def test_what_is_asked_of_a_plan():
    assert PLAN.devices == 4
    assert PLAN.layouts["embed.weight"] == plans.layout("dp:S(0) tp:R")
    assert PLAN.layouts["linear_0"] == plans.layout("dp:S(0) tp:S(1)")
    assert PLAN.tilings["linear_0"] == ("m", "n")
    assert str(PLAN) == "searched: dp=2 tp=2 on 4xcpu, 45.63 ms/step, 150 MiB/rank"
    assert str(replace(PLAN, peak_bytes=1536)).endswith(", 1.5 KiB/rank")


CASES = {
    "empty": ("", "is not JSON (Expecting value"),
    "no JSON": ("plan: 1", "it is corrupt or cut short, plan again"),
    "truncated": (TEXT[: len(TEXT) // 2], "it is corrupt or cut short, plan again"),
    "nested too deeply": ("[" * 10**5, "is not JSON"),
    "a number too long": ("1" * 5000, "is not JSON"),
    "another kind of file": ('{"a": 1}', "has no format number; give a file that `plan` wrote"),
    "a list": ("[1, 2]", "has no format number; give a file that `plan` wrote"),
    "newer": (
        edited(format=FORMAT + 1),
        f"has format {FORMAT + 1}, this version reads up to {FORMAT}; upgrade shardwright or plan"
        " again",
    ),
    "no mesh": (
        json.dumps({k: v for k, v in json.loads(TEXT).items() if k != "mesh"}),
        "lacks the field 'mesh'; it is damaged, plan again",
    ),
    "mesh of no sizes": (edited(mesh="dp"), "'dp' is not name=size, as in 'dp=2 tp=4'"),
    "mesh that is a number": (edited(mesh=4), "4 where a str is needed"),
    "other axes": (edited(mesh="dp=4"), "must name the axes of mesh dp=4, in order"),
    "placement": (row("parameters", 1, "dp:S(0) tp:X"), "placement 'X' is none of R, P, S(dim)"),
    "layout that is no text": (row("parameters", 1, 3), "3 where a str is needed"),
    "tiling": (row("ops", 2, "m"), "['m'] for mesh dp=2 tp=2 of 2 axes); edit it back"),
    "negative time": (edited(step_seconds=-1), "-1 where a number of at least 0 is needed"),
    "time that is no number": (edited(step_seconds=float("nan")), "nan where a number"),
    "time that is too large": (edited(step_seconds=10**400), "has a field of the wrong form"),
    "bytes that are text": (edited(peak_bytes="1GiB"), "'1GiB' where a int is needed"),
    "shape": (row("inputs", 1, [8, "x"]), "'x' where a int is needed"),
    "short row": (edited(ops=[["relu"]]), "has a field of the wrong form (not enough values"),
    "shares": (row("shares", 2, 99, SETTLED), "do not add up to the memory"),
    "share of nothing": (row("shares", 2, 0, SETTLED), "a number of at least 1 is needed"),
    "part of the memory": (row("shares", 1, "x", SETTLED), "'x', which is no part"),
    "format": (edited(format=-1), "has no format number"),
    "negative bytes": (edited(peak_bytes=-1), "-1 where a number from 0 to 2^63 is needed"),
    "bytes beyond any disk": (row("parameters", 2, 2**64), "a number from 0 to 2^63 is needed"),
    "infinite time": (edited(step_seconds=float("inf")), "Infinity where a number is needed"),
    "a large mesh": (
        json.dumps(json.loads(TEXT) | {"mesh": f"dp={10**30} tp=2"}),
        "a mesh of 2000000000000000000000000000000 devices, at most 1048576 are planned",
    ),
    "an operator twice": (
        edited(ops=[*DATA["ops"], DATA["ops"][0]], reads=[*DATA["reads"], DATA["reads"][0]]),
        f"two operators called {PLAN.ops[0].name!r}",
    ),
    "a parameter twice": (
        edited(parameters=[DATA["parameters"][0], *DATA["parameters"]]),
        "two parameters called",
    ),
    "an input twice": (edited(inputs=[DATA["inputs"][0]] * 2), "two inputs called"),
    "a constant twice": (edited(constants=[["kwargs.f", 1]] * 2), "two constants called"),
    "cut": (edited(stages=2, cuts=["nowhere"]), "a stage that begins with 'nowhere'"),
    "backward": (row("ops", -1, 10**6), "takes longer backward than forward and backward"),
    "collective": (row("transfers", 3, "all_reduce xx"), "'all_reduce xx' along no axis of dp=2"),
    "escape": (edited(name="\x1b[2J"), "has the control character '\\x1b'"),
    "escape in a constant": (edited(constants=[["kwargs.f", "\x9b2J"]]), "control character"),
    "reversed": (edited(notes=["a \u202e b"]), "has the control character '\\u202e'"),
    "half a surrogate pair": (edited(fingerprint="\ud800"), "has the control character"),
    "another line": (edited(name="a\u2028b"), "has the control character '\\u2028'"),
    "notes in one text": (edited(notes="abc"), "'abc' where a list is needed"),
    "cuts in one text": (edited(cuts=""), "'' where a list is needed"),
    "bound above the time": (edited(lower_bound_seconds=9), "a lower bound of 9.0 seconds above"),
    "time of no timeline": (
        json.dumps(json.loads(plan_to_json(plans.timed(PLAN))) | {"step_seconds": 7.0}),
        "a step of 7.0 seconds whose tasks end after 0.04563",
    ),
    "peak of no parts": (
        json.dumps(json.loads(SETTLED) | {"peak_bytes": 5}),
        "a peak of 5 bytes with parts of 157286400",
    ),
    "overlap": (edited(overlap=2), "an overlap of 2.0, which is a part from 0 to 1"),
    "micro-batches": (edited(micro_batches=2**40), "micro-batches, at most 1048576"),
    "times": (row("transfers", slice(6, None), [2**70]), "a number from 0 to 2^63 is needed"),
    "consumer": (row("transfers", 1, "nowhere"), "a transfer to 'nowhere', which is no operator"),
    "constant": (edited(constants=[["kwargs.f", {"a": 1}]]), "where a plain constant is needed"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_no_plan_is_refused_in_one_line(name, tmp_path):
    text, message = CASES[name]
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError) as refused:
        load_plan(path)
    assert message in str(refused.value)
    assert str(refused.value).startswith(f"plan {path}: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"], ids=["missing", "binary"])
def test_a_file_that_cannot_be_read_is_refused(content, tmp_path):
    path = tmp_path / "plan.json"
    if content:
        path.write_bytes(content)
    with pytest.raises(PlanError, match=r"cannot read plan .*plan\.json: .*give a file that"):
        load_plan(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
)


@given(st.data())
def test_a_plan_edited_anywhere_is_read_or_refused(data):
    """Whatever stands in a field, the answer is a plan or a `PlanError`."""
    tree = json.loads(TEXT)
    at, key = tree, data.draw(st.sampled_from(sorted(tree)))
    while isinstance(at[key], list) and at[key] and data.draw(st.booleans()):
        at, key = at[key], data.draw(st.integers(0, len(at[key]) - 1))
    at[key] = data.draw(json_values)
    try:
        plan_from_json(json.dumps(tree))
    except PlanError as e:
        assert str(e)


@given(st.integers(0, len(TEXT)))
def test_a_plan_cut_anywhere_is_refused(length):
    if length < len(TEXT):
        with pytest.raises(PlanError):
            plan_from_json(TEXT[:length])


def test_reading_a_plan_runs_nothing(tmp_path):
    """No import, no file, no process, whatever its texts say."""
    code = "__import__('os').system('false')"
    harmful = edited(name=code, notes=[code], machine=code)
    harmful = harmful.replace("aten.linear.default", code).replace("searched", "!!python/object")
    path = tmp_path / "plan.json"
    path.write_text(harmful)
    seen = []
    watching = True

    def watch(event, args):
        if watching:
            seen.append((event, args))

    sys.addaudithook(watch)
    try:
        plan = load_plan(path)
    finally:
        watching = False
    assert plan.ops[1].target == code
    assert {(event, args[0]) for event, args in seen} == {("open", str(path))}


def test_a_plan_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(PlanError, match=r"cannot write plan .*: No such file or directory; choose"):
        save_plan(PLAN, tmp_path / "missing" / "plan.json")
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(PlanError, match=r"cannot write plan .*plan\.json"):
        save_plan(PLAN, tmp_path / "plan.json")
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_plans_of_recomputed_layers_that_older_versions_wrote_gather_copies_again():
    model, batch = models.small_llama(2, 16, 4, 8, 16)
    graph = sw.capture(model, (), batch)
    kept, again = (
        sw.price(graph, "4xH100", f"dp_shard=4 {form} ac=full", "adamw")
        for form in ("zero=1", "zero=3")
    )
    assert json.loads(plan_to_json(kept))["format"] == FORMAT
    assert plan_from_json(plan_to_json(kept)) == kept
    whole = sw.price(graph, "4xH100", "dp_replicate=2 tp=2 zero=0 ac=full", "adamw")
    assert json.loads(plan_to_json(whole))["format"] == 1, "no weight is copied"
    data = json.loads(plan_to_json(again))
    assert data["format"] == 1
    gathered = {one.value for one in again.transfers if one.phase is Phase.RECOMPUTE}
    changed = 0
    for found in data["parameters"]:
        changed += found[0] in gathered and found[-1] == "regathered"
        found[-1] = "kept"  # which those versions took as gathered again in recomputed layers
    older = plan_from_json(json.dumps(data))
    assert {p.name for p in older.parameters if p.regathered} == gathered
    assert changed > 2
