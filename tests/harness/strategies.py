"""Hypothesis strategies for `Strategy`: small degrees, every field drawn."""

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
from shardwright.ir.strategy.recompute import COUNTED, PLAIN, Recompute
from shardwright.ir.strategy.strategy import Strategy, divisors

_DEGREE = st.sampled_from((1, 1, 2, 3, 4))
_NAMES = st.sampled_from((("core_attn",), ("layernorm", "moe_act"), ("layers.*.mlp",)))
_RECOMPUTE = st.one_of(
    st.sampled_from(PLAIN).map(Recompute),
    st.builds(Recompute, st.sampled_from(COUNTED), st.integers(1, 4)),
    st.builds(lambda names: Recompute("ops", names=names), _NAMES),
    st.builds(lambda names: Recompute("modules", names=names), _NAMES),
    st.integers(1, 9).map(lambda n: Recompute("budget", fraction=n / 10)),
)
_PIPELINES = st.sampled_from(
    (
        {},
        {},
        {"micro_batches": 4},
        {"pp": 2, "micro_batches": 8},
        {"pp": 2, "schedule": "GPipe", "micro_batches": 3},
        {"pp": 4, "schedule": "Interleaved1F1B", "virtual_stages": 2, "micro_batches": 8},
        {"pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 3, "micro_batches": 4},
        {"pp": 2, "schedule": "InterleavedZeroBubble", "virtual_stages": 2, "micro_batches": 4},
        {"pp": 2, "schedule": "ZBVZeroBubble", "virtual_stages": 2, "micro_batches": 8},
        {"pp": 2, "stage_cut": (15, 17), "micro_batches": 2},
        {
            "pp": 2,
            "schedule": "Interleaved1F1B",
            "virtual_stages": 2,
            "stage_cut": (8, 8, 9, 7),
            "micro_batches": 4,
        },
    )
)
_PRESET = st.sampled_from(
    (
        {},
        dict.fromkeys(("param_dtype", "reduce_dtype", "grad_dtype", "state_dtype"), "bfloat16"),
        {
            "param_dtype": "bfloat16",
            **dict.fromkeys(("reduce_dtype", "grad_dtype", "state_dtype"), "float32"),
        },
        {
            "param_dtype": "bfloat16",
            "reduce_dtype": "bfloat16",
            **dict.fromkeys(("grad_dtype", "state_dtype"), "float32"),
        },
        {
            "param_dtype": "tf32",
            **dict.fromkeys(("reduce_dtype", "grad_dtype", "state_dtype"), "float32"),
        },
    )
)
_DTYPE = st.sampled_from((*DTYPES[:3], None))
_DTYPES = st.one_of(
    _PRESET,
    st.fixed_dictionaries(
        {
            "param_dtype": st.sampled_from((*DTYPES, None)),
            **dict.fromkeys(("reduce_dtype", "grad_dtype", "state_dtype"), _DTYPE),
        }
    ),
)


@st.composite
def training_strategies(draw: st.DrawFn) -> Strategy:
    """Any consistent strategy of up to a thousand devices."""
    degrees = {name: draw(_DEGREE) for name in ("dp_replicate", "dp_shard", "cp", "tp")}
    ranks = degrees["dp_replicate"] * degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    offload = draw(st.sets(st.sampled_from(OFFLOADS)))
    found = Strategy(
        **degrees,
        ep=draw(st.sampled_from(divisors(ranks // degrees["tp"]))),
        etp=draw(st.sampled_from((None, 1, degrees["tp"]))),
        order=tuple(draw(st.sampled_from((AXES, (*AXES[1:3], "pp", "cp", "tp"), AXES[::-1])))),
        zero=draw(st.integers(0, 3)),
        reshard_after_forward=draw(st.sampled_from((True, False, None))),
        sequence_parallel=draw(st.booleans()),
        cp_style=draw(st.sampled_from(CP_STYLES)),
        recompute=draw(_RECOMPUTE),
        offload=tuple(o for o in OFFLOADS if o in offload),
        fp8=draw(st.sampled_from((None, *FP8))),
        compile=draw(st.sampled_from(COMPILES)),
        loss=draw(st.sampled_from((*LOSSES, "chunked(8)"))),
        mlp=draw(st.sampled_from((*MLPS, "chunked(8)"))),
        gradient_sync=draw(st.sampled_from((*SYNCS, None))),
        **draw(_DTYPES),
        **draw(_PIPELINES),
    )
    for name in ("async_tp", "ep_overlap"):
        found = found.switched_on(name) if draw(st.booleans()) else found
    return found.in_8_bit(found.fp8, gathers=draw(st.booleans()))
