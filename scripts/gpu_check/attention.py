"""Ring attention by fused kernels, block by block on one device, as a ring of ranks computes it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from scripts.gpu_check.models import Found
from scripts.gpu_check.predicted import milliseconds
from shardwright.program.instructions import Run
from shardwright.runtime.attention.blockwise_attention import Rows, ScoreOptions, TileGradients
from shardwright.runtime.attention.fused_blocks import kernel_of

RANKS = 4


def ring(device: torch.device) -> Found:
    """Attention of the second of four ranks, with zigzag halves, against attention of all rows.

    Errors are those of bfloat16 against float32, beside the kernel's own; milliseconds are those of
    all four ranks together, beside one fused call.
    """
    for heads, of_keys in ((8, 8), (32, 8)):
        name = f"{heads} heads of {of_keys}"
        tensors = _tensors(heads, of_keys, 2048, device)
        query, key, value = tensors
        kernel = kernel_of(query.unflatten(1, (of_keys, -1)), key, value)
        errors = _errors(tensors)
        found: dict[str, Any] = {"kernel": type(kernel).__name__, "errors": errors}
        found |= _times(_tensors(heads, of_keys, 16384, device))
        wrong = any(ours > 2 * own + 1e-3 for ours, own in errors.values())
        yield name, found, f"errors {errors}" if wrong or kernel is None else ""


def _tensors(heads: int, of_keys: int, length: int, device: torch.device) -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(1, n, length, 128, device=device, dtype=torch.bfloat16)
        for n in (heads, of_keys, of_keys)
    ]


def _runs(length: int) -> list[tuple[Run, Run]]:
    half = length // (2 * RANKS)
    return [((i * half, half), ((2 * RANKS - 1 - i) * half, half)) for i in range(RANKS)]


def _tile(x: Tensor, runs: tuple[Run, ...]) -> Tensor:
    return torch.cat([x[..., start : start + length, :] for start, length in runs], -2)


def _one(
    tensors: list[Tensor], given: Tensor, place: int
) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """Result and gradient of a rank's queries, and its part of those of each block's keys."""
    query, key, value = tensors
    all_runs = _runs(query.shape[-2])
    options = ScoreOptions(128**-0.5, True, key.shape[-3])
    mine = _tile(query, all_runs[place])
    blocks = [(_tile(key, runs), _tile(value, runs)) for runs in all_runs]
    rows = Rows(mine, 128, all_runs[place], options)
    for block, runs in zip(blocks, all_runs, strict=True):
        rows.add(*block, None, runs)
    result, normalizer = rows.results(mine)
    found = TileGradients(
        mine, result, normalizer, _tile(given, all_runs[place]), all_runs[place], options
    )
    sums = [(torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32))
            for k, v in blocks]  # fmt: skip
    for block, total, runs in zip(blocks, sums, all_runs, strict=True):
        found.add(block, total, (None, None), runs)
    return result, found.of_query.flatten(-4, -3), sums


def _errors(tensors: list[Tensor]) -> dict[str, tuple[float, float]]:
    given = torch.randn_like(tensors[0])
    exact = _whole([x.float() for x in tensors], given.float())
    own = _whole(tensors, given)
    runs = _runs(given.shape[-2])
    parts = [_one(tensors, given, place) for place in range(RANKS)]
    keys = [sum(part[2][i][0] for part in parts) for i in range(RANKS)]
    values = [sum(part[2][i][1] for part in parts) for i in range(RANKS)]
    found = {}
    for name, i, tiles in (
        ("result", 0, [part[0] for part in parts]),
        ("query", 1, [part[1] for part in parts]),
        ("key", 2, keys),
        ("value", 3, values),
    ):
        ours, plain = (
            max(_error(tile, _tile(exact[i], r)) for tile, r in zip(given_tiles, runs, strict=True))
            for given_tiles in (tiles, [_tile(own[i], r) for r in runs])
        )
        found[name] = (ours, plain)
    return found


def _whole(tensors: list[Tensor], given: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    query, key, value = leaves
    made = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    made.backward(given)
    return [made.detach(), *(x.grad for x in leaves if x.grad is not None)]


def _error(one: Any, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def _times(tensors: list[Tensor]) -> dict[str, float]:
    given = torch.randn_like(tensors[0])
    return {
        "ranks_ms": sum(milliseconds(partial(_one, tensors, given, p)) for p in range(RANKS)),
        "one_call_ms": milliseconds(lambda: _whole(tensors, given)),
    }
