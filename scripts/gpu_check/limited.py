"""Plans within memory limits, and the temporaries of optimizers, as predicted and as measured."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import shardwright as sw
from scripts.gpu_check.models import Batch, Found, made
from scripts.gpu_check.predicted import kind_here, measure
from shardwright.ir.options.optimizers import OPTIMIZERS, OptimizerError, optimizer_spec
from shardwright.report.headline import headline
from shardwright.simulate.costs.update import UpdatedTile, update_bytes

MODELS = ("GPT-2 124M, 16x1024", "Llama 1.1B, 4x2048")
ROOM = (0.5, 0.1)  # of the memory between recomputing everything and nothing


def limited(device: torch.device) -> Found:
    """The plan for two memory limits, in bf16 under fused AdamW: seconds and peaks.

    A peak above its limit and the workspace of libraries is wrong.
    """
    where = f"1x{kind_here()}"
    for name in MODELS:
        model, batch = made(name, device, torch.bfloat16)
        graph = sw.capture(model, (), batch)
        most, least = (sw.price(graph, where, ends, "adamw_fused").peak_bytes for ends in _ENDS)
        for room in ROOM:
            limit = int(least + room * (most - least))
            model, batch = made(name, device, torch.bfloat16)
            plan = sw.plan(
                model, (), batch, machine=where, optimizer="adamw_fused", memory_limit=limit
            )
            figures = {"limit": limit, **_run(model, batch, plan)}
            workspace = sw.Machine.preset(where).device.workspace_bytes
            over = figures["program"]["allocated_bytes"] > limit + workspace
            yield f"{name}, {room:.0%}", figures, "over the limit" if over else ""


_ENDS = ("mb=1", "mb=1 ac=full")


def _run(model: torch.nn.Module, batch: Batch, plan: sw.Plan) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    device = next(iter(batch.values())).device
    parallel: Any = sw.parallelize(model, plan, device=device)
    model.to("meta")  # the program has weights of its own
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4, fused=True)
    found = measure(partial(parallel.train_step, optimizer, batch))
    predicts = {"seconds": float(plan.step_seconds), "peak_bytes": int(plan.peak_bytes)}
    return {"plan": headline(plan), "preset predicts": predicts, "program": found}


def updates(device: torch.device) -> Found:
    """Temporaries of an update of 40 matrices of bfloat16, by optimizer and implementation.

    They are in units of all parameters. More than predicted is wrong.
    """
    for name in (name for name, spec in OPTIMIZERS.items() if spec.matrix is None):
        for word in ("", "_loop", "_foreach", "_fused"):
            try:
                spec = optimizer_spec(name + word)
            except OptimizerError:  # torch has no such implementation
                continue
            shapes = [torch.Size((2048, 2048 - 8 * i)) for i in range(40)]
            tiles = [UpdatedTile(tuple(s), 2 * s.numel(), 2) for s in shapes]
            whole = sum(tile.bytes for tile in tiles)
            runs = spec.runs(plain=True, on_gpu=device.type == "cuda")
            predicted = update_bytes(spec, tiles, runs)
            parameters = [torch.randn(s, device=device, dtype=torch.bfloat16) for s in shapes]
            for parameter in parameters:
                parameter.requires_grad_()
                parameter.grad = torch.randn_like(parameter)
            asked = {word[1:]: True} if word not in ("", "_loop") else {}
            asked |= {"foreach": False} if word == "_loop" else {}
            kind = getattr(torch.optim, spec.torch_class)
            taken, seconds = _update(kind(parameters, **spec.options, **asked))
            wrong = f"{taken} bytes, {predicted} predicted"
            units = {"predicted": predicted / whole, "measured": taken / whole}
            found = {"units": units, "seconds": seconds}
            yield name + word, found, wrong if taken > 1.02 * predicted + 2**20 else ""


def _update(optimizer: torch.optim.Optimizer) -> tuple[int, float]:
    """Bytes above what is there before and after the second update, and seconds of the third."""
    optimizer.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    return taken, _seconds(optimizer.step)


def _seconds(step: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3
