"""What a step asks of the host: waits for the GPU, and whether a CUDA graph can hold it."""

from __future__ import annotations

import math
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import shardwright as sw
from scripts.gpu_check.exact import planned, too_large
from scripts.gpu_check.models import SMALL, Batch, Found, Step, eager_step, gpt2_with_dropout, made
from scripts.gpu_check.predicted import measure, milliseconds
from shardwright.ir.graph import Op, Ref
from shardwright.program.instructions import Dropout
from shardwright.runtime.random.dropout import GlobalDropout, random_state
from shardwright.runtime.shape_variants import ShapeVariants
from shardwright.tracing.own_operators.index_hash import threshold_of
from shardwright.train.checkpoint.state import TrainingState
from shardwright.train.data.batches import Batches
from shardwright.train.step import NonFiniteLossError, Stepper


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


def steps_of_run(device: torch.device) -> Found:
    """Waits of the host in a step of `shardwright run` that clips gradients: none; and its time.

    A batch of NaN stops it, with its cause and before the weights change.
    """
    for name in ("GPT-2", "convolutions"):
        found = _step_of_run(name, device)
        waits = len(found["waits"])
        wrong = f"{waits} waits" if waits else ""
        if "conv2d" not in found["stops"] and name == "convolutions":
            wrong += f" NaN: {found['stops']}"
        yield name, found, wrong


def _step_of_run(name: str, device: torch.device) -> dict[str, Any]:
    """Its waits, its milliseconds, and those of the module's own `train_step`."""
    model, batch = made(name, device, torch.float32)
    graph = sw.capture(model, (), batch)
    plan = sw.price(graph, f"1x{'H100' if device.type == 'cuda' else 'cpu'}", "mb=1", "adamw")
    module = ShapeVariants(model, plan, (), device=device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    run = TrainingState(module, optimizer, Batches([batch]))
    stepper = Stepper.of(module, 1.0)

    def step() -> object:
        return stepper(run, [batch])

    return {
        "waits": waits_of(step),
        "milliseconds": milliseconds(step),
        "alone": milliseconds(lambda: module.main.train_step(optimizer, batch)),
        "stops": _stops(stepper, run, batch),
    }


def _stops(stepper: Stepper, run: TrainingState, batch: Batch) -> str:
    """What is said of a batch of NaN; empty without floating-point inputs."""
    if not any(value.is_floating_point() for value in batch.values()):
        return ""
    before = [p.detach().clone() for p in run.module.parameters()]
    poisoned = {k: v * math.nan if v.is_floating_point() else v for k, v in batch.items()}
    try:
        stepper(run, [poisoned])
    except NonFiniteLossError as e:
        same = all(torch.equal(a, b) for a, b in zip(before, run.module.parameters(), strict=True))
        return str(e) if same else f"weights have changed: {e}"
    return "it went on"


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
    return [f"{_relative(w.filename)}:{w.lineno}" for w in seen if "synchron" in str(w.message)]


def _relative(file: str) -> str:
    """The path of a module's file from the folder that it is imported from."""
    folders = [str(Path(folder).resolve()) for folder in sys.path]
    found = [folder for folder in folders if file.startswith(f"{folder}/")]
    return file.removeprefix(max(found, key=len, default="") + "/")


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
    plain = milliseconds(step)
    parallel.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = parallel.forward_backward(batch)
    graph.replay()
    torch.cuda.synchronize()
    got = loss.item(), _norm(parallel)
    error = max(abs(a - b) / abs(b) for a, b in zip(got, expected, strict=True))
    return {"error": error, "plain_ms": plain, "graph_ms": milliseconds(graph.replay)}


def _norm(module: torch.nn.Module) -> float:
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    return float(torch.nn.utils.get_total_norm(grads))


def dropout(device: torch.device) -> Found:
    """Seconds of GPT-2's step with dropout: the module, torch's numbers and one device's numbers.

    The fused mask is that of the plain operators, and dropout alone takes so many microseconds.
    """
    yield "step", _dropout_steps(device), ""
    found = _dropout_alone(device)
    yield "alone", found, "" if found["equal"] else "the fused mask is another"


def _dropout_steps(device: torch.device) -> dict[str, dict[str, Any]]:
    torch.manual_seed(0)
    with device:
        model, batch = gpt2_with_dropout()
    model.to(device, torch.bfloat16)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-4)
    found = {"module": measure(eager_step(model, batch, plain))}
    for rng in ("fast", "exact"):
        parallel = planned(model, batch, "mb=1", device, rng=rng)
        ours = torch.optim.AdamW(parallel.parameters(), lr=1e-4)
        found[rng] = measure(partial(parallel.train_step, ours, batch))
        del parallel, ours
    return found


def _dropout_alone(device: torch.device) -> dict[str, float]:
    shape = (16, 1024, 3072)
    positions = tuple(((0, size, size),) for size in shape)
    op = Op("y", "shardwright.dropout.default", (Ref("x"), 0.1, 3), (), ("y",))
    ours = GlobalDropout(Dropout(op, positions), device)
    x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    state = random_state(1, 2, device)
    plain = torch.where((ours.bits(state) >= threshold_of(0.1)).view(shape), x * (1 / 0.9), 0.0)
    ones = torch.ones_like(x)
    return {
        "equal": float(torch.equal(ours(x, state), plain)),
        "forward_ms": milliseconds(lambda: ours(x, state)),
        "both_ms": milliseconds(lambda: ours(x, state).backward(ones)),
        "torch_forward_ms": milliseconds(lambda: F.dropout(x, 0.1)),
        "torch_both_ms": milliseconds(lambda: F.dropout(x, 0.1).backward(ones)),
    }
