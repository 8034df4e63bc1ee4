"""Constraints on what is searched: kept by every plan, and lossless where they allow a plan."""

from dataclasses import replace
from fnmatch import fnmatch

import pytest

from shardwright.api import search_with as search
from shardwright.ir.frontier import InfeasibleError
from shardwright.ir.graph import LeafKind, Source
from shardwright.ir.layout import Mesh
from shardwright.ir.options.constraints import ConstraintError, parse_constraints
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.machine.presets import preset
from shardwright.planner.permitted import allowed_meshes
from shardwright.planner.space.constrain import Marks
from shardwright.planner.space.repeats import shorten
from shardwright.planner.strategies.preference import is_strategy
from tests.harness.layered_graphs import residual_layers
from tests.harness.plans import fastest_by_sums

MACHINE = preset("8xH100")
MESH = Mesh.parse("dp=2 tp=4")
LAYERS = 7


@pytest.fixture(scope="module")
def graph():
    """Layers whose every operator has a module of its own, so that globs can name it."""
    layers = residual_layers(LAYERS)
    ops = (replace(op, source=Source(op.name, "model.py", 1)) for op in layers.ops)
    return replace(layers, ops=tuple(ops))


@pytest.fixture(scope="module")
def free(graph):
    return search(graph, MACHINE)


def splits(plan, glob, axis):
    """What the operators that `glob` matches split along `axis` of the plan's mesh."""
    at = plan.mesh.names.index(axis)
    return {op.splits[at] for op in plan.ops if fnmatch(op.source.module, glob)}


@pytest.mark.parametrize("glob", ["layers.*.left", "layers.3.left", "layers.[05].left"])
def test_a_pin_is_kept_by_every_plan_and_binds_no_other(graph, free, glob):
    found = search(graph, MACHINE, PlanOptions.of(constraints=[f"pin {glob}=tp:n", f"mesh {MESH}"]))
    for plan in found:
        assert plan.mesh == MESH
        assert splits(plan, glob, "tp") == {"features"}
    assert found[0].step_seconds >= free[0].step_seconds * (1 - 1e-9)
    # The search minimises sums; the workspace, a maximum, is added to them afterwards.
    assert found.plans[-1].peak_bytes >= 0.9 * free.plans[-1].peak_bytes


def test_a_prohibition_is_kept_by_every_plan(graph):
    for plan in search(graph, MACHINE, PlanOptions.of(constraints=["forbid layers.*=*:batch"])):
        for axis in plan.mesh.names:
            assert not {"batch", "batch (sum)"} & splits(plan, "layers.*", axis)


def test_a_follower_that_must_differ_leads_and_the_rest_still_follows(graph):
    pins = ["pin *.both=tp:features", "pin *.hidden=tp:whole", "mesh dp=2 tp=4"]
    for plan in search(graph, MACHINE, PlanOptions.of(constraints=pins)):
        assert splits(plan, "*.both", "tp") == {"features"}
        assert splits(plan, "*.hidden", "tp") == {"-"}
        moved = {(t.value, t.consumer) for t in plan.transfers}
        assert {(f"layers.{i}.both", f"layers.{i}.hidden") for i in range(LAYERS)} <= moved


@pytest.mark.parametrize("text", ["*.weight=dp:S(0)", "*.weight=dp:S(1) tp:R", "*=*:R"])
def test_storage_is_pinned_by_the_parameters_names(graph, text):
    plan = search(graph, MACHINE, PlanOptions.of(constraints=[f"pin {text}", f"mesh {MESH}"]))[0]
    wanted = dict(part.split(":") for part in text.partition("=")[2].split())
    for parameter in plan.parameters:
        for axis, placement in zip(MESH.names, parameter.layout.placements, strict=True):
            assert str(placement) == wanted.get(axis, wanted.get("*", str(placement)))


@pytest.mark.parametrize("place", [0, 3, -1])
def test_pinning_all_that_a_plan_does_gives_that_plan(graph, free, place):
    """So nothing is lost but what is ruled out, whichever copies of a layer are told apart."""
    plan = free[place]
    names = plan.mesh.names
    pins = [
        f"pin {op.name}={' '.join(f'{a}:{w}' for a, w in zip(names, op.tiling, strict=True))}"
        for op in plan.ops
    ]
    pins += [f"pin {p.name}={p.layout}" for p in plan.parameters]
    found = search(
        graph, MACHINE, PlanOptions.of(exact=True, constraints=[*pins, f"mesh {plan.mesh}"])
    )
    for again in found:  # they differ in what is recomputed or gathered again
        assert again.tilings == plan.tilings
        assert {n: str(x) for n, x in again.layouts.items()} == {
            n: str(x) for n, x in plan.layouts.items()
        }
    near = 1.01  # near-duplicates are not shown, and the search sees sums, not peaks
    shown = free.settled(plan)
    best = found.fastest(int(max(plan.peak_bytes, shown.peak_bytes) * near))
    assert best.step_seconds <= shown.step_seconds * near


def test_folding_breaks_where_copies_are_told_apart_and_nowhere_else():
    graph = residual_layers(20)

    def kept(*texts):
        marks = Marks.on(graph, parse_constraints(texts))
        short = shorten(graph, marks.of)
        return [repeat.period for repeat in short.repeats], short.skipped

    assert kept() == kept("pin layers.*=tp:features")
    (period,), (skipped,) = kept()
    assert (period, skipped) == (7, 17)
    assert kept("pin layers.12=tp:features") == ([7, 7], (9, 4))
    assert kept("pin layers.2.left.weight=dp:R")[1] == (14,)


def test_constrained_bounds_hold_against_the_exact_search():
    graph, texts = residual_layers(2), ["pin layers.1=dp:features|whole", "mesh dp=8"]
    exact, fast = (
        search(graph, MACHINE, PlanOptions.of(constraints=texts, exact=e)) for e in (True, False)
    )
    for plan in fast:
        best = fastest_by_sums(exact, plan.peak_bytes)
        assert best.step_seconds <= plan.step_seconds * (1 + 1e-3)
        assert plan.lower_bound_seconds <= best.step_seconds * (1 + 1e-9)


def test_baselines_that_break_a_constraint_are_shown_marked_and_never_chosen(graph, free):
    texts = ("forbid *=dp:batch", f"mesh {MESH}")
    found = search(graph, MACHINE, PlanOptions.of(constraints=texts))
    plain = {b.name: b.step_seconds for b in free.baselines if not is_strategy(b)}
    assert [b.name for b in found.baselines] == list(plain)
    assert found.constraints == texts
    costs = {b.name: b.step_seconds for b in found.baselines}
    assert costs["data parallel"] == plain["data parallel"]
    assert found.broken["data parallel"] == texts
    assert set(found.broken["tensor parallel"]) == {f"mesh {MESH}"}
    assert not {plan.name for plan in found} & set(found.broken)
    (note,) = found.baselines[0].notes
    assert note == f"breaks the constraints: {'; '.join(texts)}"
    assert found[0].notes == (f"made under the constraints: {'; '.join(texts)}",)


def test_baselines_that_keep_the_constraints_are_beaten_or_chosen(graph):
    found = search(graph, MACHINE, PlanOptions.of(constraints=["pin *=dp:batch", "mesh dp=8"]))
    kept = [b for b in found.baselines if b.name not in found.broken]
    assert {"data parallel", "fully sharded"} <= {b.name for b in kept}
    for baseline in kept:
        shown = found.settled(baseline)
        best = found.fastest(shown.peak_bytes)
        assert best.lower_bound_seconds <= best.step_seconds <= shown.step_seconds


def test_a_limit_that_constraints_make_too_small_says_so(graph):
    found = search(graph, MACHINE, PlanOptions.of(constraints=["pin *=dp:R tp:R"]))
    with pytest.raises(InfeasibleError, match="of 8xH100 under these constraints fits into"):
        found.fastest("1MiB")


@pytest.mark.parametrize(
    "texts, message",
    [
        (["pin layer.*=tp:features"], "no module matches 'layer.*'; there are layers."),
        (["pin left=tp:features"], "no module matches 'left'; did you mean *left"),
        (["pin layers.0.weight=dp:R"], "no parameter matches 'layers.0.weight'; there are"),
        (
            ["pin layers.*=tp:heads"],
            "nothing in layers.* can do 'heads'; the words there are whole, batch, features",
        ),
        (["pin layers.*=tp:batch|haeds"], "can do 'haeds'"),
        (["forbid *=zp:batch"], "there is no axis zp; meshes have cp, dp, dp_"),
        (["cap zp=2"], "cap zp=2: there is no axis zp"),
        (
            ["pin *.left=tp:batch", "pin layers.0=tp:whole"],
            "no plan on 8 devices meets the constraints: pin *.left=tp:batch; pin layers.0=tp:whole"
            ": together they leave linear of layers.0.left nothing to do along tp",
        ),
        (["forbid *.sum=*:whole|batch|features|partial sums"], "nothing to do along"),
        (
            ["pin first.weight=*:S(7)"],
            "no parameter that first.weight matches can be stored as S(7)",
        ),
        (["pin *=dp:S(7)"], "can be stored as S(7); their last dimension is "),
        (["forbid *=dp:S(0.4)"], "can be stored as S(0.4)"),
        (["pin *=*:S(1)"], None),
        (["mesh dp=3"], "mesh dp=3 is of 3, not of 8 devices; give sizes"),
        (["cap dp=2", "cap tp=2"], "no mesh of 8 devices is that narrow; raise a cap"),
        (["mesh dp=8", "pin *=tp:batch"], "mesh dp=8 has no axis tp to split by"),
    ],
)
def test_what_cannot_be_is_one_line(graph, texts, message):
    if message is None:  # a pin binds what can do as it says
        assert len(search(graph, MACHINE, PlanOptions.of(constraints=texts))) > 1
        return
    with pytest.raises(ConstraintError) as error:
        search(graph, MACHINE, PlanOptions.of(constraints=texts))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_size_that_cannot_be_cut_is_named(graph):
    machine = preset("2x8xH100")
    wide = residual_layers(1, inner=lambda layer: 9)
    with pytest.raises(ConstraintError, match=r"left.* would leave a device without a part.* 9"):
        named = replace(
            wide, ops=tuple(replace(op, source=Source(op.name, "m.py", 1)) for op in wide.ops)
        )
        search(named, machine, PlanOptions.of(constraints=["pin *.left=dp:n", "mesh dp=16"]))


@pytest.mark.parametrize(
    "texts, meshes",
    [
        ([], ["dp=8", "dp=2 tp=4", "dp=4 tp=2"]),
        (["cap tp=2"], ["dp=8", "dp=4 tp=2"]),
        (["mesh tp=8", "mesh dp=4,tp=2"], ["tp=8", "dp=4 tp=2"]),
        (["pin *=tp:n"], ["dp=8", "dp=2 tp=4", "dp=4 tp=2", "tp=8"]),
        (["mesh ep=8", "pin *=ep:n"], ["ep=8"]),
        (["cap sp=1"], ["dp=8", "dp=2 tp=4", "dp=4 tp=2"]),
    ],
)
def test_meshes_are_those_that_constraints_leave(texts, meshes):
    assert [str(m) for m in allowed_meshes(8, parse_constraints(texts))] == meshes


def test_one_device_keeps_every_pin_and_its_own_mesh(graph):
    one = MACHINE.with_devices(1)
    pins = ["pin *=dp:batch", "pin *.weight=tp:S(0)"]
    assert len(search(graph, one, PlanOptions.of(constraints=pins, recompute=False))) == 1


def test_marks_leave_out_what_depends_on_constants_alone(graph):
    marks = Marks.on(graph, parse_constraints(["pin *=dp:batch", "pin *=dp:R"]))
    parameters = {leaf.name for leaf in graph.leaves_of(LeafKind.PARAMETER)}
    assert {name for name, numbers in marks.of.items() if numbers == (1,)} == parameters
    assert {name for name, numbers in marks.of.items() if numbers == (0,)} == {
        op.name for op in graph.ops
    }
