from dataclasses import replace

import pytest

from shardwright.ir.graph import Graph, Leaf, LeafKind, Op, Ref, Tensor
from shardwright.ir.plan import InputSpec
from shardwright.report.answer import answer_lines, model_text
from tests.harness import plans

GRAPH = Graph(
    leaves=(
        Leaf("frozen", LeafKind.PARAMETER, ("base.weight",)),
        Leaf("weight", LeafKind.PARAMETER, ("weight",)),
        Leaf("tokens", LeafKind.INPUT, ("kwargs.input_ids",)),
    ),
    ops=(Op("add", "aten.add.Tensor", (Ref("frozen"), Ref("weight")), {}, ("sum",)),),
    outputs=("sum",),
    values=(
        Tensor("frozen", (1000, 8000), "float32"),
        Tensor("weight", (1000, 8000), "float32", requires_grad=True),
        Tensor("tokens", (32, 2048), "int64"),
        Tensor("sum", (1000, 8000), "float32", requires_grad=True),
    ),
)


def test_a_model_has_its_parameters_and_the_tokens_of_a_step():
    plan = replace(plans.simple(), inputs=(InputSpec("kwargs.input_ids", (32, 2048), "int64"),))
    assert model_text(plan, GRAPH) == "16.0 M parameters (8.00 M trained), 65,536 tokens a step"


def test_without_tokens_samples_are_counted():
    graph = replace(GRAPH, leaves=GRAPH.leaves[1:])
    plan = replace(plans.simple(), inputs=(InputSpec("args.0", (8, 4), "float32"),))
    assert model_text(plan, graph) == "8.00 M parameters, 8 samples a step"


@pytest.mark.parametrize(
    "samples, helps",
    [
        (7, "a batch of 8: 7 samples do not divide among 8 devices"),
        (12, "a batch of 16: 12 samples do not divide among 8 devices"),
        (4, None),
        (16, None),
    ],
)
def test_a_batch_that_does_not_divide_among_the_devices_is_told(samples, helps):
    inputs = tuple(InputSpec(f"args.{i}", (samples, 4), "float32") for i in range(2))
    plan = replace(plans.simple(mesh="dp=8", comm_ms=0), inputs=inputs)
    assert dict(answer_lines(plan, [], None)).get("would help") == helps
