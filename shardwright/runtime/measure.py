"""The machine at hand, measured: what the cost model needs to know of it.

Every rank measures at the same time, so that shared memory and cores are
shared as they will be in training, and the figures of the slowest rank count.
Operators and redistributions are timed as programs run them: through autograd
with fresh results, and through `DTensor.redistribute`.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shardwright.ir.files import write_whole
from shardwright.ir.layout import Bytes, Seconds
from shardwright.ir.machine import Device, Efficiency, Level, Machine, MachineError

START_SECONDS = 60.0  # allowance for processes to start and import torch, before we give up
MATMUL_SIZES = (256, 512, 1024)
SMALL_ROWS = 16  # of 64 float32 each: 4 KiB
Figures = dict[str, float]


def measure_host(
    devices: int, seconds_budget: float = 10.0, cache_dir: Path | None = None
) -> Machine:
    """The machine `here`: `devices` GPUs of this host, or as many processes that share its CPU.

    Takes about `seconds_budget` and the start of the processes; the result is
    kept in the user's cache directory and read from there the next time. The
    processes are spawned, so a script calls this under `if __name__ == "__main__"`.
    Raises `MachineError` when the processes fail or do not finish in time.
    """
    if devices < 1:
        raise MachineError(f"{devices} devices to measure; ask for at least one")
    file = (cache_dir or _cache_dir()) / _cache_name(devices)
    with suppress(MachineError):  # not there, or damaged
        return Machine.load(file)
    machine = _measure(devices, seconds_budget)
    with suppress(OSError):  # nowhere to keep it: measured again the next time
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, machine.to_toml())
    return machine


def measure_ranks(seconds_budget: float = 10.0) -> Machine:
    """The machine under the running process group, as one level; equal on every rank."""
    world, gpu = dist.get_world_size(), dist.get_backend() == "nccl"
    kind = "cuda" if gpu else "cpu"
    figures = _compute(kind, seconds_budget / 2) | _memory(kind, world)
    dist.barrier()
    figures |= _collectives(init_device_mesh(kind, (world,)), kind, seconds_budget / 2)
    found: list[Any] = [None] * world
    dist.all_gather_object(found, figures)
    slowest = {
        name: (max if name.endswith("seconds") else min)(f[name] for f in found) for name in figures
    }
    rounded = {name: float(f"{figure:.4g}") for name, figure in slowest.items()}
    return _machine(rounded | {"memory_bytes": slowest["memory_bytes"]}, world, gpu)


def _measure(devices: int, seconds_budget: float) -> Machine:
    """Start the processes, wait for them within bounds, and leave none behind."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(rank, devices, folder, seconds_budget), daemon=True)
            for rank in range(devices)
        ]
        try:
            for process in processes:
                process.start()
            deadline = time.monotonic() + START_SECONDS + 3 * seconds_budget
            while any(process.exitcode is None for process in processes):
                failed = [i for i, process in enumerate(processes) if process.exitcode]
                if failed or time.monotonic() > deadline:
                    break
                time.sleep(0.02)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()  # without effect on those that have ended
                    process.join()
        result = Path(folder) / "machine.toml"
        if not result.exists():
            error = Path(folder) / "error.txt"
            why = error.read_text() if error.exists() else "the processes did not finish in time"
            raise MachineError(
                f"measuring {devices} devices on this host failed: {why}; ask for fewer devices or"
                f" name a preset such as {devices}xcpu"
            )
        return Machine.load(result)


def _rank(rank: int, devices: int, folder: str, seconds_budget: float) -> None:
    """One process: join the others, measure with them, and on rank 0 write what was found."""
    gpu = torch.cuda.is_available() and torch.cuda.device_count() >= devices
    if gpu:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // devices))
    try:
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=devices,
            timeout=timedelta(seconds=START_SECONDS + 3 * seconds_budget),
        )
        try:
            machine = measure_ranks(seconds_budget)
        finally:
            dist.destroy_process_group()
        if rank == 0:
            write_whole(Path(folder) / "machine.toml", machine.to_toml())
    except Exception as e:
        (Path(folder) / "error.txt").write_text(f"{type(e).__name__}: {e}".splitlines()[0])
        raise SystemExit(1) from e


def _machine(figures: Figures, world: int, gpu: bool) -> Machine:
    kind = torch.cuda.get_device_name() if gpu else "cpu"
    peaks = {key.removeprefix("flop_per_s."): f for key, f in figures.items() if "flop_per" in key}
    threads = "" if gpu else f" of {torch.get_num_threads()} threads"
    return Machine(
        name=f"{world}x{kind} of {socket.gethostname()}",
        device=Device(
            kind=kind,
            memory_bytes=Bytes(int(figures["memory_bytes"])),
            flop_per_s=tuple(peaks.items()),
            bytes_per_s=figures["bytes_per_s"],
            launch_seconds=Seconds(figures["launch_seconds"]),
            efficiency=Efficiency(
                convolution=figures["convolution"], attention=figures["attention"]
            ),
        ),
        levels=(
            Level(
                "host",
                world,
                figures["reduce_bytes_per_s"],
                Seconds(figures["hop_seconds"]),
                figures["gather_bytes_per_s"],
            ),
        ),
        provenance=f"measured on {socket.gethostname()} with torch {torch.__version__},"
        f" {world} processes{threads} at once",
        backend="nccl" if gpu else "gloo",
        collective_launch_seconds=Seconds(figures["collective_launch_seconds"]),
    )


def _compute(kind: str, seconds: float) -> Figures:
    """FLOP/s per dtype, what convolutions and attention reach of it, bytes/s, launch seconds."""
    dtypes = [torch.float32, torch.float64] + [torch.bfloat16] * (kind == "cuda")
    part = seconds / (len(dtypes) * len(MATMUL_SIZES) + 4)
    figures: Figures = {}
    for dtype in dtypes:
        rates = []
        for size in MATMUL_SIZES:
            a = torch.randn(size, size, device=kind).to(dtype)
            dist.barrier()
            rates.append(2 * size**3 / _time(kind, part, lambda a=a: a @ a))  # type: ignore[misc]
        figures[f"flop_per_s.{str(dtype).removeprefix('torch.')}"] = max(rates)

    peak = figures["flop_per_s.float32"]
    x, w = torch.randn(8, 64, 32, 32, device=kind), torch.randn(64, 64, 3, 3, device=kind)
    dist.barrier()
    taken = _time(kind, part, lambda: torch.nn.functional.conv2d(x, w, padding=1))
    figures["convolution"] = min(1.0, 2 * x.numel() * w[0].numel() / taken / peak)
    q = torch.randn(4, 8, 256, 64, device=kind)
    dist.barrier()
    taken = _time(kind, part, lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q))
    figures["attention"] = min(1.0, 4 * q.numel() * q.shape[2] / taken / peak)

    count = (64 if kind == "cuda" else 8) * 2**20
    big = torch.randn(count, device=kind)
    dist.barrier()
    figures["bytes_per_s"] = 3 * 4 * count / _time(kind, part, lambda: big + big)

    tiny = torch.zeros(8, device=kind, requires_grad=True)
    length = 100

    def chain() -> None:
        y = tiny
        for _ in range(length):
            y = y + 1.0
        y.sum().backward()

    dist.barrier()
    figures["launch_seconds"] = _time(kind, part, chain) / (2 * length)
    return figures


def _collectives(mesh: DeviceMesh, kind: str, seconds: float) -> Figures:
    """Fit of `launch + hops · hop + bytes / bandwidth` to all_reduce and all_gather."""
    n = mesh.size()
    if n == 1:
        nothing = ("hop_seconds", "collective_launch_seconds")
        rates = ("reduce_bytes_per_s", "gather_bytes_per_s")
        return dict.fromkeys(nothing, 0.0) | dict.fromkeys(rates, 1e12)  # a level of one: unused
    rows = (64 if kind == "cuda" else 8) * 2**20 // 256  # of 64 float32 each
    small, big = (torch.randn(count, 64, device=kind) for count in (SMALL_ROWS, rows))

    def timed(x: torch.Tensor, src: Placement, dst: Placement) -> float:
        def once() -> torch.Tensor:
            shape = (n * x.shape[0], 64) if isinstance(src, Shard) else x.shape
            tensor = DTensor.from_local(
                x, mesh, [src], run_check=False, shape=torch.Size(shape), stride=(64, 1)
            )
            return tensor.redistribute(mesh, [dst]).to_local()

        # Every rank must run equally many: rank 0 says how many fit.
        once()
        dist.barrier()
        first = _seconds(kind, once)
        repeats = torch.tensor([max(3, min(50, int(seconds / 4 / first)))], device=kind)
        dist.broadcast(repeats, 0)
        return median(_seconds(kind, once) for _ in range(int(repeats)))

    reduce, gather = (Partial(), Replicate()), (Shard(0), Replicate())
    fast = {way: timed(small, *way) for way in (reduce, gather)}
    slow = {way: timed(big, *way) for way in (reduce, gather)}
    # Two laps for all_reduce and one for all_gather tell hops from the launch.
    hops = n - 1
    hop = max(0.0, fast[reduce] - fast[gather]) / hops
    moved = (big.numel() - small.numel()) * big.element_size()
    return {
        "hop_seconds": hop,
        "collective_launch_seconds": max(0.0, fast[gather] - hops * hop),
        "reduce_bytes_per_s": 2 * hops / n * moved / max(1e-9, slow[reduce] - fast[reduce]),
        "gather_bytes_per_s": hops * moved / max(1e-9, slow[gather] - fast[gather]),
    }


def _memory(kind: str, world: int) -> Figures:
    """Bytes of one device: a GPU's, or an equal share of the host's RAM within its limits."""
    if kind == "cuda":
        return {"memory_bytes": float(torch.cuda.get_device_properties(0).total_memory)}
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container; "max" when there is none
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return {"memory_bytes": float(total // world)}


def _time(kind: str, seconds: float, run: Callable[[], object]) -> float:
    """Median seconds of one `run`, repeated for about `seconds` after a first, unmeasured one."""
    run()
    found: list[float] = []
    deadline = time.perf_counter() + seconds
    while not found or time.perf_counter() < deadline:
        found.append(_seconds(kind, run))
    return median(found)


def _seconds(kind: str, run: Callable[[], object]) -> float:
    if kind == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if kind == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _cache_dir() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "shardwright"


def _cache_name(devices: int) -> str:
    """Names host, torch and devices, since the figures hold for nothing else."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    text = f"{socket.gethostname()}-torch{torch.__version__}-{gpus}gpu-{devices}devices"
    return re.sub(r"[^\w.+-]", "_", text) + ".toml"
