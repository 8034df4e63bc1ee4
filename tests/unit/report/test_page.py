import json
import re
from dataclasses import replace

import pytest

from shardwright.report.page import Shown, embedded, page
from shardwright.report.timelines.chrome import TraceError, read_trace
from tests.harness import plans
from tests.harness.pages import content


def test_the_page_holds_everything_and_asks_for_nothing():
    text = page([Shown("plan", plans.transformer())], "a <title>")
    before = text.partition("<script>")[0]
    assert "<title>a &lt;title&gt;</title>" in before
    assert not re.search(r"<(link|img|iframe)\b|\bsrc=", before)
    assert "drawReport(), unreadable);</script>" in text


def test_the_data_says_what_the_plan_does():
    plan = plans.transformer()
    found = content(page([Shown("plan", plan)], "title", memory_limit=2**30))
    (shown,) = found["plans"]
    assert shown["seconds"] == plan.step_seconds
    assert sum(shown["parts"].values()) == pytest.approx(plan.step_seconds)
    assert shown["tree"]["children"][1]["name"] == "blocks.0-1"
    assert shown["tree"]["children"][1]["count"] == 2
    assert found["memory_limit"] == 2**30


def test_rivals_that_have_a_file_are_not_shown_twice():
    front = plans.frontier()
    first = front.with_rivals(front[0])
    alone = content(page([Shown("a", first)], ""))["rivals"]
    assert [r[0] for r in alone] == ["", "", "data parallel", "fully sharded"]
    both = content(page([Shown("a", first), Shown("b", front[1])], ""))["rivals"]
    assert len(both) == 3


def test_names_cannot_end_the_script():
    odd = replace(plans.simple(), name="</script><!--\u2028")
    assert content(page([Shown("x", odd)], ""))["plans"][0]["name"] == "</script><!--\u2028"
    assert "<" not in embedded({"a": "<b>&"})


def test_a_page_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one plan"):
        page([], "")


def trace(*events):
    named = {"name": "thread_name", "ph": "M", "pid": 1, "tid": 2, "args": {"name": "compute"}}
    owner = {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "rank 0"}}
    return json.dumps({"traceEvents": [named, owner, *events]})


def test_a_trace_becomes_rows_of_bars():
    event = {"name": "mm", "cat": "op", "ph": "X", "ts": 5.0, "pid": 1, "tid": 2}
    found = read_trace(
        trace({**event, "dur": 2, "args": {"module": "a.b"}}, {**event, "ts": 9, "dur": 1}), "t"
    )
    assert found.rows == ("rank 0 compute",)
    assert found.events == ((0, "mm", "op", 0.0, 2.0, "a.b"), (0, "mm", "op", 4.0, 1.0, ""))


@pytest.mark.parametrize(
    "text, message",
    [
        ("[", "is not a Chrome trace"),
        ('{"a": 1}', "is not a Chrome trace"),
        ("[1]", "is not a Chrome trace"),
        ('{"traceEvents": []}', "has no complete events"),
    ],
)
def test_what_is_no_trace_is_named(text, message):
    with pytest.raises(TraceError, match=message):
        read_trace(text, "trace.json")


def test_more_memory_is_that_of_the_same_model_and_machine():
    """Plans of another model, or on other devices, are no reason to buy memory."""
    plan = plans.transformer()
    faster = replace(plan, step_seconds=plan.step_seconds / 2, peak_bytes=8 * plan.peak_bytes)
    others = [replace(faster, fingerprint="other"), replace(faster, machine="another")]

    def help_of(*shown):
        labelled = [Shown(str(i), one) for i, one in enumerate((plan, *shown))]
        found = content(page(labelled, "", memory_limit=2 * plan.peak_bytes))
        return dict(found["plans"][0]["answer"]).get("would help", "")

    assert "50% less time" in help_of(faster)
    assert "faster" not in help_of(*others)


def test_the_page_says_who_chose_the_precision():
    chosen = replace(plans.transformer(), chosen_precision="float32, as the job builds the model")
    (shown,) = content(page([Shown("plan", chosen)], ""))["plans"]
    assert ["precision", chosen.chosen_precision] in shown["answer"]
