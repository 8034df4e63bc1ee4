"""Predicted against measured seconds and bytes of steps, and what our program adds to them."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import shardwright as sw
from scripts.gpu_check.models import LARGE, Found, eager_step, made
from shardwright.machine.files.loading import load_machine
from shardwright.machine.model import Machine
from shardwright.machine.presets import KINDS

WARM, STEPS = 4, 12
KERNELS = {
    "attention": re.compile(r"flash|fmha|attention|sdpa", re.I),
    "products": re.compile(r"gemm|nvjet|cutlass|cublas|conv|cudnn", re.I),
    "copies": re.compile(r"memcpy|memset", re.I),
}
COMPILED = ("GPT-2 124M, 16x1024",)


def predicted(device: torch.device) -> Found:
    """Of each large model in bf16 under AdamW: the module, our program, and the predictions.

    Predictions are those of the preset and, if `measured.toml` was written before, of the measured
    machine. Steps are timed by events, a median; peaks are those of torch's allocator.
    """
    machines: dict[str, Machine] = {"preset": sw.Machine.preset(f"1x{kind_here()}")}
    if Path(MEASURED).exists():
        machines["measured"] = load_machine(MEASURED)
    for name in LARGE:
        yield name, _one(name, machines, device), ""


MEASURED = "gpu-check-machine.toml"  # in the current folder, written by `profiled`


def kind_here() -> str:
    """The preset's name of this GPU: the longest one that torch's name contains."""
    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else "cpu"
    return max((kind for kind in KINDS if kind.lower() in name), key=len)


def offloaded(device: torch.device) -> Found:
    """Steps of a recomputed Llama without and with its layers' inputs in the host's memory.

    Gradients are equal in every bit.
    """
    name, losses = "Llama 1.1B, 24x2048", []
    for strategy in ("mb=1 ac=full", "mb=1 ac=full offload=activations"):
        model, batch = made(name, device, torch.bfloat16)
        graph = sw.capture(model, (), batch)
        plan = sw.price(graph, f"1x{kind_here()}", strategy, "adamw_fused")
        parallel: Any = sw.parallelize(model, plan, device=device)
        del model
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4, fused=True)
        losses.append([float(parallel.train_step(optimizer, batch)) for _ in range(3)])
        found = {"seconds": float(plan.step_seconds), "peak_bytes": int(plan.peak_bytes)}
        measured = measure(partial(parallel.train_step, optimizer, batch))
        differ = "" if losses[0] == losses[-1] else f"losses {losses}"
        yield strategy, {"preset predicts": found, "program": measured}, differ
        del parallel, optimizer
        gc.collect()
        torch.cuda.empty_cache()


def _one(name: str, machines: dict[str, Machine], device: torch.device) -> dict[str, Any]:
    gc.collect()  # the parameters of the program before are in a cycle
    torch.cuda.empty_cache()
    model, batch = made(name, device, torch.bfloat16)
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    found["module"] = measure(eager_step(model, batch, optimizer))
    del optimizer
    graph = sw.capture(model, (), batch)
    for label, machine in machines.items():
        plan = sw.price(graph, machine, "mb=1", "adamw")
        found[f"{label} predicts"] = {
            "seconds": float(plan.step_seconds),
            "peak_bytes": int(plan.peak_bytes),
            "parts": _parts(plan),
        }
    parallel: Any = sw.parallelize(model, plan, device=device)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    stepped = torch.optim.AdamW(parallel.parameters(), lr=1e-4)
    found["program"] = measure(lambda: parallel.train_step(stepped, batch))
    if name in COMPILED:
        parallel.compile_programs()
        found["compiled program"] = measure(lambda: parallel.train_step(stepped, batch))
    return found


def measure(step: Callable[[], object]) -> dict[str, Any]:
    """Median seconds of a step, those of its host alone and of its kernels, and peaks in bytes."""
    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    seconds = [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
    free, total = torch.cuda.mem_get_info()
    return {
        "seconds": statistics.median(seconds),
        "host_seconds": _host_seconds(step),
        "kernel_seconds": _kernel_seconds(step),
        "least": min(seconds),
        "most": max(seconds),
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "outside_bytes": total - free - torch.cuda.memory_reserved(),
    }


def milliseconds(run: Callable[[], object]) -> float:
    """Median milliseconds of twelve calls on the device, each waited for."""
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return float(statistics.median(times))


def _host_seconds(step: Callable[[], object]) -> float:
    """Median seconds until the host has issued a step to an idle device."""
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        found.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(found)


def _kernel_seconds(step: Callable[[], object]) -> dict[str, float]:
    """Device seconds of a step by kind of kernel, and the number of kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    found = dict.fromkeys((*KERNELS, "others"), 0.0) | {"count": 0.0}
    for event in profiler.events():
        if event.device_type.name == "CUDA":
            kind = next((k for k, words in KERNELS.items() if words.search(event.name)), "others")
            found[kind] += event.device_time_total / 1e6
            found["count"] += 1
    return found


def _parts(plan: sw.Plan) -> dict[str, float]:
    return {
        "operators": float(sum(op.seconds for op in plan.ops)),
        "update": float(sum(p.seconds for p in plan.parameters)),
    }
