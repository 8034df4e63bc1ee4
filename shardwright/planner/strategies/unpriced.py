"""Refuses, by name, fields of a strategy whose mechanism is not implemented."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.ir.graph import Graph
from shardwright.ir.options.fp8 import MXFP8
from shardwright.ir.options.mixed_precision import dtypes_of
from shardwright.ir.options.numerics import Numerics
from shardwright.ir.strategy.fields import DTYPE_FIELDS, MLPS, STORED_LOSSES
from shardwright.ir.strategy.recompute import StrategyError
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.model import Device, Machine
from shardwright.machine.topology import crossed_levels
from shardwright.planner.strategies.form import recipe_for, runs_as
from shardwright.planner.strategies.roles import mesh_of, role_axes
from shardwright.rules.operators.fp8_layers import MULTIPLE, fp8_layers


def require_priced(strategy: Strategy, graph: Graph, machine: Machine) -> None:
    """Raise `StrategyError` for the first field whose value has no price for this graph.

    A value without effect is accepted, e.g. a `loss` split over a single device.
    """
    for name, instead in unpriced_fields(strategy, graph.numerics, machine.device):
        word = getattr(strategy, name)
        shown = ",".join(word) if isinstance(word, tuple) else word
        raise StrategyError(f"{name}={shown} is not yet priced; {instead}")
    assert runs_as(recipe_for(strategy), graph.numerics.fp8), "the graph is in another form"
    _require_dtypes(strategy, graph)
    _require_tiles(strategy, graph)
    if strategy.async_tp and _crosses_hosts(strategy, machine):
        raise StrategyError(
            f"async_tp=on is not yet priced; its {strategy.tp} ranks are not all in one host of"
            f" {machine.levels[0].size} devices, so leave it out or take a smaller tp"
        )


def _crosses_hosts(strategy: Strategy, machine: Machine) -> bool:
    """Whether ranks along `tp` are in several hosts."""
    axes = role_axes(strategy)
    levels = zip(axes, crossed_levels(machine, mesh_of(strategy, axes)), strict=False)
    return any(axis.role == "tp" and max(crossed) > 0 for axis, crossed in levels)


def require_recipe(strategy: Strategy, machine: Machine) -> None:
    """Raise `StrategyError` for a recipe in 8 bits that has no price on `machine`."""
    if instead := _instead_of_fp8(strategy, machine.device):
        raise StrategyError(f"fp8={strategy.fp8} is not yet priced; {instead}")


def unpriced_fields(
    strategy: Strategy, numerics: Numerics, device: Device
) -> Iterator[tuple[str, str]]:
    """Names of fields without a price on `device`, with what to give instead.

    `numerics` have the chunks in which the captured graph computes its loss and its MLPs.
    """
    if strategy.offload and (instead := _instead_of_offload(strategy, device.host_bytes_per_s)):
        yield "offload", instead
    if instead := _instead_of_fp8(strategy, device):
        yield "fp8", instead
    forms = ("loss", numerics.loss_chunks, STORED_LOSSES), ("mlp", numerics.mlp_chunks, MLPS)
    for name, chunks, whole in forms:
        plain = whole if chunks == 1 else (f"chunked({chunks})",)
        if getattr(strategy, name) not in (*plain, f"chunked({chunks})"):
            yield name, f"use {' or '.join(plain)}"


def _instead_of_offload(strategy: Strategy, host_bytes_per_s: float | None) -> str:
    """The text on what to give in place of an offload without a price; empty if it has one."""
    if host_bytes_per_s is None:
        return "the machine has no host_bandwidth, so give it or leave offload out"
    if "parameters" in strategy.offload and strategy.pp > 1:
        return "pipeline stages keep parameters on the device, so use offload=optimizer or pp=1"
    if "activations" in strategy.offload and strategy.recompute.kind == "none":
        return "only what recomputed layers keep goes to the host, so add ac=full"
    return ""


def _instead_of_fp8(strategy: Strategy, device: Device) -> str:
    """The text on what to give in place of a recipe without a price; empty if it has one."""
    if strategy.fp8 is None:
        return ""
    recipe = recipe_for(strategy)
    if recipe is None and strategy.compile == "off":
        return "its casts are torchao's, which need the compiler, so add compile=regional"
    if recipe is None:
        return "its layers are TransformerEngine's, which are not compiled, so take compile=off"
    if device.multiplies_in(recipe.products):
        return ""
    having = "Blackwell" if recipe.products == MXFP8 else "Hopper, Ada, Blackwell and CDNA 3"
    return (
        f"{device.kind} has no rate of products in {recipe.products}, which GPUs of {having} have,"
        " so leave it out"
    )


def _require_tiles(strategy: Strategy, graph: Graph) -> None:
    """Raise `StrategyError` where tensor parallelism leaves tiles that 8 bits do not permit."""
    for name in fp8_layers(graph):
        weight = graph.op[name].operands[1]
        for size in graph.tensor[weight].shape:
            if size % strategy.tp == 0 and size // strategy.tp % MULTIPLE:
                raise StrategyError(
                    f"fp8={strategy.fp8}: tp={strategy.tp} cuts the {size} of {weight} into tiles"
                    f" that are no multiples of {MULTIPLE}; use a smaller tp"
                )


_PRECISIONS = {"float16": "fp16", "tf32": "tf32"}  # of parameters, where it is not bf16


def mixed_precision(strategy: Strategy) -> dict[str, str]:
    """Options of `capture` for parameters kept in float32 and used in others, summed as stated."""
    half = _PRECISIONS.get(strategy.param_dtype or "", "bf16")
    if strategy.reduce_dtype in ("bfloat16", "float16"):
        return {"precision": half, "reduce": half}
    return {"precision": half}


def _require_dtypes(strategy: Strategy, graph: Graph) -> None:
    """Raise `StrategyError` for a dtype that is not that of the captured graph."""
    for name, found in zip(DTYPE_FIELDS, dtypes_of(graph), strict=True):
        wanted = getattr(strategy, name)
        if wanted is not None and wanted != found:
            has = found or "several dtypes"
            half = _PRECISIONS.get(wanted, "bf16")
            how = f'reduce="{half}"' if name == "reduce_dtype" else f'precision="{half}"'
            raise StrategyError(
                f"{name}={wanted} is not how the model was captured, with {has}; capture it with"
                f" {how} or in that dtype, or leave the word out"
            )
