"""Several ranks on one GPU over NCCL: every kind of plan against the module itself.

NCCL refuses two ranks on one GPU of one host. Each rank here says that it is on a host of its own
(`NCCL_HOSTID`), so that they talk through sockets on loopback, with NCCL's own streams and order.
"""

from __future__ import annotations

import copy
import math
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import shardwright as sw
from scripts.gpu_check.exact import FLOAT64, ROUTED, reference, worst_error
from scripts.gpu_check.models import made
from shardwright.runtime.async_pipeline.runner import async_pipeline
from shardwright.runtime.async_pipeline.simulation import async_simulation

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


def nccl(device: torch.device) -> dict[str, Any]:
    """Errors in float64 of each plan, on 2 and then 4 ranks."""
    found: dict[str, Any] = {}
    for world in PLANS:
        found[f"{world} ranks"] = run(world, _plans, device.type, seconds=120 * world)
    return found


def asynchronous(device: torch.device) -> dict[str, Any]:
    """An asynchronous pipeline of three stages ends, with the losses that its simulation has."""
    return run(3, _asynchronous, device.type, seconds=120)


def run(world: int, body: Callable[[torch.device], Any], kind: str, seconds: float) -> Any:
    """`body(device)` on so many ranks of one GPU; what rank 0 returned."""
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
        done = Path(folder) / "result.pt"
        if not done.exists():
            raise RuntimeError(errors or f"ranks {late} of {world} did not end in {seconds} s")
        return torch.load(done, weights_only=False)


def _rank(
    rank: int,
    world: int,
    folder: str,
    body: Callable[[torch.device], Any],
    kind: str,
    seconds: float,
) -> None:
    import traceback

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
        )
        found = body(device)
        dist.barrier()
        if rank == 0:
            torch.save(found, f"{folder}/temporary.pt")
            os.replace(f"{folder}/temporary.pt", f"{folder}/result.pt")
        dist.destroy_process_group()
    except Exception:
        (Path(folder) / f"error{rank}").write_text(f"rank {rank}: {traceback.format_exc()[-3000:]}")
        raise


def _plans(device: torch.device) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    for name, strategies in PLANS[dist.get_world_size()].items():
        model, batch = made(name, device, torch.float64)
        loss, gradients = reference(model, batch)
        graph = sw.capture(model, (), batch)
        for strategy in strategies:
            start = time.perf_counter()
            kind = "H100" if device.type == "cuda" else "cpu"
            plan = sw.price(graph, f"{dist.get_world_size()}x{kind}", strategy, "sgd")
            parallel = sw.parallelize(copy.deepcopy(model), plan)
            if plan.pipeline is None:
                error = worst_error(parallel, batch, loss, gradients)
            else:
                error = _stage_error(parallel, batch, loss, gradients)
            worst = [0.0] * dist.get_world_size()
            dist.all_gather_object(worst, error)
            found[f"{name}: {strategy}"] = max(worst)
            if dist.get_rank() == 0:
                print(f"{name}: {strategy}: {max(worst):.1e}, {time.perf_counter() - start:.1f} s")
            limit = ROUTED if name == "Mixtral" else FLOAT64
            assert max(worst) <= limit, f"{name} {strategy}: {worst}"
    return found


def _stage_error(
    parallel: Any, batch: dict[str, torch.Tensor], loss: torch.Tensor, gradients: Any
) -> float:
    """The error of a pipeline's step, of the parameters that this stage holds."""
    got = parallel.forward_backward(batch)
    worst = abs(got.item() - loss.item()) / abs(loss.item())
    for name, parameter in parallel.named_parameters():
        if parameter.grad is not None:
            whole = parameter.grad
            whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
            scale = gradients[name].abs().max().item()
            worst = max(worst, (whole - gradients[name]).abs().max().item() / max(scale, 1e-30))
    return worst


def _asynchronous(device: torch.device) -> dict[str, Any]:
    model, batch = made("Llama", device, torch.float32)
    pipeline = async_pipeline(copy.deepcopy(model), (), batch, weights="spectrain")
    optimizer = _momentum(pipeline.parameters())
    losses = [pipeline.train_step(optimizer, batch).item() for _ in range(_STEPS)]
    losses += [loss.item() for loss in pipeline.drain(optimizer)]
    simulation = async_simulation(
        model, (), batch, stages=dist.get_world_size(), weights="spectrain", optimizer=_momentum
    )
    expected = [simulation.train_step(batch).item() for _ in range(_STEPS)]
    found = [loss for loss in losses if math.isfinite(loss)]
    assert found == expected, (found, expected)
    return {"steps": _STEPS, "losses": found}


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
