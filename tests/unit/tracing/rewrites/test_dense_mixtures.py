"""Experts that all compute every token become one mixture, where that changes no result."""

import pytest
import torch
from torch import nn
from transformers import Llama4ForCausalLM, Llama4TextConfig

from shardwright.ir.options.numerics import Numerics
from shardwright.rules.analysis import analyze
from shardwright.simulate.costs.useful_flop import useful_flop
from shardwright.tracing.capture import capture_call
from shardwright.tracing.rewrites import sent_rows
from shardwright.tracing.rewrites.dense_mixtures import with_dense_mixtures
from tests.harness.graph_comparison import compared

TOKENS, EXPERTS, WIDTH, INNER = 15, 4, 8, 6
PRODUCTS = {"bmm", "einsum", "matmul"}


class Experts(nn.Module):
    """A router, and experts that all compute every token; a subclass has their products."""

    def __init__(self, k=2, experts=EXPERTS):
        super().__init__()
        self.k, self.experts = k, experts
        self.router = nn.Linear(WIDTH, experts)
        shapes = {
            "up": (experts, WIDTH, 2 * INNER),
            "down": (experts, INNER, WIDTH),
            "up_bias": (experts, 2 * INNER),
            "down_bias": (experts, WIDTH),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def scores(self, x):
        """As older GPT-OSS: a softmax over the chosen experts, scattered into zeros."""
        logits = self.router(x)
        top, chosen = logits.topk(self.k, dim=-1)
        return torch.zeros_like(logits).scatter_(1, chosen, top.softmax(-1))

    def sigmoids(self, x):
        """As Llama-4: sigmoids, which are zero of minus infinity."""
        logits = self.router(x)
        top, chosen = logits.topk(self.k, dim=1)
        every = torch.full_like(logits, float("-inf")).scatter_(1, chosen, top)
        return every.float().sigmoid().to(x.dtype)

    def rows(self, x):
        return x.repeat(self.experts, 1).view(self.experts, -1, WIDTH)

    def inside(self, made):
        gate, up = made.chunk(2, -1)
        return up * nn.functional.silu(gate)

    def forward(self, x):
        return self.found(x).square().mean()


class Before(Experts):
    """Scores scale the rows, as in Llama-4."""

    def found(self, x):
        rows = x.repeat(self.experts, 1) * self.sigmoids(x).transpose(0, 1).reshape(-1, 1)
        made = torch.bmm(rows.view(self.experts, -1, WIDTH), self.up)
        found = torch.bmm(self.inside(made), self.down).view(-1, WIDTH)
        return found.reshape(self.experts, -1, WIDTH).sum(dim=0)


class BeforeOfBatch(Experts):
    """Scores, of a softmax over all experts, scale rows by broadcasting; tokens are (3, 5)."""

    def found(self, x):
        logits = self.router(x)
        top, chosen = logits.topk(self.k, dim=1)
        scores = torch.full_like(logits, -torch.inf).scatter(1, chosen, top).softmax(-1)
        rows = x.view(3, 5, WIDTH) * scores.t().view(self.experts, 3, 5, 1)
        made = (rows.flatten(1, 2) @ self.up)[..., ::2].tanh()
        return (made @ self.down).sum(0)


class Behind(Experts):
    """Scores scale results, as in older GPT-OSS; with biases, and gates between features."""

    def found(self, x):
        made = torch.bmm(self.rows(x), self.up) + self.up_bias[..., None, :]
        gate, up = made[..., ::2].clamp(max=1.0), made[..., 1::2].clamp(-1.0, 1.0)
        inner = (up + 1) * gate * torch.sigmoid(gate * 1.7)
        found = torch.bmm(inner, self.down) + self.down_bias[..., None, :]
        found = found.view(self.experts, 3, -1, WIDTH)
        scores = self.scores(x).transpose(0, 1).view(self.experts, 3, -1)
        return (found * scores[..., None]).sum(dim=0)


class Einsums(Experts):
    """The second product scales and sums, too."""

    def found(self, x):
        inner = self.inside(torch.einsum("td,edf->etf", x, self.up))
        return torch.einsum("te,etf,efd->td", self.scores(x), inner, self.down)


class Turned(Experts):
    """Matrices the other way around, and an einsum that scales and sums."""

    def __init__(self, **options):
        super().__init__(**options)
        self.up = nn.Parameter(self.up.detach().mT.contiguous())
        self.down = nn.Parameter(self.down.detach().mT.contiguous())

    def found(self, x):
        inner = self.inside(torch.einsum("td,efd->etf", x, self.up)).cos()
        found = torch.bmm(inner, self.down.transpose(1, 2))
        return torch.einsum("etd,te->td", found, self.scores(x))


class OfSequences(Experts):
    """Tokens and their scores are in sequences, and no product joins these."""

    def found(self, x):
        x = x.view(3, 5, WIDTH)
        logits = self.router(x)
        top, chosen = logits.topk(self.k, dim=-1)
        every = torch.full_like(logits, -torch.inf).scatter(-1, chosen, top).softmax(2)
        inner = self.inside(torch.einsum("bsd,edf->besf", x, self.up))
        return torch.einsum("besf,efd,bse->bsd", inner, self.down, every)


class RowsOfSequences(Experts):
    """Scores scale rows of sequences."""

    def found(self, x):
        x = x.view(3, 5, WIDTH)
        logits = self.router(x)
        top, chosen = logits.topk(self.k, dim=-1)
        every = torch.zeros_like(logits).scatter(-1, chosen, top.sigmoid())
        rows = torch.einsum("bsd,bse->besd", x, every)
        inner = self.inside(torch.einsum("besd,edf->besf", rows, self.up))
        return torch.einsum("besf,efd->bsd", inner, self.down)


FORMS = (Before, BeforeOfBatch, Behind, Einsums, OfSequences, RowsOfSequences)


class Cast(Behind):
    """Scores in float64 make a sum in float64."""

    def scores(self, x):
        return super().scores(x).double()


def captured(model, tokens=TOKENS):
    torch.manual_seed(0)
    batch = {"x": torch.randn(tokens, WIDTH)}
    return capture_call(model, (), batch).graph, batch


def counts(graph):
    """How many mixtures there are, and products of all experts."""
    kinds = [op.kind for op in graph.ops]
    return kinds.count("experts"), sum(kind in PRODUCTS for kind in kinds)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("form", [*FORMS, Cast])
def test_loss_and_gradients_are_those_of_the_module(form, k):
    model = form(k=k)
    graph, batch = captured(model)
    assert counts(graph) == (1, 0)
    assert graph.note.startswith("4 experts of the model are computed only for the tokens that")
    found = compared(model, batch)
    assert found.ok and found.error < 1e-13, f"{found.worst} is {found.error} off"


def test_turned_matrices_are_read_as_they_are():
    model = Turned()
    graph, batch = captured(model)
    assert counts(graph) == (1, 0)
    (op,) = (op for op in graph.ops if op.kind == "experts")
    assert op.args[5] == (True, True) and op.operands[3:] == ("up", "down")
    assert compared(model, batch).ok


def test_rows_are_split_by_tokens_and_experts():
    graph, _ = captured(Before(k=2))
    rules = analyze(graph).rules
    (op,) = (op for op in graph.ops if op.kind == "experts")
    assert rules[op.name].routes
    # Two rows of a token lie together, so that tokens are the outer part of rows.
    (view,) = (o for o in graph.ops if o.outputs[0] == op.operands[0])
    assert view.kind == "view" and graph.tensor[view.operands[0]].shape == (TOKENS, 2, WIDTH)


class Shifted(Before):
    def inside(self, made):
        return super().inside(made) + 1  # of zeros it makes ones


class BiasedRows(Before):
    def found(self, x):
        rows = self.rows(x) * self.sigmoids(x).t()[..., None]
        made = torch.bmm(rows, self.up) + self.up_bias[:, None]
        return torch.bmm(self.inside(made), self.down).sum(0)


class BiasedResults(Before):
    def found(self, x):
        made = torch.bmm(self.rows(x) * self.sigmoids(x).t()[..., None], self.up)
        return (torch.bmm(self.inside(made), self.down) + self.down_bias[:, None]).sum(0)


class Halves(Before):
    """A sigmoid of zero is a half."""

    def sigmoids(self, x):
        logits = self.router(x)
        top, chosen = logits.topk(self.k, dim=1)
        return torch.zeros_like(logits).scatter_(1, chosen, top).sigmoid()


class Small(Behind):
    """Softmax of a large negative number is zero only beside larger ones."""

    def scores(self, x):
        logits = self.router(x)
        top, chosen = logits.topk(self.k, dim=1)
        return torch.full_like(logits, -1e4).scatter_(1, chosen, top).softmax(-1)


class OverTokens(Behind):
    """A softmax over tokens, some of which have minus infinity."""

    def scores(self, x):
        logits = self.router(x)
        top, chosen = logits.topk(self.k, dim=1)
        return torch.full_like(logits, -torch.inf).scatter_(1, chosen, top).softmax(0)


class AnyIndex(Behind):
    """Indices that may be equal: the score of an expert is one of two."""

    def scores(self, x):
        logits = self.router(x)
        top, chosen = logits.topk(self.k, dim=-1)
        return torch.zeros_like(logits).scatter_(1, chosen // 2, top)


class Learned(Behind):
    """What is scattered into has a gradient."""

    def scores(self, x):
        logits = self.router(x)
        top, chosen = logits.topk(self.k, dim=-1)
        return (logits * 0).scatter(1, chosen, top)


class Twice(Before):
    def found(self, x):
        scores = self.sigmoids(x).t()[..., None]
        made = torch.bmm(self.rows(x) * scores, self.up)
        return (torch.bmm(self.inside(made), self.down) * scores).sum(0)


class ReadInside(Before):
    def found(self, x):
        rows = self.rows(x) * self.sigmoids(x).t()[..., None]
        made = torch.bmm(rows, self.up)
        return torch.bmm(self.inside(made), self.down).sum(0) + made.mean()


class ReadBehind(Behind):
    def found(self, x):
        results = torch.bmm(self.inside(torch.bmm(self.rows(x), self.up)), self.down)
        return (results * self.scores(x).t()[..., None]).sum(0) + results.mean()


class Unscaled(Behind):
    def found(self, x):
        results = torch.bmm(self.inside(torch.bmm(self.rows(x), self.up)), self.down)
        return results.sum(0) * self.scores(x).sum()


class Square(Behind):
    """As many tokens as experts, so that scores that are not transposed fit, too."""

    def found(self, x):
        results = torch.bmm(self.inside(torch.bmm(self.rows(x), self.up)), self.down)
        return (results * self.scores(x)[..., None]).sum(0)


class SummedTokens(Square):
    def found(self, x):
        results = torch.bmm(self.inside(torch.bmm(self.rows(x), self.up)), self.down)
        return (results * self.scores(x).t()[..., None]).sum(1)


class SummedScores(Square):
    def found(self, x):
        rows = torch.einsum("td,te->td", x, self.scores(x))
        made = self.inside(torch.einsum("td,edf->etf", rows, self.up))
        return torch.bmm(made, self.down).sum(0)


class Mixed(Behind):
    """Results of other tokens and experts than those that scores are of."""

    def found(self, x):
        results = torch.bmm(self.inside(torch.bmm(self.rows(x), self.up)), self.down)
        mixed = results.transpose(0, 1).reshape(self.experts, -1, WIDTH)
        return (mixed * self.scores(x).t()[..., None]).sum(0)


class Tied(Behind):
    """One matrix of each expert is multiplied twice."""

    def found(self, x):
        square = self.up[..., :WIDTH].contiguous()
        results = torch.bmm(torch.bmm(self.rows(x), square).relu(), square)
        return (results * self.scores(x).t()[..., None]).sum(0)


REFUSED = (
    *(Shifted, BiasedRows, BiasedResults, Halves, Small, OverTokens, AnyIndex, Learned, Twice),
    *(ReadInside, ReadBehind, Unscaled, Square, SummedTokens, SummedScores, Mixed, Tied),
)


@pytest.mark.parametrize("form", REFUSED)
def test_other_forms_stay_as_they_are(form):
    graph, _ = captured(form(), EXPERTS if issubclass(form, Square) else TOKENS)
    assert counts(graph)[0] == 0 and counts(graph)[1] >= 2
    assert with_dense_mixtures(graph) is graph


def test_shifted_steps_are_no_hindrance_where_results_are_scaled():
    class Both(Behind):
        def inside(self, made):
            return super().inside(made) + 1

        def found(self, x):
            results = torch.bmm(self.inside(torch.bmm(self.rows(x), self.up)), self.down)
            return (results * self.scores(x).t()[..., None]).sum(0)

    graph, _ = captured(Both())
    assert counts(graph) == (1, 0)


class WithScores(Before):
    """Scores have another reader, which sees those of all experts."""

    def forward(self, x):
        return super().forward(x) + (self.sigmoids(x) + 1).log().mean()


def test_other_readers_of_scores_see_all_of_them():
    model = WithScores()
    graph, batch = captured(model)
    assert counts(graph) == (1, 0)
    assert compared(model, batch).ok


def llama4(inner=8, **options):
    config = Llama4TextConfig(
        vocab_size=19,
        hidden_size=16,
        intermediate_size=inner,
        intermediate_size_mlp=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        interleave_moe_layer_step=1,
        **options,
    )
    ids = torch.randint(19, (3, 5), generator=torch.Generator().manual_seed(4))
    return Llama4ForCausalLM(config), {"input_ids": ids, "labels": ids}


@pytest.mark.hf
@pytest.mark.parametrize("k", [1, 2])
def test_llama_4_computes_what_is_chosen(k):
    model, batch = llama4(num_experts_per_tok=k)
    graph = capture_call(model, (), batch).graph
    assert counts(graph) == (2, 0)
    assert graph.note.startswith("4 experts of model.layers.0.feed_forward.experts and 1 more are")
    assert "only for the tokens that chose them" in graph.note
    assert compared(model, batch).ok


@pytest.mark.hf
def test_useful_flop_counts_chosen_experts():
    def flop(k):
        model, batch = llama4(num_experts_per_tok=k)
        graph = capture_call(model, (), batch).graph
        return useful_flop(graph, analyze(graph))

    products = 3 * 3 * 2 * 15 * 16 * 8 * 2  # gate, up and down; passes; tokens and sizes; layers
    assert flop(2) - flop(1) == products


@pytest.mark.hf
@pytest.mark.parametrize("inner, kernel", [(8, "aten._grouped_mm"), (6, "transformers.grouped_mm")])
def test_torchs_grouped_product_is_taken_where_rows_are_aligned(inner, kernel):
    model, batch = llama4(inner)
    graph = capture_call(model, (), batch, numerics=Numerics(precision="bf16")).graph
    (op, _) = (op for op in graph.ops if op.kind == "experts")
    assert str(op.args[6]).startswith(kernel)
    assert {graph.tensor[name].dtype for name in op.operands[2:]} == {"bfloat16"}


def test_without_a_grouped_product_experts_stay_as_they_are(monkeypatch):
    def missing(target):
        raise ModuleNotFoundError(target)

    monkeypatch.setattr(sent_rows, "registered", missing)
    assert counts(captured(Behind())[0]) == (0, 2)
