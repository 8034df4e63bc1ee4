"""From a row to the machine that it ran on and the strategy that it used."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.published.graphs import UnpriceableError
from benchmarks.published.row import Row
from shardwright.frameworks.readers.torchtitan_options import SELECTIVE
from shardwright.ir.options.optimizers import known_optimizer, optimizer_spec
from shardwright.ir.strategy.recompute import Recompute
from shardwright.ir.strategy.strategy import Strategy, divisors
from shardwright.machine.gpus import GPUS
from shardwright.machine.model import NO_TIME, Level, Machine
from shardwright.machine.presets import preset

# Kinds of rows that have another name than their preset.
PRESETS = {"A100-80": "A100"}
# FLOP/s of the first FlashAttention, forward and backward, without what a causal mask leaves out:
# the middle of 25 to 40 % of an A100's peak (arXiv 2307.08691, section 1). Its successor runs 335
# against 225 TFLOP/s on an H100, by the same code (section 4 there).
FLASH_1 = {"ampere": 101e12, "hopper": 150e12}
_FP8 = {"fp8-rowwise": "rowwise", "fp8-tensorwise": "tensorwise", "fp8-delayed": "delayed"}
_FP8 |= {"fp8-mx": "mxfp8"}
_RECOMPUTE = {
    "none": Recompute("none"),
    "unstated": Recompute("none"),
    "other": Recompute("none"),
    "full": Recompute("full"),
    "every 2nd layer": Recompute("every", count=2),
    "operators": SELECTIVE,
    "attention": Recompute("modules", names=("*attn*",)),
}


def machine_of(row: Row) -> Machine:
    """The preset of a row's hosts, with the network and the attention that the row states.

    Messages of parameters are hidden in part where data parallel ranks shard them, as FSDP does,
    and of other rows where their source states it. A host that replays a whole step issues nothing.

    Raises `UnpriceableError` for a GPU that no preset has.
    """
    kind = PRESETS.get(row.gpu, row.gpu)
    gpu = next((gpu for gpu in GPUS if gpu.kind == kind), None)
    if gpu is None:
        raise UnpriceableError(f"no preset has the GPU {row.gpu}")
    most = max(row.gpus_per_node, gpu.host_gpus)  # a rack joins several nodes
    each = max(count for count in divisors(row.gpus) if count <= most)
    hosts = f"{row.gpus // each}x" if row.gpus > each else ""
    machine = preset(f"{hosts}{each}x{kind}")
    device = machine.device
    if row.attention == "flash-1":
        figure = FLASH_1[gpu.architecture] / device.peak_flop_per_s("bfloat16")
        efficiency = replace(device.efficiency, attention=figure)
        machine = replace(machine, device=replace(device, efficiency=efficiency))
    if row.replayed:
        machine = replace(machine, device=replace(machine.device, issue_seconds=NO_TIME))
    if row.zero < 2 and not row.overlapped:
        machine = replace(machine, overlap=0.0)
    if row.balanced:
        machine = replace(machine, expert_skew=1.0)
    if len(machine.levels) == 1 or not row.network_gbit:
        return machine
    stated, usual = row.network_gbit / row.gpus_per_node, gpu.network_gbit / gpu.host_gpus
    *inner, network = machine.levels
    return replace(machine, levels=(*inner, _scaled(network, stated / usual)))


def _scaled(level: Level, by: float) -> Level:
    return replace(level, bytes_per_s=level.bytes_per_s * by)


def strategy_of(row: Row) -> Strategy:
    """The strategy of a row, as it is stated, whether or not it can be priced.

    Raises `UnpriceableError` for what no field of a strategy says; `StrategyError` for degrees that
    contradict each other.
    """
    if row.precision.startswith("nvfp4"):
        raise UnpriceableError("products in 4 bits have no strategy yet")
    found = Strategy(
        dp_replicate=row.dp_replicate,
        dp_shard=row.dp_shard,
        cp=row.cp,
        tp=row.tp,
        pp=row.pp,
        ep=row.ep,
        zero=row.zero,
        reshard_after_forward=row.reshard if row.zero == 3 else None,
        sequence_parallel=row.sequence_parallel,
        async_tp=row.async_tp,
        ep_overlap=row.ep_overlap,
        schedule=row.schedule or "1F1B",
        virtual_stages=row.virtual_stages,
        micro_batches=row.micro_batches,
        recompute=_RECOMPUTE.get(row.recompute) or Recompute.parse(row.recompute),
        fp8=_FP8.get(row.precision),
        compile="regional" if row.compiled else "off",
        gradient_sync=row.sync if row.micro_batches > 1 else None,
    )
    return found.in_8_bit(found.fp8, gathers=row.fp8_gather == "on")


def optimizer_of(row: Row) -> str:
    """The name of a row's optimizer."""
    name = row.optimizer.replace("-", "_")
    if name == "adamw" and row.gpus > 1:  # torch updates DTensors one after the other
        name = "adamw_loop"
    if not row.gradient_buffers:
        return known_optimizer(name)
    spec = optimizer_spec(name)
    return known_optimizer(replace(spec, name=f"{name}_in_buffers", keeps_gradients=True))


def held_bytes(row: Row) -> int:
    """Bytes that a source's loop keeps on the device beside the step.

    LitGPT's keeps the logits of a micro-batch, which its wrapper has cast to float32, until the
    next ones have replaced them.
    """
    if row.source != "litgpt":
        return 0
    return 4 * row.micro_batch * row.sequence * row.vocab


def approximations(row: Row) -> tuple[str, ...]:
    """In which ways the priced step differs from the published one, the same for all rows."""
    found = []
    if row.precision == "fp16":
        found.append("fp16 priced as bf16 mixed precision")
    if row.loss in ("fused", "in place"):
        found.append(f"loss {row.loss} priced as one on half-precision logits")
    if row.precision.startswith("fp8") and row.dp_shard > 1 and not row.fp8_gather:
        found.append("whether parameters are gathered in 8 bits is unstated, priced in 16")
    if row.recompute == "unstated":
        found.append("recomputation is unstated, priced without")
    if row.recompute == "other":
        found.append("recomputation within experts, MLPs or norms priced as none")
    if row.offloaded:
        found.append("activations of some layers on the host priced as on the device")
    if not row.network_gbit and row.nodes > 1:
        found.append("network is unstated, priced as the preset's")
    return tuple(found)
