"""Names a plan in one line by its kinds of parallelism, in the words of the field.

As "HSDP 2x8 · TP 8 · PP 2 (1F1B, 16 micro-batches) · recompute every 2nd layer".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod

from shardwright.ir.layout import Shard
from shardwright.ir.options.fp8 import recipe_of
from shardwright.ir.plan import Plan
from shardwright.ir.strategy.recompute import StrategyError, op_word
from shardwright.ir.strategy.strategy import Strategy
from shardwright.planner.axes.plan_roles import IDLE, MIXED, AxisUse, axis_uses
from shardwright.planner.strategies.recognition import layers_of_plan
from shardwright.report.text.module_rows import kept_words
from shardwright.report.units import size as size_text

_WORDS = {"ep": "EP", "cp": "CP", "tp": "TP"}
_SOME = 0.02  # of the compute time that an axis splits: less is not named
_WHOLE = 0.9  # of a layer's compute time: what is recomputed of a recomputed layer
_ALL = 0.9  # of the sharded parameters: FSDP does not reshard the last ones after forward


def headline(plan: Plan) -> str:
    """The kinds of parallelism with their sizes, pipeline, recomputation, offload, chunks, fp8.

    An axis along which modules do different things has the words of all, as "DP+TP 4";
    one along which nothing is split is called repeated.
    """
    found = [*_data(plan), *_others(plan), *_pipeline(plan)]
    if plan.devices == 1:
        found.insert(0, "one device")
    counts = {"loss": plan.numerics.loss_chunks, "MLP": plan.numerics.mlp_chunks}
    others = [f"{what} in {count} chunks" for what, count in counts.items() if count > 1]
    recipe = recipe_of(plan.numerics.fp8)
    if recipe is not None:
        gathers = ", weights gathered in 8 bits" if recipe.gathers else ""
        how = "as" if recipe.is_executed else "by"
        only = "" if recipe.is_executed else ": priced, not executed here"
        others.append(f"fp8 {recipe.name} {how} {recipe.library}{gathers}{only}")
    if plan.async_tp:
        others.append("async TP: priced, messages are sent without overlap here")
    if plan.ep_overlap:
        others.append("messages of experts beside others: priced, sent without overlap here")
    if plan.separates_gathers:
        others.append("gathers beside reductions on a communicator of their own")
    found += [*_recomputed(plan), *_offloaded(plan), *_resharded(plan), *_updated(plan)]
    return " · ".join([*found, *others])


def parallelism(plan: Plan) -> str:
    """The kinds of parallelism with their sizes alone, as "FSDP 4 · TP 2"."""
    return " · ".join([*_data(plan), *_others(plan)])


def _axes(plan: Plan) -> Iterator[tuple[str, int, str]]:
    """Name, size and role of every axis of more than one device, without pipeline stages."""
    mesh = plan.layout_mesh
    for (name, size), use in zip(mesh.axes, axis_uses(plan), strict=True):
        if size > 1:
            yield name, size, use.role


def _data(plan: Plan) -> Iterator[str]:
    """DDP, ZeRO-1, ZeRO-2, FSDP or HSDP, with its degrees."""
    axes = list(_axes(plan))
    replicas = prod(size for _, size, role in axes if role == "dp_replicate")
    shards = prod(size for _, size, role in axes if role == "dp_shard")
    if shards == 1:
        if replicas > 1:
            yield f"DDP {replicas}"
        return
    word = {1: "ZeRO-1", 2: "ZeRO-2"}.get(_zero(plan), "FSDP")
    if replicas > 1:
        word = "HSDP" if word == "FSDP" else word
        yield f"{word} {replicas}x{shards}"
    else:
        yield f"{word} {shards}"


def _resharded(plan: Plan) -> Iterator[str]:
    """The share, by bytes, of sharded parameters that are gathered again, if not all or none.

    Those of axes along which nothing else is split: others are not gathered.
    """
    if _zero(plan) < 3:
        return  # its word says that they are gathered once
    roles = [use.role for use in axis_uses(plan)]
    sharded = [
        p
        for p in plan.parameters
        if any(
            role == "dp_shard" and isinstance(placement, Shard)
            for role, placement in zip(roles, p.layout.placements, strict=True)
        )
    ]
    every = sum(p.bytes for p in sharded)
    again = sum(p.bytes for p in sharded if p.regathered)
    if sharded and again <= (1 - _ALL) * every:
        yield "no reshard after forward"
    elif again < _ALL * every:
        yield f"reshard {again / every:.0%} of parameters after forward"


def _zero(plan: Plan) -> int:
    """The stage of ZeRO that a strategy names; 3 of a plan that is none."""
    try:
        return Strategy.parse(plan.name).zero
    except StrategyError:
        return 3


def _others(plan: Plan) -> Iterator[str]:
    """Expert, context and tensor parallelism, then axes without one role."""
    axes = list(_axes(plan))
    for role, word in _WORDS.items():
        size = prod(size for _, size, its in axes if its == role)
        if size > 1:
            yield f"{word} {size}"
    uses = zip(plan.layout_mesh.shape, axis_uses(plan), strict=True)
    yield from (f"{_mixture(use)} {size}" for size, use in uses if size > 1 and use.role == MIXED)
    yield from (f"repeated {size}" for _, size, role in axes if role == IDLE)


def _mixture(use: AxisUse) -> str:
    """The kinds of parallelism of an axis without one role."""
    shares = {
        "FSDP" if use.is_sharded else "DP": use.data,
        "EP": use.experts,
        "CP": use.sequence,
        "TP": use.features,
    }
    return "+".join(word for word, share in shares.items() if share > _SOME)


def _pipeline(plan: Plan) -> Iterator[str]:
    count = plan.micro_batches
    batches = f"{count} micro-batch{'es' * (count > 1)}"
    if plan.pipeline is not None:
        groups = plan.pipeline.groups
        each = plan.stages // groups
        virtual = f"{each} stages each, " if each > 1 else ""
        yield f"PP {groups} ({plan.schedule}, {virtual}{batches})"
    elif count > 1:
        yield batches


def _recomputed(plan: Plan) -> Iterator[str]:
    """Whole layers that are recomputed, or how many operators where no layer is whole.

    Operators that they keep are named as in `ac=ops(...)`.
    """
    again = sum(op.segment > 0 for op in plan.ops)
    if not again:
        return
    parts = [_part(plan, numbers) for numbers in layers_of_plan(plan).values()]
    whole = [part >= _WHOLE for part in parts]
    if any(0 < part < _WHOLE for part in parts) or not any(whole):
        yield f"recompute {again} of {len(plan.ops)} operators"
        return
    places = [number for number, is_again in enumerate(whole, 1) if is_again]
    step, but = places[0], _kept(plan)
    if len(places) >= len(whole) - 1 and step == 1:  # a layer that ends the model never is
        yield f"recompute every layer{but}"
    elif step > 1 and places == list(range(step, len(whole) + 1, step)):
        yield f"recompute every {_ordinal(step)} layer{but}"
    else:
        yield f"recompute {len(places)} of {len(whole)} layers{but}"


def _offloaded(plan: Plan) -> Iterator[str]:
    """The kinds of values that are kept on the host, with their size if that is known."""
    if plan.offload:
        known = f" {size_text(plan.memory.host)}" if plan.memory is not None else ""
        count = len({op.segment for op in plan.ops if op.segment})
        some = f" of {count - len(plan.on_device)} of {count} segments" if plan.on_device else ""
        words = {
            "activations": f"activations{some}",
            "optimizer": "optimizer state",
            "parameters": "parameters",
        }
        *first, last = (words[what] for what in plan.offload)
        what = f"{', '.join(first)} and {last}" if first else last
        yield f"offload {what}{known} to the host"


def _updated(plan: Plan) -> Iterator[str]:
    """The size of the groups in which parameters are updated, if they are."""
    if plan.update_group_bytes:
        yield f"update {size_text(plan.update_group_bytes)} of parameters at a time"


def _kept(plan: Plan) -> str:
    """The operators that recomputed segments keep: all of a word, or how many."""
    every = Counter(op_word(op.kind) for op in plan.ops if op.segment and op.seconds)
    kept = kept_words(plan.ops)
    parts = (
        word if count == every[word] else f"{count} of {every[word]} {word}"
        for word, count in kept.items()
    )
    return f" but for {', '.join(parts)}" if kept else ""


def _part(plan: Plan, numbers: list[int]) -> float:
    """The part of a layer's compute time that is in recomputed segments."""
    total = sum(plan.ops[i].seconds for i in numbers)
    again = sum(plan.ops[i].seconds for i in numbers if plan.ops[i].segment)
    return again / total if total else 0.0


def _ordinal(number: int) -> str:
    """The word of a place in a row.

    >>> [_ordinal(n) for n in (2, 3, 4, 11, 22)]
    ['2nd', '3rd', '4th', '11th', '22nd']
    """
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"
