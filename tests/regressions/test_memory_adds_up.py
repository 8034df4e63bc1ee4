"""The rows of a plan's memory that did not add up to it.

A plan of a Llama of 57.3 GiB showed 18.1 GiB: `explain`, the report and its treemap left out what
the MLP saves for the backward pass, since the tables of the search have that on edges, which belong
to no module. What modules held was read from these tables, the peak from the walk over the tensors
of the program, so neither could be told from the other.

Now that walk knows of every block the module that made it, and a plan holds what each module has of
the peak, part by part. What belongs to no module has rows of its own: the first row is the peak.
"""

import json
import re
from collections import Counter
from dataclasses import replace

import pytest

import shardwright as sw
from shardwright.plan_io.plan_text import plan_from_json, plan_to_json
from shardwright.report.choice import PeakParts
from shardwright.report.page import Shown, page
from shardwright.report.text.explain import explain
from shardwright.report.text.module_rows import Costs, module_tree
from shardwright.tracing.discovery.discover import capture_with_rules
from tests.harness import models
from tests.harness.pages import content
from tests.zoo import ZOO

TEN = (
    "llama",
    "mixtral",
    "bert",
    "vit",
    "alexnet",
    "gpt2",
    "lstm lm",
    "residual lstm",
    "mlp-mixer",
    "u-net",
)
BYTES = [i for i, name in enumerate(Costs._fields) if name.endswith("_bytes")]
UNITS = {"MiB": 2**20, "GiB": 2**30}


def graph_of(model, batch):
    return capture_with_rules(model, (), batch).graph


def enlarged(plan, times=2**16):
    """The plan with so many times the memory: reduced models hold less than is printed."""

    def larger(rows, *names):
        return tuple(
            replace(row, **{name: getattr(row, name) * times for name in names}) for row in rows
        )

    data = json.loads(plan_to_json(plan))
    data["memory"] = {
        name: size * times if isinstance(size, int) and name != "rank" else size
        for name, size in data["memory"].items()
    }
    data["shares"] = [[*owner, size * times] for *owner, size in data.get("shares", ())]
    read = plan_from_json(json.dumps({**data, "peak_bytes": plan.peak_bytes * times}))
    return replace(
        read,
        parameters=larger(read.parameters, "bytes"),
        ops=larger(read.ops, "saved_bytes"),
    )


def columns_of_memory(text):
    """The numbers in MiB of the rows that `explain` prints, with how deep each row is."""
    _, units, *lines = text[text.index("\nmodule ") + 1 :].splitlines()
    edges = [0, *(found.end() for found in re.finditer(r" +\w+", units))]
    spans = [edges[i : i + 2] for i in range(1, len(edges) - 1)]
    spans = [(26, edges[1]), *spans]
    memory = [span for span in spans if units[slice(*span)].strip() == "MiB"]
    above = ""
    for line in lines[: lines.index("")]:
        numbers = [line[begin:end] for begin, end in spans]
        if all(re.fullmatch(r" +\d+\.\d\d", number) for number in numbers):
            name = line if line[:26].strip() else above
            depth = (len(name) - len(name.lstrip())) // 2
            yield depth, [float(line[begin:end]) for begin, end in memory]
        above = line


def check_text(plan):
    """Totals by kind, and the first row of the modules, are the printed peak but for rounding."""
    text = explain(plan)
    number, unit = re.search(r"peak memory +([\d.]+) (\w+) per rank", text).groups()
    peak = float(number) * UNITS[unit]
    assert peak == pytest.approx(plan.peak_bytes, abs=0.005 * UNITS[unit])
    parts = re.search(r"per rank\n((?: {16}(?!on rank).*\n)+)", text)[1]
    sizes = re.findall(r"([\d.]+) ([MG]iB)", " ".join(parts.partition("and beside")[0].split()))
    rounding = 0.005 * sum(UNITS[unit] for _, unit in [*sizes, (number, unit)])
    total = sum(float(size) * UNITS[unit] for size, unit in sizes)
    assert total == pytest.approx(peak, abs=rounding)
    rows = list(columns_of_memory(text))
    (depth, first), *others = rows
    assert depth == 0
    assert sum(first) * 2**20 == pytest.approx(plan.peak_bytes, abs=0.005 * len(first) * 2**20)
    assert all(sum(row) <= sum(first) + 0.02 for _, row in others)


def boxes(node, times=1):
    """What the treemap draws of a node: of every module itself its bytes, by place in `Costs`."""
    count = times * node["count"]
    below = [boxes(child, count) for child in node["children"]]
    for place in BYTES:
        inside = sum(child["costs"][place] * child["count"] for child in node["children"])
        own = node["costs"][place] - inside
        assert own >= 0, f"the rows below {node['name']} have more than it"
        yield place, node["path"], own * count
    for child in below:
        yield from child


def check_report(plan):
    text = page([Shown("plan", plan)], "")
    (shown,) = content(text)["plans"]
    assert shown["bytes"] == plan.peak_bytes
    assert sum(shown["held"].values()) == plan.peak_bytes
    assert sum(shown["tree"]["costs"][place] for place in BYTES) == plan.peak_bytes
    drawn = Counter()
    for place, _, size in boxes(shown["tree"]):
        drawn[Costs._fields[place]] += size
    costs = module_tree(plan).costs._asdict()
    assert drawn == {name: costs[name] for name in drawn}
    assert drawn["saved_bytes"] == plan.memory.saved


def check(plan):
    costs = module_tree(plan).costs
    assert sum(costs[place] for place in BYTES) == plan.peak_bytes == sum(PeakParts.of(plan))
    assert costs.saved_bytes == plan.memory.saved
    again = plan_from_json(plan_to_json(plan))
    assert again == plan
    check_report(plan)
    check_text(enlarged(plan))


@pytest.mark.parametrize("name", TEN)
def test_the_parts_of_memory_add_up(name):
    found = sw.search(graph_of(*ZOO[name](False)), sw.Machine.preset("4xH100"))
    for plan in {id(found[place]): found.settled(found[place]) for place in (0, -1)}.values():
        check(plan)


@pytest.fixture(scope="module")
def llama():
    return graph_of(*models.llama(layers=4, batch=16))


def test_of_recomputed_and_micro_batched_plans_too(llama):
    # Recomputing kernels this small only pays where the host does not set the pace.
    given = sw.Machine.preset("4xH100")
    device = replace(given.device, issue_seconds=0.0, launch_seconds=0.0)
    machine = replace(given, device=device)
    found = sw.search(llama, machine, micro_batches=(1, 2, 4))
    several = [plan for plan in found if plan.micro_batches > 1]
    whole = sw.search(llama, machine, micro_batches=(1,))
    again = [plan for plan in whole if any(op.segment for op in plan.ops)]
    assert several and again
    for plan in {id(plan): plan for plan in (several[0], several[-1], again[-1])}.values():
        check(found.settled(plan))


def test_of_pipelines_too(llama):
    found = sw.search(llama, sw.Machine.preset("4xH100"), stages=(2,))
    staged = [plan for plan in (*found, *found.baselines) if plan.pipeline is not None]
    assert len({plan.schedule for plan in staged}) > 1
    for plan in {plan.schedule: plan for plan in staged}.values():
        check(found.settled(plan))


def test_modules_have_what_they_save():
    """At the peak of one device all layers have saved what they need."""
    batch, length, width = 8, 32, 16  # of `models.llama`
    graph = graph_of(*models.llama(layers=2, batch=batch, length=length))
    found = sw.search(graph, sw.Machine.preset("1xH100"))
    plan = found.settled(found[0])
    for layer in ("0", "1"):
        mlp = module_tree(plan).at(f"model.layers.{layer}.mlp")
        # Of the gate, its activation, the other half and their product.
        assert mlp.costs.saved_bytes >= 4 * batch * length * width * 4
