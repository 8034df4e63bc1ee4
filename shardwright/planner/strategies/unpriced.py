"""Refuses, by name, fields of a strategy whose mechanism is not implemented."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.ir.graph import Graph, LeafKind
from shardwright.ir.options.mixed_precision import COMPUTE, MASTER, master_weights
from shardwright.ir.strategy.fields import DTYPE_FIELDS
from shardwright.ir.strategy.recompute import StrategyError
from shardwright.ir.strategy.strategy import Strategy


def require_priced(strategy: Strategy, graph: Graph) -> None:
    """Raise `StrategyError` for the first field whose value has no price for this graph.

    A value without effect is accepted, e.g. a `loss` split over a single device.
    """
    for name, instead in unpriced_fields(strategy, graph.numerics.loss_chunks):
        word = getattr(strategy, name)
        shown = ",".join(word) if isinstance(word, tuple) else word
        raise StrategyError(f"{name}={shown} is not yet priced; {instead}")
    _require_dtypes(strategy, graph)


def unpriced_fields(strategy: Strategy, chunks: int) -> Iterator[tuple[str, str]]:
    """Names of fields without a price, with what to give instead.

    `chunks` are those in which the captured graph computes its loss.
    """
    if strategy.pp > 1 and strategy.order[0] != "pp":
        yield "order", "ranks of a stage are neighbours here, so put pp first"
    if strategy.offload:
        yield "offload", "machines describe no link to the host, so leave it out"
    if strategy.fp8 is not None:
        yield "fp8", "the rates of its products are not known, so leave it out"
    plain = [f"chunked({chunks})"]
    if chunks == 1:
        plain += ["vocabulary-parallel", *(["whole"] if strategy.tp == 1 else [])]
    if strategy.loss not in plain:
        yield "loss", f"use {' or '.join(plain[chunks == 1 :])}"


def dtypes_of(graph: Graph) -> tuple[str, str, str, str]:
    """Dtypes of a graph's training, in the order of `DTYPE_FIELDS`."""
    leaves = graph.leaves_of(LeafKind.PARAMETER)
    used = {graph.tensor[leaf.name].dtype for leaf in leaves}
    used = {dtype for dtype in used if "float" in dtype}
    compute = used.pop() if len(used) == 1 else ""
    if not master_weights(graph):
        return compute, compute, compute, compute
    return compute, COMPUTE if graph.numerics.reduce == "bf16" else MASTER, MASTER, MASTER


def mixed_precision(strategy: Strategy) -> dict[str, str]:
    """Options of `capture` for parameters kept in float32 and used in 16 bits, summed as stated."""
    if strategy.reduce_dtype in ("bfloat16", "float16"):
        return {"precision": "bf16", "reduce": "bf16"}
    return {"precision": "bf16"}


def _require_dtypes(strategy: Strategy, graph: Graph) -> None:
    """Raise `StrategyError` for a dtype that is not that of the captured graph."""
    for name, found in zip(DTYPE_FIELDS, dtypes_of(graph), strict=True):
        wanted = getattr(strategy, name)
        if wanted is not None and wanted != found:
            has = found or "several dtypes"
            how = 'reduce="bf16"' if name == "reduce_dtype" else 'precision="bf16"'
            raise StrategyError(
                f"{name}={wanted} is not how the model was captured, with {has}; capture it with"
                f" {how} or in that dtype, or leave the word out"
            )
