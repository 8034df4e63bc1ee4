from dataclasses import replace

from shardwright.ir.memory import Memory, Share
from shardwright.report.text.module_rows import Module, fold, module_tree, shares, stored
from tests.harness import plans


def names(node):
    return [(depth, n.name, n.path, n.count) for depth, n in node.visit()]


def test_neighbours_that_read_the_same_are_one_node():
    tree = fold(module_tree(plans.transformer()), lambda path, module: len(module.ops))
    assert names(tree) == [
        (0, "(model)", "", 1),
        (1, "embed", "embed", 1),
        (1, "blocks.0-2", "blocks.0", 3),
        (2, "up", "blocks.0.up", 1),
        (2, "down", "blocks.0.down", 1),
        (1, "(not attributed)", "", 1),
    ]


def test_what_is_said_of_the_paths_keeps_them_apart():
    tree = fold(module_tree(plans.transformer()), lambda path, module: path.startswith("blocks.1"))
    assert [n.name for _, n in tree.visit() if n.name.startswith("blocks")] == [
        "blocks.0",
        "blocks.1",
        "blocks.2",
    ]


def test_a_module_that_holds_one_other_is_named_with_it():
    root = Module()
    root.at("model.encoder.layers.0.proj").ops.append(plans.transformer().ops[0])
    assert names(fold(root, lambda path, module: None)) == [
        (0, "model.encoder.layers.0.proj", "model.encoder.layers.0.proj", 1)
    ]


def test_costs_include_submodules():
    plan = plans.transformer()
    costs = module_tree(plan).costs
    assert costs.state_bytes == sum(p.bytes for p in plan.parameters)
    assert costs.comm_seconds == sum(t.seconds for t in plan.transfers)
    assert costs.minus(costs) == (0, 0, 0, 0.0, 0.0)
    assert costs.state_bytes + costs.saved_bytes + costs.other_bytes == plan.peak_bytes


def test_memory_that_no_module_is_known_to_have_is_named_so():
    plan = plans.simple(mib=50)
    memory = Memory.of([Share("up", "saved", 50 * plans.MIB)], rank=0, at="here")
    assert shares(replace(plan, memory=memory)) == memory.shares
    older = replace(plan, memory=replace(memory, shares=()))
    assert shares(older) == (Share(None, "saved", 50 * plans.MIB),)
    # The tables of a pipeline have what all stages hold.
    staged = replace(plan, peak_bytes=1)
    assert shares(staged) == (Share(None, "unknown", 1),)
    assert module_tree(staged).costs.other_bytes == 1


def test_how_a_parameter_is_stored():
    assert stored(plans.parameter("w", "dp:S(0) tp:R")) == "dp:S(0)"
    assert stored(plans.parameter("w", "dp:R tp:R")) == "R"
