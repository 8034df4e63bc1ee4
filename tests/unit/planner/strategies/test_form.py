"""Strategies in 8 bits: prices, refusals, and plans of recipes that are not executed here."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright as sw
from shardwright.frameworks.reading import read_text
from shardwright.frameworks.semantics import changed_numbers
from shardwright.ir.options.fp8 import FLOAT8
from shardwright.ir.options.numerics import NumericsError
from shardwright.ir.redistribution import Collective
from shardwright.ir.strategy.fields import DTYPE_FIELDS
from shardwright.ir.strategy.recompute import StrategyError
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.presets import preset
from shardwright.machine.topology import links
from shardwright.plan_io.plan_text import plan_from_json, plan_to_json
from shardwright.planner.audit.auditor import Auditor
from shardwright.planner.audit.priced_as import priced_as
from shardwright.planner.plans.bandwidth_bound import bandwidth_bound
from shardwright.planner.strategies.expansion import Expansion
from shardwright.planner.strategies.form import form_of
from shardwright.planner.strategies.frontier.bounds import Bounds
from shardwright.planner.strategies.recognition import strategy_of
from shardwright.planner.strategies.unpriced import require_priced
from shardwright.planner.tables.mesh_invariants import MeshInvariants
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.instructions import Transfer
from shardwright.program.step.lower.plan_lowering import PlanLowering
from shardwright.report.headline import headline
from shardwright.report.summary import summary
from shardwright.rules.analysis import analyze
from shardwright.rules.operators.mlp_chunks import with_mlp_chunks
from shardwright.simulate.time.program_prices import transfer_seconds
from shardwright.tracing.op_memory.footprints import Footprints

TOKENS, WIDTH, INNER = 32768, 2048, 8192
TORCHAO, ENGINE = "dp_shard=2 compile=regional fp8=", "dp_shard=2 fp8="


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList((nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH))) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, x, labels):
        for up, down in self.layers:
            x = x + down(F.relu(up(x)))
        return F.cross_entropy(self.head(x), labels)


def batch(device):
    x = torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16, device=device)
    return x, torch.zeros(TOKENS, dtype=torch.long, device=device)


@pytest.fixture(scope="module")
def graph():
    return sw.capture(Mlp().to(torch.bfloat16).to("meta"), batch("meta"))


def test_products_in_8_bits_take_less_time_where_they_are_large(graph):
    for like, names in ((TORCHAO, ("tensorwise", "rowwise")), (ENGINE, ("delayed", "blockwise"))):
        plain = sw.price(graph, "2xH100", like.removesuffix(" fp8="))
        for name in names:
            found = sw.price(graph, "2xH100", like + name)
            assert found.step_seconds < plain.step_seconds, name
            assert found.name.count(f"fp8={name}") == 1 and strategy_of(found).fp8 == name


def test_transformer_engine_keeps_inputs_in_8_bits_and_torchao_as_they_are(graph):
    """Of six layers a rank keeps the inputs of half of the tokens; ReLU keeps its result, too."""

    def most_saved(text):
        memory = sw.price(graph, "2xH100", f"dp_shard=2 zero=0{text}").memory
        return max(moment.saved for moment in memory.curve)

    rows, compiled = TOKENS // 2, " compile=regional"
    # Inputs of `up` lose a byte of two, but the batch, which stays beside its copy; those of `down`
    # stay for ReLU.
    copies = 3 * rows * INNER + rows * WIDTH - 2 * rows * WIDTH
    assert most_saved(" fp8=delayed") - most_saved("") == copies
    assert most_saved(compiled + " fp8=rowwise") == most_saved(compiled)


def test_weights_are_cast_once_a_step_by_transformer_engine(graph):
    machine = preset("2xH100")

    def shares(text):
        form = form_of(graph, Strategy.parse(text))
        values = MeshInvariants(form, analyze(form), machine, micro_batches=4)
        found = (values.workload(op).fp8 for op in form.ops if op.kind == "linear")
        return [fp8 and fp8.weight_share for fp8 in found]

    assert shares(ENGINE + "delayed") == [1 / 4] * 6 + [None]
    assert shares(TORCHAO + "rowwise") == [1.0] * 6 + [None]


GATHER = " fp8_gather=on"


@pytest.fixture(scope="module")
def masters():
    x, labels = batch("meta")
    return sw.capture(Mlp().to("meta"), (x.float(), labels), precision="bf16")


@pytest.mark.parametrize("like", [TORCHAO + "tensorwise", ENGINE + "delayed"])
def test_weights_of_layers_in_8_bits_are_gathered_in_them_and_others_are_not(masters, like):
    """A transfer takes its launch, its lap, and a byte for each element of the other's tile."""
    machine = preset("2xH100")
    plain, found = (sw.price(masters, machine, like + more) for more in ("", GATHER))
    assert found.step_seconds < plain.step_seconds
    assert strategy_of(found) == Strategy.parse(like + GATHER)

    def gathered(plan):
        return {t.value: t.bytes for t in plan.transfers if "all_gather" in t.collectives[0]}

    before, after = gathered(plain), gathered(found)
    weights = {name for name in before if name.startswith("layers") and "weight" in name}
    assert len(weights) == 6 and after.keys() == before.keys()
    assert {name for name in before if after[name] != before[name]} == weights
    assert all(after[name] == WIDTH * INNER and before[name] == 2 * after[name] for name in weights)
    form = form_of(masters, Strategy.parse(like + GATHER))
    decisions = read_plan(found, form, analyze(form))
    program = PlanLowering(form, analyze(form), decisions, None).program(0)
    (link,) = links(machine, found.mesh)
    sent = [one for one in program.instructions if isinstance(one, Transfer)]
    sent = [one for one in sent if one.parts[0].dtype == FLOAT8]
    assert {one.collective for one in sent} == {Collective.ALL_GATHER}
    assert {part.value.partition("/")[0] for one in sent for part in one.parts} == weights
    for one in sent:
        fixed = machine.collective_launch_seconds + link.lap_seconds
        tile = len(one.parts) * WIDTH * INNER // 2
        seconds = fixed + tile / link.gather_bytes_per_s
        assert transfer_seconds(one, found.mesh, machine).link == pytest.approx(seconds)


def test_gathered_copies_are_half_as_large_and_bounds_hold(masters):
    machine, text = preset("2xH100"), TORCHAO + "tensorwise reshard=off"
    half, eighth = (sw.price(masters, machine, text + more).memory for more in ("", GATHER))
    most = [max(moment.saved for moment in one.curve) for one in (half, eighth)]
    assert most[0] - most[1] == 5 * WIDTH * INNER, (
        "the first is not kept: the batch has no gradient"
    )
    turned = sw.price(masters, machine, ENGINE + "delayed reshard=off" + GATHER).memory
    engine = sw.price(masters, machine, ENGINE + "delayed reshard=off").memory
    most = [max(moment.saved for moment in one.curve) for one in (turned, engine)]
    assert most[0] == most[1], "both layouts in 8 bits take what one in 16 does"
    for like in (TORCHAO + "tensorwise", ENGINE + "delayed", ENGINE + "tensorwise mb=2"):
        for more in ("", " reshard=off", " zero=1"):
            strategy = Strategy.parse(like + GATHER + more)
            expansion = Expansion(form_of(masters, strategy), machine, "adamw")
            seconds, peak = expansion.expanded(strategy).cost
            bounds = Bounds(expansion)
            assert 0 < bounds.seconds(strategy) <= seconds and bounds.bytes(strategy) <= peak
            plan = expansion.expanded(strategy).plan(0.0, ())
            least = bandwidth_bound(plan, expansion.graph, machine)
            assert 0 < least <= sw.price(masters, machine, strategy).step_seconds


def test_weights_that_arrive_in_8_bits_are_turned_and_not_cast(masters):
    def casts(text, on):
        form = form_of(masters, Strategy.parse(text + GATHER))
        values = MeshInvariants(form, analyze(form), preset(on))
        recipe = next(fp8 for op in form.ops if (fp8 := values.workload(op).fp8)).recipe
        return recipe.weight.kernels, recipe.weight_again.kernels

    assert casts(TORCHAO + "tensorwise", "2xH100") == ((), ((0, 2),))
    assert casts(ENGINE + "delayed", "2xH100") == (((0, 2),), ())
    assert casts(ENGINE + "delayed", "2xB200") == ((), ())


@pytest.mark.parametrize(
    ("machine", "text", "said"),
    [
        ("2xA100", "dp_shard=2 fp8=delayed", "A100 has no rate of products in float8_e4m3fn"),
        ("2xH100", "dp_shard=2 fp8=mxfp8", "mxfp8, which GPUs of Blackwell have"),
        ("2xH100", "dp_shard=2 fp8=rowwise", "need the compiler, so add compile=regional"),
        ("2xH100", "dp_shard=2 fp8=delayed compile=regional", "so take compile=off"),
        ("32xH100", "tp=32 zero=0 fp8=delayed", ""),
        ("256xH100", "tp=256 zero=0 fp8=delayed", "tp=256 cuts the 2048 of .* no multiples of 16"),
    ],
)
def test_what_has_no_price_is_refused_in_one_line(graph, machine, text, said):
    if not said:
        assert sw.price(graph, machine, text).step_seconds > 0
        return
    with pytest.raises(StrategyError, match=said) as refused:
        sw.price(graph, machine, text)
    assert "\n" not in str(refused.value)


def test_blackwell_has_products_with_scales_of_blocks(graph):
    assert sw.price(graph, "2xB200", ENGINE + "mxfp8").step_seconds > 0


def test_an_audit_prices_a_recipe_and_proposes_none(graph):
    machine, given = preset("2xH100"), Strategy.parse(TORCHAO + "rowwise")
    assert priced_as(given, graph, machine) == (given, ())
    auditor = Auditor(graph, machine, "adamw", Footprints(), None)
    found, expected = auditor.price(given).plan, sw.price(graph, machine, given)
    assert (found.step_seconds, found.peak_bytes) == (expected.step_seconds, expected.peak_bytes)
    for like in (given, given.but(fp8=None)):
        changes = auditor.changes(auditor.price(like), every=True)
        assert changes and {one.change.strategy.fp8 for one in changes} == {like.fp8}
        assert auditor.uniform(like).strategy.fp8 == like.fp8
    nearest, (replaced,) = priced_as(given, graph, preset("2xA100"))
    assert (nearest.fp8, replaced.field, replaced.given) == (None, "fp8", "rowwise")


TITAN = """\
[model]
name = "llama3"
flavor = "8B"
converters = ["float8"]
[training]
local_batch_size = 2
seq_len = 16
[parallelism]
data_parallel_shard_degree = 2
[compile]
enable = true
"""
BRIDGE = """\
train: {micro_batch_size: 1, global_batch_size: 2}
model: {seq_length: 16}
ddp: {use_distributed_optimizer: true}
mixed_precision: bf16_with_fp8_delayed_scaling_mixed
"""


@pytest.mark.parametrize(
    ("text", "key"), [(TITAN, "torchao:tensorwise"), (BRIDGE, "TransformerEngine:delayed:gather")]
)
def test_the_config_of_a_framework_is_priced_with_its_recipe(graph, text, key):
    machine, read = preset("2xH100"), read_text(text, devices=2)
    given, replaced = priced_as(read.strategy, graph, machine)
    assert {one.field for one in replaced} <= {*DTYPE_FIELDS, "loss"}
    assert sw.price(graph, machine, given).numerics.fp8 == key


def test_an_audit_tries_gathers_in_8_bits_as_a_change_of_its_own(masters):
    auditor = Auditor(masters, preset("2xH100"), "adamw", Footprints(), None)
    plain = Strategy.parse(TORCHAO + "tensorwise")
    for like, after in ((plain, True), (plain.but(fp8_gather=True), False)):
        changes = auditor.changes(auditor.price(like), every=True)
        (one,) = (c for c in changes if c.change.field == "fp8_gather")
        assert one.change.after is after and (one.gain > 0) == after
    (said,) = changed_numbers(plain, plain.but(fp8_gather=True))
    assert said == "weights are rounded to 8 bits before they are gathered, not after it"
    whole = plain.but(fp8_gather=True).but(dp_shard=1, dp_replicate=2)
    assert not whole.fp8_gather and auditor.price(whole).plan.step_seconds > 0


def test_strategies_are_enumerated_in_8_bits_where_that_is_asked_for(graph):
    asked = sw.strategies(graph, "2xH100", fp8="rowwise")
    assert {strategy_of(plan).fp8 for plan in asked} == {"rowwise"}
    assert {strategy_of(plan).compile for plan in asked} == {"regional"}
    assert {strategy_of(plan).fp8 for plan in sw.strategies(graph, "2xH100")} == {None}


def test_a_plan_of_another_recipe_is_kept_in_files_and_not_executed(graph):
    plan = sw.price(graph, "1xH100", "fp8=delayed")
    assert plan_from_json(plan_to_json(plan)).numerics == plan.numerics
    gathering = sw.price(graph, "2xH100", f"{ENGINE}delayed{GATHER}")
    said = "TransformerEngine, weights gathered in 8 bits: priced, not executed here"
    assert said in headline(plan_from_json(plan_to_json(gathering)))
    label = "fp8 delayed by TransformerEngine: priced, not executed here"
    assert label in headline(plan) and label in summary(plan)
    model = Mlp().to(torch.bfloat16)
    for run in (
        lambda: sw.parallelize(model, plan),
        lambda: sw.verify(model, plan, batch("cpu")),
    ):
        with pytest.raises(NumericsError, match="fp8=TransformerEngine:delayed is priced, not"):
            run()


def test_mlps_in_chunks_are_no_layers_in_8_bits(graph):
    with pytest.raises(StrategyError, match="its products are not in 8 bits; leave it or fp8 out"):
        sw.price(graph, "2xH100", f"{TORCHAO}rowwise mlp=chunked(2)")
    with pytest.raises(StrategyError, match=r"mlp=whole is not yet priced; use chunked\(2\)"):
        require_priced(Strategy(dp_shard=2), with_mlp_chunks(graph, 2), preset("2xH100"))
    with pytest.raises(StrategyError, match=r"mlp=chunked\(2\): mlp_chunks=2 is not possible"):
        form_of(with_mlp_chunks(graph, 4), Strategy(mlp="chunked(2)"))
