"""Strategies as values: their text, and what cannot be, with the nearest degrees that can."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.ir.strategy.fields import (
    AXES,
    COMPILES,
    CP_STYLES,
    DTYPES,
    FP8,
    LOSSES,
    MLPS,
    OFFLOADS,
    SYNCS,
)
from shardwright.ir.strategy.recompute import COUNTED, PLAIN, Recompute, StrategyError
from shardwright.ir.strategy.strategy import ModelLimits, Strategy, divisors

_DEGREE = st.sampled_from((1, 2, 3, 4, 8))
_NAMES = st.lists(st.sampled_from(("mm", "sdpa", "layers.*.mlp")), min_size=1, max_size=3)
_RECOMPUTE = st.one_of(
    st.sampled_from(PLAIN).map(Recompute),
    st.builds(Recompute, st.sampled_from(COUNTED), st.integers(1, 99)),
    st.builds(lambda names: Recompute("ops", names=tuple(names)), _NAMES),
    st.builds(lambda names: Recompute("modules", names=tuple(names)), _NAMES),
    st.integers(1, 99).map(lambda n: Recompute("budget", fraction=n / 100)),
)
_PIPELINES = st.sampled_from(
    (
        {},
        {"pp": 2, "micro_batches": 16},
        {"pp": 2, "schedule": "GPipe", "micro_batches": 3},
        {"pp": 4, "schedule": "Interleaved1F1B", "virtual_stages": 2, "micro_batches": 8},
        {"pp": 2, "schedule": "ZBVZeroBubble", "virtual_stages": 2, "micro_batches": 8},
        {"pp": 2, "stage_cut": (5, 7), "micro_batches": 2},
    )
)
_SWITCH = st.booleans()
_DTYPE = st.sampled_from((*DTYPES[:3], None))


@st.composite
def _strategies(draw: st.DrawFn) -> Strategy:
    degrees = {name: draw(_DEGREE) for name in ("dp_replicate", "dp_shard", "cp", "tp")}
    ranks = degrees["dp_replicate"] * degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    ep = draw(st.sampled_from(divisors(ranks // degrees["tp"])))
    offload = draw(st.sets(st.sampled_from(OFFLOADS)))
    found = Strategy(
        **degrees,
        ep=ep,
        etp=draw(st.sampled_from((None, 1, degrees["tp"]))),
        order=tuple(draw(st.permutations(AXES))),
        zero=draw(st.integers(0, 3)),
        reshard_after_forward=draw(st.sampled_from((True, False, None))),
        sequence_parallel=draw(_SWITCH),
        cp_style=draw(st.sampled_from(CP_STYLES)),
        recompute=draw(_RECOMPUTE),
        offload=tuple(o for o in OFFLOADS if o in offload),
        param_dtype=draw(st.sampled_from((*DTYPES, None))),
        reduce_dtype=draw(_DTYPE),
        grad_dtype=draw(_DTYPE),
        state_dtype=draw(_DTYPE),
        fp8=draw(st.sampled_from((*FP8, None))),
        compile=draw(st.sampled_from(COMPILES)),
        loss=draw(st.sampled_from((*LOSSES, "chunked(8)"))),
        mlp=draw(st.sampled_from((*MLPS, "chunked(8)"))),
        gradient_sync=draw(st.sampled_from((*SYNCS, None))),
        **draw(_PIPELINES),
    )
    for name in ("async_tp", "ep_overlap"):
        found = found.switched_on(name) if draw(_SWITCH) else found
    return found.in_8_bit(found.fp8, gathers=draw(_SWITCH))


@given(_strategies())
def test_a_strategy_is_read_back_from_its_text(strategy: Strategy) -> None:
    assert Strategy.parse(str(strategy)) == strategy


_CHANGES: dict[str, object] = {
    **dict.fromkeys((*AXES, "ep", "etp", "virtual_stages"), 2),
    **dict.fromkeys(("reduce_dtype", "grad_dtype", "state_dtype"), "bfloat16"),
    "zero": 2,
    "micro_batches": 8,
    "order": AXES[::-1],
    "reshard_after_forward": False,
    "sequence_parallel": False,
    "cp_style": "ulysses",
    "schedule": "GPipe",
    "recompute": Recompute("full"),
    "offload": ("optimizer",),
    "param_dtype": "tf32",
    "fp8": "mxfp8",
    **dict.fromkeys(("fp8_gather", "async_tp", "ep_overlap"), True),
    "compile": "regional",
    "loss": "whole",
    "mlp": "chunked(4)",
    "gradient_sync": "every",
    "stage_cut": (4, 4, 4, 4),
}


@pytest.mark.parametrize("name", [one.name for one in fields(Strategy)])
def test_each_field_alone_is_in_the_text(name: str) -> None:
    schedule = "Interleaved1F1B" if name == "virtual_stages" else "1F1B"
    fp8 = "tensorwise" if name == "fp8_gather" else None
    start = Strategy(dp_shard=4, tp=4, pp=4, micro_batches=4, schedule=schedule, fp8=fp8)
    start = start.but(ep=4) if name == "ep_overlap" else start
    changed = start.but(**{name: _CHANGES[name]})
    assert str(changed) != str(start)
    assert Strategy.parse(str(changed)) == changed


def test_the_example_of_the_documentation() -> None:
    text = "dp_shard=8 tp=8 pp=2:Interleaved1F1B/v2 mb=16 ac=full bf16"
    strategy = Strategy.parse(text)
    assert (strategy.devices, strategy.stages, strategy.micro_batches) == (128, 4, 16)
    assert (strategy.param_dtype, strategy.reduce_dtype) == ("bfloat16", "float32")
    assert str(strategy) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp=0", "tp is a whole number of at least 1"),
        (
            "=8",
            "mb, etp, order, zero, reshard, sp, async_tp, ep_overlap, cp_style, schedule, cut",
        ),
        ("dp=8", "no word of a strategy; did you mean dp_replicate=8 or dp_shard=8?"),
        ("dp_shrad=8", "did you mean dp_shard=8?"),
        ("tp=2 tp=4", "gives tp again"),
        ("zero=4", "zero is 0, 1, 2 or 3"),
        ("ac=every", "recomputation 'every' is not known; write none"),
        ("pp=2:1F1B/v2", "not 2; use pp=2:1F1B, or pp=2:Interleaved1F1B/v2"),
        ("pp=2:ZBVZeroBubble mb=4", "not 1; use pp=2:ZBVZeroBubble/v2, or pp=2:1F1B"),
        ("pp=4:Interleaved1F1B/v2 mb=9", "use micro_batches=8 or micro_batches=10"),
        ("dp_shard=8 ep=3", "use ep=2 or ep=4"),
        ("pp=2 mb=2 cut=5,6,7", "names 3 stages"),
        ("loss=chunked(0)", "loss is vocabulary-parallel"),
        ("mlp=chunked(x)", "mlp is whole or chunked(n)"),
        ("order=tp,pp", "each once"),
        ("tp=2 sp=off async_tp=on", "async_tp=on needs sp=on"),
        ("dp_shard=2 async_tp=on", "async_tp=on needs tp=2 or more"),
        ("dp_shard=2 mb=2 ep_overlap=on", "ep_overlap=on needs ep=2 or more"),
        ("dp_shard=2 ep=2 ep_overlap=on", "ep_overlap=on needs mb=2 or more"),
        ("fp8_gather=yes", "fp8_gather is True or False"),
        ("dp_shard=2 fp8=mxfp8 fp8_gather=on", "fp8_gather=on needs fp8=tensorwise or fp8=delayed"),
        ("dp_replicate=2 fp8=delayed fp8_gather=on", "fp8_gather=on needs sharded parameters"),
        ("dp_shard=2 zero=0 fp8=delayed fp8_gather=on", "fp8_gather=on needs sharded parameters"),
    ],
)
def test_what_cannot_be_is_one_error(text: str, said: str) -> None:
    with pytest.raises(StrategyError) as error:
        Strategy.parse(text)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dp_shard=3 tp=8", "is 24 devices and the machine has 64; use dp_shard=8"),
        ("dp_shard=8 tp=8 pp=1", ""),
        ("dp_shard=4 tp=16", "tp=16 does not fit 8 key and value heads; use tp=8"),
        ("dp_shard=64 mb=3", "dp_shard=64 does not fit 128 samples"),
        ("dp_shard=2 pp=32 mb=32", "pp=32 does not fit 30 layers in 1 x pp stages; use pp=30"),
        ("dp_shard=4 cp=16", "cp=16 does not fit 2056 tokens of a sequence in two chunks each"),
    ],
)
def test_degrees_that_do_not_fit_name_the_nearest(text: str, said: str) -> None:
    limits = ModelLimits(batch=128, sequence=2056, heads=32, key_value_heads=8, layers=30)
    strategy = Strategy.parse(text)
    if not said:
        strategy.require(64, limits)
        return
    with pytest.raises(StrategyError) as error:
        strategy.require(64, limits)
    assert said in str(error.value)
