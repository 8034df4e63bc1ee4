"""Fields of a `Strategy`: their words, the values that each can have, and what switches need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.ir.gradient_sync import EVERY, LAST
from shardwright.ir.options.fp8 import GATHERABLE
from shardwright.ir.schedules.registry import SCHEDULES
from shardwright.ir.strategy.recompute import Recompute

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # outer to inner
TP_PP_DP = ("dp_replicate", "dp_shard", "pp", "cp", "tp")  # Megatron-LM's other order
CP_STYLES = ("ring-zigzag", "all-gather", "ulysses")
DTYPES = ("float32", "bfloat16", "float16", "tf32")
FP8 = ("rowwise", "tensorwise", "blockwise", "delayed", "mxfp8")
OFFLOADS = ("activations", "optimizer", "parameters")
COMPILES = ("off", "regional")
# Losses that read stored logits, each priced as one kernel; the last one's kernel is Megatron-LM's,
# in whose place that of the first one runs.
STORED_LOSSES = ("vocabulary-parallel", "whole", "vocabulary-parallel-fused")
LOSSES = (*STORED_LOSSES, "fused")  # and chunked(n)
MLPS = ("whole",)  # and chunked(n)
SYNCS = (LAST, EVERY)
DTYPE_FIELDS = ("param_dtype", "reduce_dtype", "grad_dtype", "state_dtype")


@dataclass(frozen=True, slots=True)
class Possible:
    """The values that a field can have, and the words for them."""

    words: str
    holds: Callable[[Any], bool]


def _whole(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _one_of(*words: Any) -> Possible:
    shown = ", ".join(str(word) for word in words)
    return Possible(shown, lambda value: isinstance(value, str | None) and value in words)


def _one_of_or_chunked(*words: str) -> Possible:
    return Possible(
        f"{', '.join(words)} or chunked(n)",
        lambda v: isinstance(v, str) and (v in words or chunks_of(v) is not None),
    )


def chunks_of(word: str) -> int | None:
    """Chunks of a loss or an MLP that is "chunked(n)"; None for the others.

    >>> chunks_of("chunked(8)")
    8
    """
    number = word.removeprefix("chunked(").removesuffix(")")
    is_chunked = word == f"chunked({number})" and number.isdecimal()
    return int(number) if is_chunked and str(int(number)) == number and int(number) else None


_COUNT = Possible("a whole number of at least 1", _whole)
_SWITCH = Possible("True or False", lambda value: isinstance(value, bool))
_DTYPE = _one_of(*DTYPES[:3], None)
_SYNCHRONOUS = tuple(name for name, one in SCHEDULES.items() if not one.asynchronous)
POSSIBLE: Mapping[str, Possible] = {
    **dict.fromkeys((*AXES, "ep", "virtual_stages", "micro_batches"), _COUNT),
    "etp": Possible(f"{_COUNT.words}, or None", lambda v: v is None or _whole(v)),
    "order": Possible(
        f"a tuple of {', '.join(AXES)}, each once",
        lambda v: isinstance(v, tuple) and sorted(v) == sorted(AXES),
    ),
    "zero": Possible("0, 1, 2 or 3", lambda v: _whole(v, 0) and v <= 3),
    "reshard_after_forward": Possible(
        "True, False or None", lambda v: v is None or isinstance(v, bool)
    ),
    "sequence_parallel": _SWITCH,
    "async_tp": _SWITCH,
    "ep_overlap": _SWITCH,
    "cp_style": _one_of(*CP_STYLES),
    "schedule": _one_of(*_SYNCHRONOUS),
    "stage_cut": Possible(
        "a tuple of layers of each stage, or None",
        lambda v: v is None or (isinstance(v, tuple) and bool(v) and all(_whole(n, 0) for n in v)),
    ),
    "recompute": Possible("a Recompute", lambda v: isinstance(v, Recompute)),
    "offload": Possible(
        f"a tuple of {', '.join(OFFLOADS)}, in this order",
        lambda v: isinstance(v, tuple) and v == tuple(o for o in OFFLOADS if o in v),
    ),
    "param_dtype": _one_of(*DTYPES, None),
    **dict.fromkeys(DTYPE_FIELDS[1:], _DTYPE),
    "fp8": _one_of(*FP8, None),
    "fp8_gather": _SWITCH,
    "compile": _one_of(*COMPILES),
    "loss": _one_of_or_chunked(*LOSSES),
    "mlp": _one_of_or_chunked(*MLPS),
    "gradient_sync": _one_of(*SYNCS, None),
}

Fields = Mapping[str, Any]  # all fields of a strategy by name


def _of_gathers(given: Fields) -> str:
    if given["fp8"] not in GATHERABLE:
        return f"fp8={' or fp8='.join(GATHERABLE)}, whose weights have one scale each"
    if given["zero"] == 0 or given["dp_shard"] == given["cp"] == 1:
        return "sharded parameters, so dp_shard=2 or more and zero=1 or more"
    return ""


def _of_async_tp(given: Fields) -> str:
    if given["tp"] == 1:
        return "tp=2 or more, whose messages it hides"
    return "" if given["sequence_parallel"] else "sp=on, whose gathers and scattered sums it hides"


def _of_ep_overlap(given: Fields) -> str:
    if given["ep"] == 1:
        return "ep=2 or more, whose messages it hides"
    return "" if given["micro_batches"] > 1 else "mb=2 or more, whose operators hide them"


NEEDS: Mapping[str, Callable[[Fields], str]] = {
    "fp8_gather": _of_gathers,
    "async_tp": _of_async_tp,
    "ep_overlap": _of_ep_overlap,
}


def lacking(given: Fields) -> dict[str, str]:
    """The fields that are on, each with what it needs and does not have; without those that do."""
    found = {name: needs(given) for name, needs in NEEDS.items() if given[name] is True}
    return {name: missing for name, missing in found.items() if missing}
