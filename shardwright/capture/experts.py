"""A mixture of experts as one operator: tokens, their experts and scores, and the experts' weights.

Which rows go to which expert only the data knows. Sorted by expert, tokens and experts mix, and
neither can be split; seen as one operator, each token is a row of its own and each
expert a term of a sum. It computes what it was made of: grouped products of rows sorted
by expert, for whichever tokens and experts there are.

Importing this file makes `torch.ops.shardwright.experts` known.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.capture.lookup import local_index

EXPERTS = "shardwright.experts.default"


def experts(
    x: Tensor,
    chosen: Tensor,
    scores: Tensor,
    up: Tensor,
    down: Tensor,
    tile: Sequence[int],
    turned: Sequence[bool],
    product: str,
    between: str,
) -> Tensor:
    """Σ over a token's experts of score · down(between(up(x))).

    x (tokens, width), `chosen` experts and their `scores` (tokens, k), `up`
    (experts, inner, width) and `down` (experts, width, inner), the last two dimensions the
    other way round where `turned` is False. Weights are those of a `tile` of
    all experts: start, length and size of each atom. `product` names the
    grouped product, `between` has the steps between the two (see `steps_to_text`).
    """
    held = prod(tile[1::3])
    everything = held == prod(tile[2::3])
    place, inside = local_index(chosen.reshape(-1), tile)
    expert, order = torch.where(inside, place, held).sort()
    if not everything:
        # The rows of other experts are last. One row stays in any case: its score counts nothing.
        count = max(1, int(inside.sum()))
        expert, order = expert[:count].clamp(max=held - 1), order[:count]
    ends = torch.searchsorted(expert, torch.arange(held, device=x.device), right=True)
    multiply, offsets = _operator(product), ends.to(torch.int32)
    up, down = (w.transpose(-2, -1) if t else w for w, t in zip((up, down), turned, strict=True))
    inner = multiply(x[order // chosen.shape[1]], up, offsets)
    rows = multiply(_run(json.loads(between), inner), down, offsets)
    score = scores.reshape(-1)[order]
    if not everything:
        score = score * inside[order]
    rows = rows * score.unsqueeze(-1)
    spread = rows.new_zeros((chosen.numel(), rows.shape[1])).index_copy(0, order, rows)
    total: Tensor = spread.view(*chosen.shape, -1).sum(1)
    return total


def _run(steps: list[Any], x: Tensor) -> Tensor:
    values: list[Tensor] = [x]

    def value(arg: Any) -> Any:
        if isinstance(arg, dict):
            ((kind, name),) = arg.items()
            return values[name] if kind == "value" else getattr(torch, name)
        return [value(a) for a in arg] if isinstance(arg, list) else arg

    for target, args, kwargs in steps:
        if target == "part":  # of the last dimension, cut into equal parts
            source, number, parts = value(args[0]), args[1], args[2]
            values.append(source.chunk(parts, -1)[number])
            continue
        found = _operator(target)(
            *(value(a) for a in args), **{key: value(a) for key, a in kwargs.items()}
        )
        values.append(found)
    return values[-1]


def _operator(target: str) -> Any:
    namespace, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


torch.library.define(
    "shardwright::experts",
    "(Tensor x, Tensor chosen, Tensor scores, Tensor up, Tensor down, int[] tile, bool[] turned,"
    " str product, str between) -> Tensor",
)
torch.library.impl("shardwright::experts", "CompositeImplicitAutograd", experts)
