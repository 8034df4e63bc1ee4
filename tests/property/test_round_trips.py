"""Laws 7 and 8: what is written as JSON reads back equal, and is written again as equal bytes."""

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from shardwright.ir.atomic_io import printable
from shardwright.ir.graph import (
    Graph,
    Leaf,
    LeafKind,
    Op,
    Ref,
    Source,
    Symbol,
    Tensor,
)
from shardwright.ir.layout import REPLICATE, Layout, Mesh, Shard
from shardwright.ir.options.numerics import CHOICES, Numerics
from shardwright.ir.pipeline import AXIS, NONE
from shardwright.ir.plan import (
    InputSpec,
    Phase,
    Plan,
    PlannedOp,
    PlannedParameter,
    PlannedTransfer,
    Remark,
    RemarkKind,
    Rival,
)
from shardwright.ir.schedules.registry import SCHEDULES
from shardwright.ir.timeline import Stream, Task, Timeline, Track
from shardwright.plan_io.graph_text import graph_from_json, graph_to_json
from shardwright.plan_io.plan_text import plan_from_json, plan_to_json
from tests.property.test_layout_laws import meshes, names

text = st.text(max_size=8).map(printable)  # what files may hold
counts = st.integers(0, 2**40)
seconds = st.floats(0, 1e9)
numbers = st.floats(allow_nan=False)
plain = st.none() | st.booleans() | st.integers() | numbers | text
symbols = st.builds(Symbol, st.sampled_from(["dtype", "layout", "memory_format", "device"]), names)
arguments = st.recursive(
    plain | names.map(Ref) | symbols, lambda inner: st.lists(inner, max_size=3).map(tuple)
)
sources = st.builds(Source, text, text, st.integers(0, 9999))
shapes = st.lists(st.integers(0, 99), max_size=3).map(tuple)


def some(strategy, **kwargs):
    return st.lists(strategy, max_size=3, **kwargs).map(tuple)


graphs = st.builds(
    Graph,
    leaves=some(st.builds(Leaf, names, st.sampled_from(LeafKind), some(text))),
    ops=some(
        st.builds(
            Op,
            name=names,
            target=st.just("aten.mm.default"),
            args=some(arguments),
            kwargs=some(st.tuples(names, arguments)),
            outputs=some(names),
            source=sources,
            saves=some(names),
            extra_saved=counts,
        )
    ),
    outputs=some(names),
    values=some(
        st.builds(Tensor, names, shapes, st.sampled_from(["float32", "int64"]), st.booleans(), text)
    ),
    updates=some(st.tuples(names, names)),
    constants=some(st.tuples(text, plain)),
)


@given(graphs)
def test_graphs_read_back_equal(graph):
    again = graph_from_json(graph_to_json(graph))
    assert again == graph
    assert repr(again) == repr(graph), "1 is not 1.0 is not True"
    assert graph_to_json(again) == graph_to_json(graph)
    assert again.fingerprint == graph.fingerprint


remarks = st.builds(Remark, st.sampled_from(RemarkKind), text, text, some(names), counts)
words = st.tuples(*(st.sampled_from(words) for words in CHOICES.values()))
numerics = words.filter(lambda given: given[3] in ("stored", given[2])).map(lambda w: Numerics(*w))


places = st.builds(Source, text, text, st.integers(0, 9999))
constants = st.none() | st.booleans() | st.integers() | numbers | text


def _name(one):
    return one.name


def _with_backward(op):
    """The operator, a part of whose seconds are for gradients."""
    return st.floats(0, op.seconds).map(lambda part: replace(op, backward_seconds=part))


@st.composite
def timelines(draw):
    tracks = st.builds(Track, text, st.sampled_from(Stream), text)
    tasks = []
    for number in range(draw(st.integers(1, 3))):
        after = some(st.integers(0, number - 1)) if number else st.just(())
        task = st.builds(Task, text, tracks, seconds, after, text, text, st.booleans())
        tasks.append(draw(task))
    return Timeline(tuple(tasks), tuple(draw(seconds) for _ in tasks))


@st.composite
def plans(draw):
    mesh = whole_mesh = draw(meshes)
    schedule = draw(st.sampled_from([NONE, *SCHEDULES]))
    if schedule != NONE:
        whole_mesh = Mesh(((AXIS, draw(st.integers(1, 8))), *mesh.axes))
    placement = st.just(REPLICATE) | st.builds(Shard, st.integers(0, 3), st.integers(0, 3))
    layouts = st.lists(placement, min_size=len(mesh.axes), max_size=len(mesh.axes)).map(
        lambda found: Layout(mesh, tuple(found))
    )
    tilings = st.tuples(*[st.sampled_from(["-", "m", "b0", "+1"]) for _ in mesh.axes])
    splits = st.tuples(*[st.sampled_from(["whole", "batch", "features (sum)"]) for _ in mesh.axes])
    axis = st.sampled_from(mesh.names)
    collectives = axis.map(lambda name: (f"slice {name}", f"all_gather {name}"))
    ops = draw(
        some(
            st.builds(
                PlannedOp,
                *(text, text, places, tilings, splits, layouts, seconds, counts),
                segment=counts,
                reads=some(text),
            ).flatmap(_with_backward),
            unique_by=_name,
        )
    )
    cut = st.sampled_from([op.name for op in ops]) if ops and schedule != NONE else st.nothing()
    cuts = draw(some(cut, unique=True)) if ops and schedule != NONE else ()
    return draw(
        st.builds(
            Plan,
            fingerprint=text,
            machine=text,
            mesh=st.just(whole_mesh),
            stages=st.just(len(cuts) + 1),
            schedule=st.just(schedule),
            cuts=st.just(cuts),
            receive_seconds=st.tuples(*[seconds] * len(cuts)),
            optimizer=text,
            step_seconds=seconds,
            peak_bytes=counts,
            lower_bound_seconds=seconds,
            inputs=some(st.builds(InputSpec, text, shapes, text), unique_by=lambda x: x.key),
            constants=some(st.tuples(text, constants), unique_by=lambda x: x[0]),
            parameters=some(
                st.builds(PlannedParameter, text, layouts, counts, seconds, st.booleans()),
                unique_by=_name,
            ),
            ops=st.just(ops),
            transfers=some(
                st.builds(
                    PlannedTransfer,
                    *(text, text, st.sampled_from(Phase), collectives, counts, seconds),
                    times=st.integers(1, 64),
                )
            ),
            name=text,
            micro_batches=st.integers(1, 64),
            overlap=st.floats(0, 1),
            notes=some(text),
            remarks=some(remarks),
            numerics=numerics,
            timeline=st.none() | timelines(),
            rivals=some(st.builds(Rival, text, st.integers(1, 64), seconds, counts)),
        )
    )


def consistent(plan):
    """The plan with consumers that it has, and the seconds of its own timeline."""
    consumers = ["", *(op.name for op in plan.ops)]
    step = plan.step_seconds if plan.timeline is None else plan.timeline.seconds
    return replace(
        plan,
        transfers=tuple(
            replace(one, consumer=consumers[len(one.consumer) % len(consumers)])
            for one in plan.transfers
        ),
        step_seconds=step,
        lower_bound_seconds=min(plan.lower_bound_seconds, step),
    )


@given(plans().map(consistent))
def test_plans_read_back_equal(plan):
    written = plan_to_json(plan)
    again = plan_from_json(written)
    assert again == plan
    assert repr(again) == repr(plan)
    assert plan_to_json(again) == written
    assert json.loads(written)["format"] >= 1
