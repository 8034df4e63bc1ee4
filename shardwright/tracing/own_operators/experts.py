"""A mixture of experts as one operator of tokens, routing and expert weights.

The routing of rows to experts depends on the data. Rows that are sorted by expert can be split
neither by tokens nor by experts; as one operator, tokens are parallel and experts are terms of a
sum. The operator computes grouped matrix products of rows sorted by expert.

Importing this file registers `torch.ops.shardwright.experts`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.rules.operators.steps import EVERY, PART
from shardwright.tracing.own_operators.registered import registered

EXPERTS = "shardwright.experts.default"
GROUPED_KERNEL = "aten._grouped_mm.default"  # the grouped product of torch, which has no float64
Drop = Callable[[Tensor, float], Tensor]
Biases = tuple[Tensor | None, Tensor | None]  # of `up` and of `down`


def experts(
    x: Tensor,
    chosen: Tensor,
    scores: Tensor,
    up: Tensor,
    down: Tensor,
    turned: Sequence[bool],
    product: str,
    between: str,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Σ over a token's experts of score · down(between(up(x))): (tokens, width).

    x is (tokens, width); `chosen`, indices of experts, and `scores` are (tokens, k); `up` is
    (experts, inner, width) and `down` (experts, width, inner), each with the last two dimensions
    transposed where its `turned` is False. `inner` may differ between the two, if `between`
    changes it. Biases are (experts, inner) and (experts, width). `product` names the operator of
    the grouped product, and `between` is JSON with the steps between the products (see
    `expert_steps.py`). All experts must be on this device; `runtime/sharded_ops/experts.py`
    computes a subset.
    """
    expert, order = chosen.reshape(-1).sort()
    rows, given = x[order // chosen.shape[1]], scores.reshape(-1)[order]
    experts = ExpertWeights((up, down), tuple(turned), (up_bias, down_bias), product, between)
    inside = scales_inside(x, scores, down, turned)
    made = through(rows, expert, experts, given if inside else None)
    return added(made, order, scores, None if inside else given)


class ExpertWeights(NamedTuple):
    """The weights of experts and what is computed with them; the fields are those of `experts`."""

    matrices: tuple[Tensor, Tensor]
    turned: Sequence[bool]
    biases: Biases
    product: str
    between: str


def scales_inside(x: Tensor, scores: Tensor, down: Tensor, turned: Sequence[bool]) -> bool:
    """Whether rows are scaled by their scores before the second product, and not after it.

    That is the same, as products are linear. Autograd keeps what is scaled: the product's input,
    of width `inner`, or its result. Scores in float32 scale rows in half precision in float32; of
    other dtypes than the rows they scale the result.
    """
    inner = down.shape[-1 if turned[1] else -2]
    wider = scores.dtype == torch.float32 and x.dtype in (torch.bfloat16, torch.float16)
    return inner < x.shape[-1] and (scores.dtype == x.dtype or wider)


def through(rows: Tensor, expert: Tensor, weights: ExpertWeights, scores: Tensor | None) -> Tensor:
    """The output of each row's expert: (rows, width) -> (rows, width).

    `rows` are sorted by `expert` (rows), the index of their expert in `weights`. Rows of results
    are scaled by `scores` (rows), if they are given, as inputs of `down` and with its bias.
    """
    up, down = (
        w.transpose(-2, -1) if t else w
        for w, t in zip(weights.matrices, weights.turned, strict=True)
    )
    up_bias, down_bias = weights.biases
    positions = torch.arange(up.shape[0], device=rows.device)
    offsets = torch.searchsorted(expert, positions, right=True).to(torch.int32)
    multiply = _by_loop
    if rows.dtype != torch.float64 or weights.product != GROUPED_KERNEL:
        multiply = registered(weights.product)
    made = multiply(rows, up, offsets)
    made = made if up_bias is None else made + up_bias[expert]
    inner = run_steps(json.loads(weights.between), made)
    if scores is not None:
        inner = _scaled(inner, scores)
    found = multiply(inner, down, offsets)
    if down_bias is None:
        return found
    return found + (down_bias[expert] if scores is None else _scaled(down_bias[expert], scores))


def _by_loop(rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """A grouped product as one product for each expert, whose rows end at `offsets`."""
    ends = offsets.tolist()
    parts = rows.split([end - start for start, end in zip([0, *ends], ends, strict=False)])
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])


def _scaled(rows: Tensor, scores: Tensor) -> Tensor:
    """Rows times their scores, in the dtype of the rows."""
    return (rows * scores.unsqueeze(-1)).to(rows.dtype)


def added(rows: Tensor, order: Tensor, scores: Tensor, scale: Tensor | None) -> Tensor:
    """Rows, times their `scale` (rows) if given, summed by token: (rows, w) -> (tokens, w).

    `order` (rows) has the index of each row in the flattened `scores` (tokens, k), whose dtype the
    sum has if it is the wider one.
    """
    scored = rows if scale is None else rows * scale.unsqueeze(-1)
    # Unlike `index_copy`, it keeps no rows for the backward pass.
    spread = scored.new_zeros((scores.numel(), rows.shape[1])).index_put((order,), scored)
    wide = torch.promote_types(rows.dtype, scores.dtype)
    total: Tensor = spread.view(*scores.shape, -1).sum(1, dtype=wide)
    return total


def run_steps(steps: Sequence[Any], *given: Tensor, drop: Drop | None = None) -> Tensor:
    """The result of the last of some steps (see `expert_steps.py`), which number `given` from 0.

    A step with dropout is `drop` of a value and a probability; without it nothing is dropped.
    """
    values: list[Tensor] = [*given]
    for target, args, kwargs in steps:
        if target in (PART, EVERY):  # of the last dimension
            source, number, parts = _value(args[0], values), args[1], args[2]
            chunks = target == PART
            values.append(source.chunk(parts, -1)[number] if chunks else source[..., number::parts])
            continue
        if target.split(".")[1] == "dropout":
            x = _value(args[0], values)
            values.append(x if drop is None else drop(x, args[1]))
            continue
        found = registered(target)(
            *(_value(a, values) for a in args),
            **{key: _value(a, values) for key, a in kwargs.items()},
        )
        values.append(found)
    return values[-1]


def _value(arg: Any, values: Sequence[Tensor]) -> Any:
    """An argument of a step; not a closure, which would keep `values` until garbage collection."""
    if isinstance(arg, dict):
        ((kind, name),) = arg.items()
        return values[name] if kind == "value" else getattr(torch, name)
    return [_value(a, values) for a in arg] if isinstance(arg, list) else arg


torch.library.define(
    "shardwright::experts",
    "(Tensor x, Tensor chosen, Tensor scores, Tensor up, Tensor down, bool[] turned,"
    " str product, str between, Tensor? up_bias=None, Tensor? down_bias=None) -> Tensor",
)
torch.library.impl("shardwright::experts", "CompositeImplicitAutograd", experts)
