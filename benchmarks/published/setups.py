"""From a row to the machine that it ran on and the strategy that it used."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.published.graphs import UnpriceableError
from benchmarks.published.row import Row
from shardwright.ir.strategy.recompute import Recompute
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.model import Level, Machine, MachineError
from shardwright.machine.presets import preset

# Kinds of rows that have another name than their preset.
_PRESETS = {"A100-80": "A100"}
_PRESET_GBIT = {"A100": 1600, "A100-40": 1600, "H100": 3200, "H200": 3200}  # of a host, as presets
_FP8 = {"fp8-rowwise": "rowwise", "fp8-tensorwise": "tensorwise", "fp8-delayed": "delayed"}
_FP8 |= {"fp8-mx": "mxfp8"}
_RECOMPUTE = {
    "none": Recompute("none"),
    "unstated": Recompute("none"),
    "full": Recompute("full"),
    "every 2nd layer": Recompute("every", count=2),
    "operators": Recompute("ops", names=("mm", "attention", "reduce_scatter")),
    "attention": Recompute("modules", names=("*attn*",)),
}


def machine_of(row: Row) -> Machine:
    """The preset of a row's hosts, with the network that the row states.

    Raises `UnpriceableError` for a GPU or a number of GPUs that no preset has.
    """
    kind = _PRESETS.get(row.gpu, row.gpu)
    each = min(row.gpus, row.gpus_per_node)
    if row.gpus % each:
        raise UnpriceableError(f"{row.gpus} GPUs are no whole hosts of {each}")
    text = f"{row.gpus // each}x{each}x{kind}" if row.gpus > each else f"{each}x{kind}"
    try:
        machine = preset(text)
    except MachineError:
        raise UnpriceableError(f"no preset has the GPU {row.gpu}") from None
    if len(machine.levels) == 1 or not row.network_gbit:
        return machine
    scale = row.network_gbit / _PRESET_GBIT[kind]
    *inner, network = machine.levels
    return replace(machine, levels=(*inner, _scaled(network, scale)))


def _scaled(level: Level, by: float) -> Level:
    return replace(level, bytes_per_s=level.bytes_per_s * by)


def strategy_of(row: Row) -> Strategy:
    """The strategy of a row, as it is stated, whether or not it can be priced.

    Raises `UnpriceableError` for what no field of a strategy says; `StrategyError` for degrees that
    contradict each other.
    """
    if row.async_tp:
        raise UnpriceableError("overlapped tensor parallelism (async TP) has no strategy yet")
    if row.precision.startswith("nvfp4"):
        raise UnpriceableError("products in 4 bits have no strategy yet")
    return Strategy(
        dp_replicate=row.dp_replicate,
        dp_shard=row.dp_shard,
        cp=row.cp,
        tp=row.tp,
        pp=row.pp,
        ep=row.ep,
        zero=row.zero,
        reshard_after_forward=row.reshard if row.zero == 3 else None,
        sequence_parallel=row.sequence_parallel,
        schedule=row.schedule or "1F1B",
        virtual_stages=row.virtual_stages,
        micro_batches=row.micro_batches,
        recompute=_RECOMPUTE[row.recompute],
        fp8=_FP8.get(row.precision),
        compile="regional" if row.compiled else "off",
        gradient_sync=row.sync if row.micro_batches > 1 else None,
    )


def approximations(row: Row) -> tuple[str, ...]:
    """In which ways the priced step differs from the published one, the same for all rows."""
    found = []
    if row.precision == "fp16":
        found.append("fp16 priced as bf16 mixed precision")
    if not row.precision.startswith("pure-") and row.reduce in ("fp16", "bf16"):
        found.append("gradients reduced in fp32, published in 16 bits")
    if row.optimizer != "adamw-fused":
        found.append("optimizer priced as a fused AdamW")
    if row.recompute == "unstated":
        found.append("recomputation is unstated, priced without")
    if not row.network_gbit and row.nodes > 1:
        found.append("network is unstated, priced as the preset's")
    return tuple(found)
