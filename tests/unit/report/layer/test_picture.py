"""The picture of the layer that repeats: parts, collectives, and what is left out."""

from dataclasses import replace

from shardwright.report.layer.picture import layer_picture
from shardwright.report.text.module_rows import fold, module_tree, tiling_words
from tests.harness import plans


def picture(plan):
    def words(_, module):
        return [tiling_words(op) for op in module.ops]

    return layer_picture(plan, fold(module_tree(plan), words))


def reading(plan):
    """The plan, whose linear operators read the parameters of their module."""

    def read(op):
        module = f"{op.source.module}."
        own = tuple(p.name for p in plan.parameters if p.name.startswith(module))
        return replace(op, reads=("x", *own)) if op.kind == "linear" else op

    return replace(plan, ops=tuple(map(read, plan.ops)))


def test_operators_have_their_parts_and_collectives():
    found = picture(reading(plans.transformer()))
    assert (found.name, found.count, found.axes) == ("blocks.0-1", 2, (("dp", 2), ("tp", 2)))
    up, down = found.steps  # the ReLU takes a tenth of a millisecond and moves nothing
    assert (up.module, up.kind, up.splits) == ("up", "linear", "dp:batch tp:features")
    assert [(p.name, p.placements) for p in up.parameters] == [
        ("weight", ("R", "S(0)")),
        ("bias", ("R", "S(0)")),
    ]
    assert up.result.placements == ("S(0)", "S(1)")
    assert (up.before, up.backward) == ((), ("all_reduce dp of the gradient of weight, bias",))
    assert down.result.placements == ("S(0)", "P")
    assert down.before == ("all_reduce tp of linear", "all_gather dp of weight")


def test_neighbours_that_differ_in_their_operator_alone_are_one():
    plan = plans.transformer()
    slow = tuple(replace(op, seconds=1.0) if op.kind == "relu" else op for op in plan.ops)
    twice = [other for op in slow for other in ([op, op] if op.kind == "relu" else [op])]
    kinds = [step.kind for step in picture(replace(plan, ops=tuple(twice))).steps]
    assert kinds == ["linear", "relu, relu", "linear"]


def test_a_model_without_equal_layers_has_none():
    plan = plans.transformer()
    single = tuple(op for op in plan.ops if "blocks.1" not in op.source.module)
    kept = tuple(p for p in plan.parameters if "blocks.1" not in p.name)
    moved = tuple(t for t in plan.transfers if not t.consumer.endswith("_1"))
    assert picture(replace(plan, ops=single, parameters=kept, transfers=moved)) is None
