"""Mixtures of experts are found in Hugging Face's form alone, and are one operator then."""

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM, MixtralConfig, MixtralForCausalLM

from shardwright.machine.presets import preset
from shardwright.planner.tables.memory import kept_bytes
from shardwright.rules.analysis import analyze
from shardwright.simulate.costs.compute import forward_seconds
from shardwright.simulate.costs.experts import row_kernels
from shardwright.simulate.costs.workload import workload
from shardwright.tracing.capture import capture_call
from shardwright.tracing.export.operators import call_op
from shardwright.tracing.own_operators.experts import experts, scales_inside
from shardwright.tracing.rewrites.mixtures import with_mixtures

_GELU = '[["aten.gelu.default", [{"value": 0}], {}]]'
CONFIG = MixtralConfig(
    vocab_size=19,
    hidden_size=16,
    intermediate_size=10,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=5,
    num_experts_per_tok=2,
)


@pytest.fixture(scope="module")
def graph():
    torch.manual_seed(0)
    ids = torch.zeros(3, 5, dtype=torch.long)
    return capture_call(MixtralForCausalLM(CONFIG), (), {"input_ids": ids, "labels": ids}).graph


def test_every_layer_has_one_operator_and_nothing_sorts(graph):
    kinds = [op.kind for op in graph.ops]
    assert kinds.count("experts") == 2
    assert not {"sort", "grouped_mm_fallback", "_grouped_mm", "index_put"} & set(kinds)
    first, second = (op for op in graph.ops if op.kind == "experts")
    assert first.args[5:] == second.args[5:]  # repeated layers are alike


def test_experts_with_biases_and_gates_as_every_second_feature_are_one_operator():
    config = GptOssConfig(
        vocab_size=19,
        hidden_size=16,
        intermediate_size=10,
        num_hidden_layers=2,
        layer_types=["full_attention"] * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        num_local_experts=5,
        num_experts_per_tok=2,
        pad_token_id=0,
    )
    ids = torch.zeros(3, 5, dtype=torch.long)
    given = {"input_ids": ids, "labels": ids}
    found = capture_call(GptOssForCausalLM(config), (), given).graph
    mixtures = [op for op in found.ops if op.kind == "experts"]
    assert len(mixtures) == 2 and "sort" not in {op.kind for op in found.ops}
    assert [name.rpartition(".")[2] for name in mixtures[0].operands[3:]] == [
        *("gate_up_proj", "down_proj"),
        *("gate_up_proj_bias", "down_proj_bias"),
    ]
    rule = analyze(found).rules[mixtures[0].name]
    assert str(rule).endswith("k, e h (m g), e m o, e (m g), +e o -> (n.0 n.1) o")


class Biased(torch.nn.Module):
    """A mixture written as transformers does, whose rows have the bias of their expert + `shift`.

    Between the products features from `first` on are taken, every second one.
    """

    def __init__(self, shift=0, first=1):
        super().__init__()
        self.shift, self.first = shift, first
        shapes = {"up": (3, 4, 12), "up_bias": (3, 12), "down": (3, 6, 4), "down_bias": (3, 4)}
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape)))

    def forward(self, x, chosen, scores):
        expert, order = chosen.reshape(-1).sort()
        ends = torch.histc(expert.float(), 3, 0, 2).cumsum(0, dtype=torch.int32)
        product = torch.ops.transformers.grouped_mm_fallback
        of = expert if not self.shift else (expert + self.shift) % 3
        inner = product(x[order // 2], self.up, ends) + self.up_bias[of]
        inner = inner[..., self.first :: 2].tanh()
        rows = product(inner, self.down, ends) + self.down_bias[of]
        rows = rows * scores.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return rows[back].view(*chosen.shape, -1).sum(1).sum()


@pytest.mark.parametrize("shift, first, found", [(0, 1, 1), (0, 0, 1), (1, 1, 0)])
def test_biases_are_of_the_experts_of_their_rows(shift, first, found):
    torch.manual_seed(0)
    given = torch.randn(5, 4), torch.randint(3, (5, 2)), torch.rand(5, 2)
    graph = capture_call(Biased(shift, first), given).graph
    assert [op.kind for op in graph.ops].count("experts") == found


def test_biases_take_kernels_that_move_rows_of_their_width():
    given = torch.randn(5, 4), torch.randint(3, (5, 2)), torch.rand(5, 2)
    graph = capture_call(Biased(), given).graph
    op = next(op for op in graph.ops if op.kind == "experts")
    rule = analyze(graph).rules[op.name]
    sizes = np.array([[factor.size] for factor in rule.factors])

    def moved(operands):
        work = workload(op, rule, graph)
        work = replace(work, operands=work.operands[:operands])
        return [int(kernel.moved[0]) for kernel in row_kernels(work, sizes)]

    rows = 5 * 2  # of 12 and 4 elements in float32, for a look-up and a sum
    assert moved(7) == [*moved(5), 5 * rows * 12 * 4, 5 * rows * 4 * 4]


def test_what_is_kept_for_rows_is_as_much_in_wider_experts(graph):
    ids = torch.zeros(3, 5, dtype=torch.long)

    def kept(inner):
        """Bytes for rows, and those in proportion to the inner width."""
        config = MixtralConfig(**{**CONFIG.to_dict(), "intermediate_size": inner})
        given = {"input_ids": ids, "labels": ids}
        found = capture_call(MixtralForCausalLM(config), (), given).graph
        op = next(op for op in found.ops if op.kind == "experts")
        return op.extra_rows, op.extra_saved - op.extra_rows

    result = 3 * 5 * 2 * 16 * 4  # of the second product, for all rows
    (narrow, inner), (same, twice) = kept(5), kept(10)
    assert narrow == same >= result  # the rows that go in, at least
    assert twice == 2 * inner > 0
    # Scores scale the narrower side of the second product: its input, or its result.
    (wide, inner), (same, more) = kept(20), kept(30)
    assert wide == same == narrow + result
    assert more == inner * 30 / 20 > 0


@pytest.mark.parametrize("inner, inside", [(4, True), (8, False), (16, False)])
def test_scores_scale_the_narrower_side_and_nothing_changes(inner, inside):
    torch.manual_seed(0)
    chosen = torch.tensor([[0, 1], [2, 0], [1, 2]])
    shapes = (3, 8), (3, 2), (3, inner, 8), (3, 8, inner)
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    x, scores, up, down = leaves
    product = "transformers.grouped_mm_fallback.default"
    out = experts(x, chosen, scores, up, down, (True, True), product, _GELU)
    expected = sum(
        scores[:, k, None]
        * torch.einsum(
            "twi,ti->tw",
            down[chosen[:, k]],
            torch.nn.functional.gelu(torch.einsum("tiw,tw->ti", up[chosen[:, k]], x)),
        )
        for k in range(2)
    )
    torch.testing.assert_close(out, expected)
    found, wanted = (torch.autograd.grad((y**2).sum(), leaves) for y in (out, expected))
    torch.testing.assert_close(found, wanted)
    assert scales_inside(x, scores, down, (True, True)) == inside
    assert not scales_inside(x.float(), scores, down, (True, True))


@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float32])
def test_scores_in_float32_scale_rows_in_half_precision(wide):
    torch.manual_seed(0)
    chosen = torch.tensor([[0, 1], [2, 0], [1, 2]])
    x, up, down = (torch.randn(shape) for shape in ((3, 16), (3, 8, 16), (3, 16, 8)))
    scores = torch.rand(3, 2)
    product = "transformers.grouped_mm_fallback.default"

    def result(dtype, of_scores):
        given = (one.to(dtype) for one in (x, up, down))
        x_, up_, down_ = given
        assert scales_inside(x_, scores.to(of_scores), down_, (True, True))
        return experts(x_, chosen, scores.to(of_scores), up_, down_, (True, True), product, _GELU)

    found = result(torch.bfloat16, wide)
    assert found.dtype == wide
    exact = result(torch.float32, torch.float32)
    torch.testing.assert_close(found.float(), exact, rtol=0.02, atol=0.2)


def test_a_step_leaves_no_activation_to_the_garbage_collector(graph):
    op = next(op for op in graph.ops if op.kind == "experts")
    shapes = {name: graph.tensor[name].shape for name in op.operands}
    operands = {name: torch.randn(shape, requires_grad=True) for name, shape in shapes.items()}
    operands[op.operands[1]] = torch.zeros(shapes[op.operands[1]], dtype=torch.long)
    gc.collect()
    flags = gc.get_debug()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        (made,) = call_op(op, operands, torch.device("cpu"))
        made.sum().backward()
        del made
        gc.collect()
        kept = [one for one in gc.garbage if isinstance(one, torch.Tensor)]
    finally:
        gc.set_debug(flags)
        gc.garbage.clear()
    assert not kept


def test_what_is_not_just_so_stays_as_it_is():
    """Experts that share one matrix more: three products of one kind of rows."""

    class Unlike(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Parameter(torch.ones(3, 4, 6))
            self.down = torch.nn.Parameter(torch.ones(3, 6, 4))

        def forward(self, x, ends):
            product = torch.ops.transformers.grouped_mm_fallback
            inner = product(x, self.up, ends)
            return product(inner - inner.mean(0), self.down, ends).sum()

    given = torch.ones(8, 4), torch.tensor([3, 3, 8], dtype=torch.int32)
    found = capture_call(Unlike(), given).graph
    assert [op.kind for op in found.ops].count("grouped_mm_fallback") == 2
    assert with_mixtures(found) == found


def test_experts_on_several_devices_pay_for_the_busiest(graph):
    op = next(op for op in graph.ops if op.kind == "experts")
    rule = analyze(graph).rules[op.name]
    work = workload(op, rule, graph, skew=1.3)
    device = replace(preset("8xV100").device, bytes_per_s=1e30, launch_seconds=0.0)
    device = replace(device, issue_seconds=0.0, units=0)

    def sizes(**local):
        return np.array([[local.get(factor.name, factor.size)] for factor in rule.factors])

    def seconds(**local):
        return float(forward_seconds(work, sizes(**local), device)[0])

    def kept(rows=0, **local):
        return int(kept_bytes(work, (False,), 10**6, sizes(**local), rows)[0])

    assert seconds(e=2) == pytest.approx(seconds() * 0.4 * 1.3, rel=1e-3)
    assert kept(e=2) == pytest.approx(kept() * 0.4 * 1.3, rel=1e-3)
    assert kept(rows=10**6, e=2) == 10**6 * 16 // 30 + 1  # of 15.6 rows, on average
    assert seconds(m=5) == pytest.approx(seconds() / 2)
    # Each of the devices that share the inside of the experts has all rows, whole.
    assert (kept(m=5), kept(rows=10**6, m=5), kept(rows=600_000, m=5)) == (500_000, 10**6, 800_000)
    flop = 3 * 2 * 15 * 2 * 10 * 16  # products, multiply and add, tokens, experts of each, sizes
    reached = device.peak_flop_per_s("float32") * device.efficiency.matmul
    assert seconds() == pytest.approx(flop / reached)
