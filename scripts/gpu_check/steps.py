"""What a step asks of the host: waits for the GPU, and whether a CUDA graph can hold it."""

from __future__ import annotations

import statistics
import warnings
from typing import Any

import torch

from scripts.gpu_check.exact import planned
from scripts.gpu_check.models import SMALL, Step, eager_step, made


def waits(device: torch.device) -> dict[str, Any]:
    """Waits of the host within a step, by model: no more than the module's own."""
    found = {name: _waits_of(name, device) for name in SMALL}
    late = {name: one for name, one in found.items() if len(one["program"]) > len(one["module"])}
    assert not late, late
    return found


def _waits_of(name: str, device: torch.device) -> dict[str, list[str]]:
    model, batch = made(name, device, torch.float32)
    parallel = planned(model, batch, "mb=1", device)
    ours = torch.optim.AdamW(parallel.parameters(), lr=1e-4)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return {
        "program": _waits(lambda: parallel.train_step(ours, batch)),
        "module": _waits(eager_step(model, batch, plain)),
    }


def _waits(step: Step) -> list[str]:
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [f"{w.filename}:{w.lineno}" for w in seen if "synchron" in str(w.message)]


def graphs(device: torch.device) -> dict[str, Any]:
    """Milliseconds of forward and backward pass, plainly and as a CUDA graph; gradients agree."""
    return {name: _graph_of(name, device) for name in ("GPT-2", "Llama", "BERT")}


def _graph_of(name: str, device: torch.device) -> dict[str, float]:
    model, batch = made(name, device, torch.float32)
    parallel = planned(model, batch, "mb=1", device)

    def step() -> torch.Tensor:
        parallel.zero_grad(set_to_none=True)
        loss: torch.Tensor = parallel.forward_backward(batch)
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            loss = step()
    torch.cuda.current_stream().wait_stream(side)
    expected = loss.item(), _norm(parallel)
    plain = _milliseconds(step)
    parallel.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = parallel.forward_backward(batch)
    graph.replay()
    torch.cuda.synchronize()
    got = loss.item(), _norm(parallel)
    assert all(abs(a - b) <= 1e-4 * abs(b) for a, b in zip(got, expected, strict=True)), name
    return {"plain_ms": plain, "graph_ms": _milliseconds(graph.replay)}


def _norm(module: torch.nn.Module) -> float:
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    return float(torch.nn.utils.get_total_norm(grads))


def _milliseconds(run: Step) -> float:
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)
