"""Rows become strategies, machines and graphs; predictions are kept, scored and shown."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import shardwright as sw
from benchmarks.published import overlap, own, page, plots, run
from benchmarks.published.comparisons import (
    FILE,
    HeldOut,
    comparison,
    conditions_of,
    content,
    coverage,
    held_out,
    widened,
    widening,
)
from benchmarks.published.graphs import FAMILIES, OWN, Shape, UnpriceableError, graph_of
from benchmarks.published.mixtures import Experts
from benchmarks.published.modules import NORM_EPS, ComposedNorm, JointAdapter, loss_in_parts
from benchmarks.published.own_rows import MEASURED, own_rows
from benchmarks.published.readers.shapes import MIXTURES
from benchmarks.published.row import GATHERS, Row, read
from benchmarks.published.run import Prediction, kept_predictions, predict, predictions
from benchmarks.published.score import Pair, elements_of, result_of, size_of
from benchmarks.published.setups import approximations, held_bytes, machine_of, strategy_of
from shardwright.ir.graph import LeafKind
from shardwright.machine.fitted import OVERLAP
from shardwright.machine.model import EXPERT_SKEW
from shardwright.report.accuracy import Fit

RESULT = Path(run.__file__).with_name("result.json")
FITTED = Path(run.__file__).with_name("fit.json")
ROW = Row(
    source="vtrain",
    path="a.csv",
    commit="c" * 40,
    line=2,
    model="tiny",
    family="gpt",
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=4,
    head_size=16,
    ffn=256,
    vocab=256,
    tied=True,
    sequence=32,
    global_batch=8,
    micro_batch=2,
    dp_replicate=2,
    tp=2,
    precision="bf16",
    recompute="full",
    optimizer="adamw-fused",
    gpu="A100-80",
    gpus=4,
    metric="seconds",
    published=0.5,
    step_seconds=0.5,
)


def test_a_row_is_a_strategy():
    assert str(strategy_of(replace(ROW, zero=0))) == str(
        sw.Strategy.parse("dp_replicate=2 tp=2 zero=0 sp=off mb=2 gradient_sync=last ac=full")
    )
    sharded = replace(ROW, dp_replicate=1, dp_shard=2, zero=3, reshard=False, compiled=True)
    assert strategy_of(sharded).reshard_after_forward is False
    assert strategy_of(sharded).compile == "regional"
    narrow = replace(sharded, precision="fp8-tensorwise")
    gathers = [strategy_of(replace(narrow, fp8_gather=word)).fp8_gather for word in GATHERS]
    assert gathers == [False, True, False]
    assert not strategy_of(replace(ROW, precision="fp8-delayed", fp8_gather="on")).fp8_gather
    hiding = replace(sharded, sequence_parallel=True, async_tp=True)
    assert (strategy_of(hiding).async_tp, strategy_of(sharded).async_tp) == (True, False)


def test_mixtures_have_the_published_numbers_of_parameters():
    found = {}
    for name, shape in MIXTURES.items():
        row = replace(ROW, **shape, dropout=0.0)
        with torch.device("meta"):
            module = FAMILIES[row.family](Shape.of(row))
        count = sum(parameter.numel() for parameter in module.parameters())
        further = sum(parameter.numel() for parameter in module.further.parameters())
        found[name] = round((count - further) / 1e9, 1)
    # As their publishers count them; DeepSeek-V3 without its layer for a further token.
    published = {"Qwen3_30B_a3B": 30.5, "Qwen3_235B_a22B": 235.1, "DeepSeekV3": 671.0}
    assert found == {**published, "Kimi_K2": 1026.4}


def test_experts_compute_the_sum_of_those_chosen():
    torch.manual_seed(0)
    experts = Experts(16, 32, 4, 2)
    for weight in (experts.up, experts.down):
        torch.nn.init.normal_(weight, std=0.2)
    x = torch.randn(2, 3, 16)
    likely = torch.softmax(experts.router(x), dim=-1)
    scores, chosen = likely.topk(2, dim=-1)
    expected = torch.zeros_like(x)
    for e in range(4):
        gate, up = (x @ experts.up[e]).chunk(2, dim=-1)
        share = (scores * (chosen == e)).sum(-1) / scores.sum(-1)
        expected += share[..., None] * ((torch.nn.functional.silu(gate) * up) @ experts.down[e])
    torch.testing.assert_close(experts(x), expected)


def test_a_row_with_balanced_experts_has_no_busiest_device():
    mixture = {**MIXTURES["Qwen3_30B_a3B"], "tied": False, "layers": 1}
    row = replace(ROW, **mixture, balanced=True, dp_replicate=1, dp_shard=4, tp=1, ep=4, zero=1)
    row = replace(row, gpu="H100", precision="fp8-tensorwise", recompute="none", sequence=8192)
    assert (machine_of(row).expert_skew, machine_of(replace(row, balanced=False)).expert_skew) == (
        1.0,
        EXPERT_SKEW,
    )
    narrow, wide = predict(row), predict(replace(row, precision="bf16"))
    assert not narrow.unpriced
    assert narrow.seconds < wide.seconds


def test_equal_setups_are_priced_once(tmp_path):
    again = replace(ROW, line=3, published=0.7, step_seconds=0.7, note="another run")
    first, second = predictions([ROW, again], 1, tmp_path / "log")
    assert (first.key, second.key) == (ROW.key, again.key)
    assert replace(second, key=first.key) == first
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_a_row_is_a_machine_with_the_stated_network():
    one = machine_of(ROW)
    assert (one.devices, len(one.levels), one.device.kind) == (4, 1, "A100")
    two = machine_of(replace(ROW, gpus=16))
    slow = machine_of(replace(ROW, gpus=16, network_gbit=800))
    assert slow.levels[1].bytes_per_s == two.levels[1].bytes_per_s / 2
    with pytest.raises(UnpriceableError, match="P100"):
        machine_of(replace(ROW, gpu="P100"))
    assert [level.size for level in machine_of(replace(ROW, gpus=12)).levels] == [6, 2]
    rack = replace(ROW, gpu="GB200", gpus=128, gpus_per_node=4)
    assert [level.size for level in machine_of(rack).levels] == [64, 2]


def test_a_composed_norm_computes_what_the_fused_one_does(tmp_path):
    x = torch.randn(3, 64)
    fused = torch.nn.RMSNorm(64, NORM_EPS)
    torch.testing.assert_close(ComposedNorm(64, NORM_EPS)(x), fused(x))
    kinds = []
    for norms in ("fused", "composed"):
        row = replace(ROW, family="llama", norms=norms, layers=1)
        kinds.append([op.kind for op in graph_of(Shape.of(row), tmp_path).ops])
    assert "rsqrt" in kinds[1] and len(kinds[1]) > len(kinds[0])


def test_a_row_states_its_attention_and_fsdp_overlaps():
    plain, first = machine_of(ROW), machine_of(replace(ROW, attention="flash-1"))
    assert first.device.efficiency.attention < plain.device.efficiency.attention
    assert (plain.overlap, machine_of(replace(ROW, zero=3)).overlap) == (0.0, OVERLAP)
    assert machine_of(replace(ROW, overlapped=True)).overlap == OVERLAP
    replayed = machine_of(replace(ROW, replayed=True)).device
    assert replayed.issue_seconds == 0 < plain.device.issue_seconds


def test_a_graph_has_the_parameters_of_the_row_and_is_kept(tmp_path, monkeypatch):
    llama = replace(ROW, family="llama", kv_heads=2, tied=False, precision="pure-bf16")
    for row in (ROW, llama, replace(llama, family="neox", norms="shared")):
        graph_of.cache_clear()
        graph = graph_of(Shape.of(row), tmp_path)
        leaves = graph.leaves_of(LeafKind.PARAMETER)
        matrices = [graph.tensor[leaf.name] for leaf in leaves]
        counted = sum(one.num_elements for one in matrices if len(one.shape) > 1)
        learned = row.sequence * row.hidden if row.family == "gpt" else 0
        assert counted - learned == row.parameters
        monkeypatch.setattr("benchmarks.published.graphs._captured", pytest.fail)
        graph_of.cache_clear()
        assert graph_of(Shape.of(row), tmp_path) == graph
        monkeypatch.undo()
    with pytest.raises(UnpriceableError, match="training by qlora"):
        Shape.of(replace(ROW, tuning="qlora"))


@pytest.mark.parametrize(("tuning", "matrices"), [("lora qv 4", 3), ("lora all 8", 10)])
def test_adapters_alone_are_trained(tuning, matrices, tmp_path):
    """Of queries, keys and values they are one matrix and one for each; else two a layer."""
    row = replace(ROW, family="neox", kv_heads=2, tied=False, tuning=tuning, source="litgpt")
    graph_of.cache_clear()
    graph = graph_of(Shape.of(row), tmp_path)
    assert all("lora_" in name for name in graph.trained)
    of_one = [name for name in graph.trained if name.startswith("blocks.0.")]
    assert len(of_one) == matrices


@pytest.fixture
def kept_graphs(tmp_path, monkeypatch):
    graph_of.cache_clear()
    captured = {}

    def keep(shape):
        if shape not in captured:
            captured[shape] = graph_of(shape, tmp_path)
        return captured[shape]

    monkeypatch.setattr(run, "graph_of", keep)
    run._expansion.cache_clear()


def test_memory_is_simulated_where_some_is_published_and_the_time_is_the_same(kept_graphs):
    plain = predict(ROW)
    simulated = predict(replace(ROW, memory_gib=1.0, memory_kind="allocated"))
    graph, machine = run.graph_of(Shape.of(ROW)), machine_of(ROW)
    plan = sw.price(graph, machine, strategy_of(ROW), "adamw_fused")
    assert plain.seconds == simulated.seconds == plan.step_seconds
    assert simulated.gib == (plan.memory.peak + plan.memory.libraries) / 2**30
    assert simulated.reserved_gib == plan.memory.reserved / 2**30 >= simulated.gib
    assert plain.reserved_gib is None
    assert predict(replace(ROW, precision="fp8-rowwise")).unpriced
    assert predict(replace(ROW, gpu="P100")).unpriced == "no preset has the GPU P100"


def test_gradients_in_buffers_are_there_when_the_first_is_computed(kept_graphs):
    """A rank of two has half of the parameters and of the buffers, in float32."""
    row = replace(ROW, memory_gib=1.0, memory_kind="allocated", micro_batch=4, recompute="none")
    freed, kept = predict(row), predict(replace(row, gradient_buffers=True))
    buffers = (kept.gib - freed.gib) * 2**30
    assert buffers == pytest.approx(4 * row.parameters / row.tp, rel=0.1)


def test_predictions_are_kept_until_the_row_changes(kept_graphs, tmp_path, monkeypatch):
    log = tmp_path / "log"
    rows = [ROW, replace(ROW, line=3, gpu="P100")]
    first = {one.key: one for one in predictions(rows, 1, log)}
    assert first.keys() == {row.key for row in rows}
    monkeypatch.setattr(run, "predict", lambda row: Prediction(row.key, unpriced="anew"))
    assert {one.key: one for one in predictions(rows, 1, log)} == first
    changed = replace(ROW, micro_batch=4)
    assert [one.unpriced for one in predictions([changed], 1, log)] == ["anew"]
    assert kept_predictions([ROW], log) == {ROW.key: first[ROW.key]}
    assert first[ROW.key].commit


def test_predictions_by_other_code_count_on_request_until_there_are_new_ones(
    kept_graphs, tmp_path, monkeypatch
):
    log = tmp_path / "log"
    (old,) = predictions([ROW], 1, log)
    monkeypatch.setattr(run, "code", lambda: "other")
    assert kept_predictions([ROW], log) == {}
    assert kept_predictions([ROW], log, older=True) == {ROW.key: old}
    (new,) = predictions([ROW], 1, log)
    assert kept_predictions([ROW], log, older=True) == kept_predictions([ROW], log)
    assert kept_predictions([ROW], log) == {ROW.key: new}


def made(line, published, predicted, **changes):
    row = replace(ROW, line=line, published=published, step_seconds=published, **changes)
    return row, Prediction(row.key, seconds=predicted, gib=50.0, capacity_gib=70.0)


def test_the_score_is_a_mean_over_sources():
    pairs = [made(i, 1.0 + i, 1.1 * (1.0 + i)) for i in range(4)]
    pairs.append(made(9, 1.0, 1.5, source="litgpt"))
    pairs.append(made(10, None, 1.5, source="litgpt", metric="", verdict="out of memory"))
    refused = replace(ROW, line=20, gpu="P100"), "no preset"
    found = {row.key: one for row, one in pairs}
    found[refused[0].key] = Prediction(refused[0].key, unpriced=refused[1])
    rows = [row for row, _ in pairs] + [refused[0], replace(ROW, line=21, excluded="inference")]
    rows.append(replace(ROW, line=22))
    result = result_of(rows, found)
    assert result["by"]["source"]["vtrain"]["mape"] == pytest.approx(0.1)
    assert result["by"]["source"]["vtrain"]["spearman"] == pytest.approx(1.0)
    assert result["overall"]["mape"] == pytest.approx((0.1 + 0.5) / 2)
    assert result["overall"]["bias"] == pytest.approx((0.1 + 0.5) / 2)
    assert result["counts"]["vtrain"] == {
        "read": 7, "excluded": 1, "unpriced": 1, "priced": 4, "untried": 1,
    }  # fmt: skip
    assert result["verdicts"]["litgpt"]["ran out, fits"] == 1
    assert result["unpriced"] == {"vtrain": {"no preset": 1}}
    assert result["excluded"] == {"vtrain": {"inference": 1}}


def test_errors_are_relative_to_what_is_published():
    row, one = made(1, 2.0, 1.5, memory_gib=100.0, memory_kind="allocated")
    pair = Pair(row, one)
    assert (pair.error, pair.memory_error, pair.fit(None)) == (-0.25, -0.5, Fit.FITS)
    assert Pair(row, replace(one, gib=70.5)).fit(None) is Fit.NOT
    reserved = replace(row, memory_kind="reserved")
    assert Pair(reserved, one).memory_error is None
    assert Pair(reserved, replace(one, reserved_gib=80.0)).memory_error == pytest.approx(-0.2)
    assert size_of(ROW) == "under 1B"
    assert elements_of(ROW) == "under 1 Mi"
    assert elements_of(replace(ROW, hidden=4096, sequence=4096, tp=8)) == "4 Mi to 16 Mi"


def test_verdicts_doubt_what_is_within_the_error_of_other_sources():
    rows = [
        made(i, 1.0, 1.0, source="a", memory_gib=50.0 + i, memory_kind="allocated")
        for i in range(20)
    ]
    near, far = made(30, 1.0, 1.0, source="b"), made(31, 1.0, 1.0, source="b")
    found = {row.key: one for row, one in rows}
    found[near[0].key] = replace(near[1], gib=60.0)
    found[far[0].key] = replace(far[1], gib=20.0)
    result = result_of([row for row, _ in (*rows, near, far)], found)
    verdicts = result["verdicts"]["b"]
    assert (verdicts["ran, try it"], verdicts["ran, fits"]) == (1, 1)
    assert result["verdicts"]["a"]["ran, fits"] == 20, "no other source has peaks"


def test_intervals_are_those_of_other_sources():
    def row(source, ratio, **changed):
        return HeldOut(source, conditions_of(replace(ROW, **changed), 1.0), ratio)

    rows = [row("a", 0.9 + 0.01 * i) for i in range(21)] + [row("b", 1.0), row("b", 1.5)]
    found = coverage(rows)
    assert found["b"] == {"rows": 2, "compared": 2, "inside": 1, "widened": 1.0}
    assert found["a"]["compared"] == 0, "b has too few rows"
    for other in ({"step_seconds": 0.1}, {"pp": 2}, {"compiled": True}, {"precision": "fp8-mx"}):
        mixed = [*rows, row("b", 1.0, **other), row("b", 1.0, experts=8, **other)]
        assert coverage(mixed)["b"]["compared"] == 2, "none of a was measured so"
    apart = [row("a", 0.98 + 0.002 * i) for i in range(21)]
    apart += [row("b", 1.18 + 0.002 * i) for i in range(21)]
    factor = widening(apart)
    assert factor > 5, "sources differ by more than their rows"
    compared = comparison((one.source, one.ratio) for one in apart[:21])
    wide = widened(compared, factor)
    assert wide.quantile(0.95) > 1.2 > compared.quantile(0.95)
    assert wide.quantile(0.5) == pytest.approx(compared.quantile(0.5))


def test_what_users_are_told_is_of_the_committed_results():
    used = held_out(json.loads(FITTED.read_text()), read())
    points = json.loads(RESULT.read_text())["points"]
    assert json.loads(FILE.read_text()) == json.loads(json.dumps(content(used, points)))


def test_a_loss_on_logits_as_they_are_has_no_wide_copy_of_them(tmp_path):
    sizes = []
    for loss in ("float32", "in place"):
        graph = graph_of(Shape.of(replace(ROW, loss=loss, layers=1)), tmp_path)
        classes = [t for t in graph.tensor.values() if t.shape and t.shape[-1] == ROW.vocab]
        sizes.append(sum(t.dtype == "float32" and len(t.shape) > 1 for t in classes))
    assert sizes[0] > sizes[1]
    assert approximations(replace(ROW, loss="in place")) == (
        "loss in place priced as one on half-precision logits",
    )


def test_differences_are_named():
    row = replace(ROW, precision="fp16", reduce="fp16", gpus=16)
    assert len(approximations(row)) == 2
    assert approximations(ROW) == ()
    narrow = replace(ROW, precision="fp8-tensorwise", dp_replicate=1, dp_shard=2)
    (unstated,), *stated = (approximations(replace(narrow, fp8_gather=word)) for word in GATHERS)
    assert "gathered in 8 bits is unstated" in unstated and stated == [(), ()]


def test_plots_draw_every_row_with_a_time():
    points = [
        {"source": "a", "parameters": 1e9, "published": 1.0, "predicted": 2.0},
        {"source": "b", "parameters": 1e10, "published": None, "predicted": 2.0},
        {"source": "b", "parameters": 1e10, "published": 20.0, "predicted": 2.0},
    ]
    for text in (plots.times(points), plots.errors(points)):
        assert text.count('r="2.2"') == 2
        assert text.count('r="4"') == 2


def test_the_page_is_what_the_result_gives():
    for path, text in page.pages(RESULT, FITTED, own.RESULT, overlap.RESULT).items():
        assert path.read_text() == text, "run python -m benchmarks.published --page"


def test_own_rows_are_priced_as_their_models_are(tmp_path):
    """Products of GPT-2, counted by hand: 6 operations for each weight and token."""
    small = Shape.of(replace(ROW, family=OWN, model="GPT-2", precision="pure-bf16"))
    assert small.model == "GPT-2" and not small.mixed
    found = own.priced(graph_of(small, tmp_path))
    assert found["others"] > found["update"] > 0
    assert found["update"] == pytest.approx(found["fused"] * 21 / 7), "passes of AdamW"
    flop = 6 * 8 * 32 * (3 * 12 * 64**2 + 128 * 64)
    device = sw.Machine.preset(own.MACHINE).device
    assert found["products"] > flop / device.peak_flop_per_s("bfloat16")


def test_the_own_result_is_of_the_committed_measurement():
    result = json.loads(own.RESULT.read_text())
    rows = list(own_rows(MEASURED.read_text()))
    assert [row["measured"] for row in result["rows"]] == [row.step_seconds for row in rows]
    assert list(result["kinds"]) == list(dict.fromkeys(row.model for row in rows))
    assert all(row["predicted"] > 0 and row["predicted_gib"] > 0 for row in result["rows"])


def test_the_result_is_of_the_committed_rows():
    result = json.loads(RESULT.read_text())
    read_here = {name: count["read"] for name, count in result["counts"].items()}
    counted = {}
    for row in read():
        counted[row.source] = counted.get(row.source, 0) + 1
    assert read_here == counted


def test_presets_hide_the_part_with_the_least_error():
    parts = json.loads(overlap.RESULT.read_text())["parts"]
    assert min(parts, key=lambda one: one["mape"])["overlap"] == OVERLAP
    assert all(len(one["sources"]) >= 3 for one in parts)


@pytest.mark.parametrize("frozen", (False, True))
@pytest.mark.parametrize("positions", (1, 3, 7, 20))
def test_a_loss_in_parts_is_the_mean_over_all_positions(frozen, positions):
    torch.manual_seed(0)
    head = torch.nn.Linear(4, 9, bias=False).requires_grad_(not frozen)
    x, labels = torch.randn(2, 7, 4), torch.randint(9, (2, 7))
    logits, targets = (head(x), labels) if frozen else (head(x)[:, :-1], labels[:, 1:])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss_in_parts(head, x, labels, positions), expected)


def test_an_adapter_of_some_parts_changes_these_alone_and_keeps_its_changes():
    torch.manual_seed(0)
    made = JointAdapter(4, (6, 2, 2), "qv", 3, bias=False).eval()
    x = torch.randn(5, 4)
    base = torch.nn.functional.linear(x, made.weight)
    inner = made.lora_a(x).chunk(2, dim=-1)
    query, value = (layer(own) for layer, own in zip(made.lora_b, inner, strict=True))
    expected = base + 0.5 * torch.cat([query, torch.zeros(5, 2), value], dim=-1)
    torch.testing.assert_close(made(x), expected)


def test_loops_of_litgpt_keep_the_logits_of_a_micro_batch_in_float32():
    row = replace(ROW, vocab=1000, sequence=64, micro_batch=2)
    assert held_bytes(replace(row, source="litgpt")) == 4 * 2 * 64 * 1000
    assert held_bytes(row) == 0
