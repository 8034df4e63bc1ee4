"""Several ranks on one GPU over NCCL: every kind of plan against the module itself.

NCCL refuses two ranks on one GPU of one host. Each rank here says that it is on a host of its own
(`NCCL_HOSTID`), so that they talk through sockets on loopback, with NCCL's own streams and order.
"""

from __future__ import annotations

import copy
import gc
import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import shardwright as sw
from scripts.gpu_check.exact import error_of, limit_of, reference, too_large, worst_error
from scripts.gpu_check.models import Found, made
from scripts.gpu_check.predicted import kind_here
from scripts.gpu_check.steps import waits_of
from shardwright.runtime.async_pipeline.runner import async_pipeline
from shardwright.runtime.async_pipeline.simulation import async_simulation
from shardwright.runtime.device import bound

Body = Callable[[torch.device], Iterator[tuple[str, Any]]]
PEAKS = (
    *("dp_shard=2", "dp_shard=2 ac=full", "dp_shard=2 ac=full offload=activations"),
    *("dp_shard=2 mb=2", "tp=2", "dp_replicate=2 zero=0"),
)
_STEPS = 12  # of the asynchronous pipeline
PLANS = {
    2: {
        "GPT-2": ("dp_replicate=2 zero=0", "dp_shard=2", "dp_shard=2 mb=2 ac=full", "tp=2 sp=off"),
        "Llama": ("tp=2", "cp=2", "cp=2 cp_style=all-gather", "dp_shard=2 zero=1 mb=2"),
        "Mixtral": ("dp_shard=2 ep=2", "tp=2 ep=2"),
        "convolutions": ("dp_shard=2",),
    },
    4: {
        "GPT-2": ("dp_replicate=2 dp_shard=2", "dp_shard=2 tp=2"),
        "Llama": (
            "pp=2 dp_shard=2 mb=4",
            "pp=2:Interleaved1F1B/v2 dp_shard=2 mb=4",
            "pp=2 tp=2 mb=4",
            "pp=2:InterleavedZeroBubble/v2 dp_shard=2 mb=4",
            "pp=4 mb=8",
        ),
    },
}


def nccl(device: torch.device) -> Found:
    """Errors in float64 of each plan, on 2 and then 4 ranks, and waits of the host in a step."""
    for world, subjects in PLANS.items():
        found = run(world, _plans, device.type, seconds=60 + 20 * world)
        for name, strategies in subjects.items():
            for strategy in strategies:
                what = f"{name}: {strategy}"
                figures = found.get(what, {"error": math.inf, "traceback": found.get("failed")})
                yield what, figures, too_large(figures["error"], limit_of(name))


def memory(device: torch.device) -> Found:
    """Peaks of torch's allocator on 2 ranks, beside those predicted."""
    for what, figures in run(2, _peaks, device.type, seconds=170).items():
        yield what, figures, ""


def asynchronous(device: torch.device) -> Found:
    """An asynchronous pipeline of three stages ends, with the losses that its simulation has."""
    found = run(3, _asynchronous, device.type, seconds=110)
    same = found.get("losses") == found.get("simulated")
    yield "three stages", found, "" if same and "losses" in found else "losses differ"


def run(world: int, body: Body, kind: str, seconds: float) -> dict[str, Any]:
    """What `body(device)` yields on rank 0, on so many ranks of one GPU; `failed`: tracebacks."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        ranks = [
            context.Process(target=_rank, args=(rank, world, folder, body, kind, seconds))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        end = time.monotonic() + seconds
        while any(r.is_alive() for r in ranks) and not any(r.exitcode for r in ranks):
            if time.monotonic() > end:
                break
            time.sleep(0.1)
        late = [i for i, r in enumerate(ranks) if r.is_alive()]
        if any(r.exitcode for r in ranks):
            time.sleep(2)
        for process in ranks:
            process.kill()
            process.join()
        errors = "\n".join(p.read_text() for p in sorted(Path(folder).glob("error*")))
        done = Path(folder) / "result.json"
        found: dict[str, Any] = json.loads(done.read_text()) if done.exists() else {}
        if errors or late:
            found["failed"] = errors or f"ranks {late} of {world} did not end in {seconds} s"
            print(found["failed"], file=sys.stderr)
        return found


def _rank(
    rank: int,
    world: int,
    folder: str,
    body: Body,
    kind: str,
    seconds: float,
) -> None:
    os.environ |= {
        "NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1",
    }  # fmt: skip
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    device = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "nccl" if kind == "cuda" else "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=seconds),
            device_id=bound(device) if world == 2 else None,  # both ways are in use
        )
        found: dict[str, Any] = {}
        for what, figures in body(device):
            found[what] = figures
            if rank == 0:
                (Path(folder) / "part").write_text(json.dumps(found))
                os.replace(Path(folder) / "part", Path(folder) / "result.json")
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        (Path(folder) / f"error{rank}").write_text(f"rank {rank}: {traceback.format_exc()[-3000:]}")
        raise


def _plans(device: torch.device) -> Iterator[tuple[str, Any]]:
    for name, strategies in PLANS[dist.get_world_size()].items():
        model, batch = made(name, device, torch.float64)
        loss, gradients = reference(model, batch)
        graph = sw.capture(model, (), batch)
        for strategy in strategies:
            plan = sw.price(graph, _machine(device), strategy, "sgd")
            parallel: Any = sw.parallelize(copy.deepcopy(model), plan)
            measured = worst_error if plan.pipeline is None else _stage_error
            worst = _of_all(measured(parallel, batch, loss, gradients))
            figures = {"error": max(worst)}
            if device.type == "cuda":
                waits = waits_of(partial(parallel.forward_backward, batch))
                figures["waits"] = sorted(set(waits))
            yield f"{name}: {strategy}", figures


def _peaks(device: torch.device) -> Iterator[tuple[str, Any]]:
    """Peaks of GPT-2 of 124M parameters in float32, in the third step under AdamW."""
    model, batch = made("GPT-2 124M, 16x1024", device, torch.float32)
    batch = {key: value[:8, :512] for key, value in batch.items()}
    graph = sw.capture(model, (), batch)
    for strategy in PEAKS:
        plan = sw.price(graph, _machine(device), strategy, "adamw")
        parallel = sw.parallelize(copy.deepcopy(model).cpu(), plan)
        model.cpu()
        torch.cuda.empty_cache()
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4)
        for _ in range(2):
            parallel.train_step(optimizer, batch)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        parallel.train_step(optimizer, batch)
        torch.cuda.synchronize()
        peaks = _of_all(torch.cuda.max_memory_allocated())
        reserved = _of_all(torch.cuda.max_memory_reserved())
        yield strategy, {"predicted": int(plan.peak_bytes), "peak": peaks, "reserved": reserved}
        del parallel, optimizer
        gc.collect()


def _machine(device: torch.device) -> str:
    return f"{dist.get_world_size()}x{kind_here() if device.type == 'cuda' else 'cpu'}"


def _of_all(mine: Any) -> list[Any]:
    found = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _stage_error(
    parallel: Any, batch: dict[str, torch.Tensor], loss: torch.Tensor, gradients: Any
) -> float:
    """The error of a pipeline's step, of the parameters that this stage holds."""
    got = parallel.forward_backward(batch)
    worst = error_of(got, loss)
    for name, parameter in parallel.named_parameters():
        if name in gradients:
            assert parameter.grad is not None, f"{name} has no gradient"
            worst = max(worst, error_of(parameter.grad, gradients[name]))
    return worst


def _asynchronous(device: torch.device) -> Iterator[tuple[str, Any]]:
    model, batch = made("Llama", device, torch.float32)
    pipeline = async_pipeline(copy.deepcopy(model), (), batch, weights="spectrain")
    optimizer = _momentum(pipeline.parameters())
    losses = [pipeline.train_step(optimizer, batch).item() for _ in range(_STEPS)]
    losses += [loss.item() for loss in pipeline.drain(optimizer)]
    yield "losses", [loss for loss in losses if math.isfinite(loss)]
    simulation = async_simulation(
        model, (), batch, stages=dist.get_world_size(), weights="spectrain", optimizer=_momentum
    )
    yield "simulated", [simulation.train_step(batch).item() for _ in range(_STEPS)]


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
