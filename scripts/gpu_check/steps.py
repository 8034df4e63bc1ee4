"""What a step asks of the host: waits for the GPU, and whether a CUDA graph can hold it."""

from __future__ import annotations

import statistics
import warnings

import torch

from scripts.gpu_check.exact import planned, too_large
from scripts.gpu_check.models import SMALL, Found, Step, eager_step, made


def waits(device: torch.device) -> Found:
    """Waits of the host within a step, by model: no more than the module's own."""
    for name in SMALL:
        found = _waits_of(name, device)
        ours, own = len(found["program"]), len(found["module"])
        yield name, found, f"{ours} waits, and the module has {own}" if ours > own else ""


def _waits_of(name: str, device: torch.device) -> dict[str, list[str]]:
    model, batch = made(name, device, torch.float32)
    parallel = planned(model, batch, "mb=1", device)
    ours = torch.optim.AdamW(parallel.parameters(), lr=1e-4)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return {
        "program": waits_of(lambda: parallel.train_step(ours, batch)),
        "module": waits_of(eager_step(model, batch, plain)),
    }


def waits_of(step: Step) -> list[str]:
    """Where the host waits for the GPU in a step, after three steps."""
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


def graphs(device: torch.device) -> Found:
    """Milliseconds of forward and backward pass, plainly and as a CUDA graph; gradients agree."""
    for name in ("GPT-2", "Llama", "BERT"):
        found = _graph_of(name, device)
        yield name, found, too_large(found["error"], 1e-4)


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
    error = max(abs(a - b) / abs(b) for a, b in zip(got, expected, strict=True))
    return {"error": error, "plain_ms": plain, "graph_ms": _milliseconds(graph.replay)}


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
    return float(statistics.median(times))
