"""The machine at hand, measured: what the cost model needs to know of it.

Every rank measures at the same time, so that shared memory and cores are
shared as they will be in training, and the figures of the slowest rank count.
What is timed is in `probes` and `link_probes`, what is made of it in `fit`.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.ir.files import write_whole
from shardwright.ir.layout import Bytes, Seconds
from shardwright.ir.machine import Device, Level, Machine, MachineError
from shardwright.ir.measured import Measured
from shardwright.runtime import link_probes, probes, update_probes
from shardwright.runtime.fit import Compute, Links, fit_compute, fit_links, fit_overlap
from shardwright.runtime.timing import Sample, Stopwatch

START_SECONDS = 180.0  # to start and import torch, or for one thing to be measured
_GRACE_SECONDS = 10.0  # for the others, when a process has ended without a word
Tell = Callable[[str, float], None]  # what is being measured, which part of all is done


def silent(_what: str, _part: float) -> None:
    """Nobody is told."""


def measure_host(
    devices: int,
    seconds_budget: float = 15.0,
    cache_dir: Path | None = None,
    *,
    tell: Tell = silent,
    anew: bool = False,
) -> Machine:
    """The machine `here`: `devices` GPUs of this host, or as many processes that share its CPU.

    Takes about `seconds_budget` and the start of the processes; the result is
    kept in the user's cache directory and read from there the next time, unless it is to
    be measured `anew` or is one to doubt (`Measured.doubts`). The processes are spawned, so a
    script calls this under `if __name__ == "__main__"`.
    Raises `MachineError` when the processes fail or stand still.
    """
    if devices < 1:
        raise MachineError(f"{devices} devices to measure; ask for at least one")
    file = (cache_dir or _cache_dir()) / _cache_name(devices)
    if not anew:
        with suppress(MachineError):  # not there, damaged, or of an older form
            kept = Machine.load(file)
            if kept.measured is not None and not kept.measured.doubts:
                return kept
    machine = _measure(devices, seconds_budget, tell)
    with suppress(OSError):  # nowhere to keep it: measured again the next time
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, machine.to_toml())
    return machine


def measure_ranks(seconds_budget: float = 15.0, tell: Tell = silent) -> Machine:
    """The machine under the running process group; equal on every rank.

    Ranks of one host (`LOCAL_WORLD_SIZE`, which torchrun sets) are its inner level, hosts the
    outer one.
    """
    world, kind = dist.get_world_size(), "cuda" if dist.get_backend() == "nccl" else "cpu"
    levels = _levels(kind, world)
    watch = Stopwatch(kind, seconds_budget, tell)
    probes.add_all(watch)
    update_probes.add_all(watch)
    link_probes.add_all(watch, levels)
    samples = watch.samples()
    sizes = {name: mesh.size() for name, mesh in levels.items()}
    found: list[float] = [0.0] * world
    dist.all_gather_object(found, _memory_bytes(kind, sizes.get("host", 1)))
    return _machine(samples, sizes, int(min(found)), watch.busy)


def _levels(kind: str, world: int) -> dict[str, DeviceMesh]:
    """The mesh along each level that joins anything, innermost first."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    local = local if local > 0 and world % local == 0 else world
    sizes = {"network": world // local, "host": local}
    mesh = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return {name: mesh[name] for name in ("host", "network") if sizes[name] > 1}


def _measure(devices: int, seconds_budget: float, tell: Tell) -> Machine:
    """Start the processes, wait for them within bounds, and leave none behind."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(rank, devices, folder, seconds_budget), daemon=True)
            for rank in range(devices)
        ]
        result, error = Path(folder) / "machine.toml", Path(folder) / "error.txt"
        try:
            for process in processes:
                process.start()
            deadline, progress = time.monotonic() + START_SECONDS, ""
            while any(process.exitcode is None for process in processes):
                if time.monotonic() > deadline or error.exists():
                    break
                if any(process.exitcode for process in processes):  # without a word
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
                if (now := _read(Path(folder) / "progress.txt")) != progress:
                    part, what = now.split("\n")
                    tell(what, float(part))
                    # However slow a busy host is, who goes on is waited for.
                    deadline, progress = time.monotonic() + START_SECONDS, now
                time.sleep(0.05)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()  # without effect on those that have ended
                    process.join()
        if not result.exists():
            ends = [process.exitcode for process in processes]
            at = progress.partition("\n")[2] or "their start"
            silent_end = f"the processes did not get beyond {at} in time (they ended with {ends})"
            why = error.read_text() if error.exists() else silent_end
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
            timeout=timedelta(seconds=START_SECONDS),
        )
        try:
            machine = measure_ranks(seconds_budget, _teller(folder) if rank == 0 else silent)
        finally:
            dist.destroy_process_group()
        if rank == 0:
            write_whole(Path(folder) / "machine.toml", machine.to_toml())
    except Exception as e:
        if not isinstance(e, RuntimeError) or not (Path(folder) / "error.txt").exists():
            # What a rank says that lost another one is no reason.
            write_whole(Path(folder) / "error.txt", f"{type(e).__name__}: {e}".splitlines()[0])
        raise SystemExit(1) from e


def _teller(folder: str) -> Tell:
    """Tells the process that started this one."""

    def tell(what: str, part: float) -> None:
        write_whole(Path(folder) / "progress.txt", f"{part}\n{what}")

    return tell


def _read(progress: Path) -> str:
    try:
        return progress.read_text()
    except OSError:  # nothing is told yet
        return ""


def _machine(
    samples: list[Sample], sizes: dict[str, int], memory_bytes: int, busy: float
) -> Machine:
    """The machine that `samples` show, of so many devices at each level."""
    gpu = dist.get_backend() == "nccl"
    world = dist.get_world_size()
    kind = torch.cuda.get_device_name() if gpu else "cpu"
    compute = fit_compute(samples)
    links = {name: fit_links(samples, name, size, gpu) for name, size in sizes.items()}
    levels = [
        Level(
            name, sizes[name], link.bytes_per_s, Seconds(link.hop_seconds), link.gather_bytes_per_s
        )
        for name, link in links.items()
    ]
    launches = [link.launch_seconds for link in links.values()]
    shape = "x".join(str(size) for size in reversed(sizes.values())) or "1"
    return Machine(
        name=f"{shape}x{kind} of {socket.gethostname()}",
        device=Device(
            kind=kind,
            memory_bytes=Bytes(memory_bytes),
            flop_per_s=compute.flop_per_s,
            bytes_per_s=compute.bytes_per_s,
            launch_seconds=Seconds(compute.launch_seconds),
            efficiency=compute.efficiency,
            dispatch_seconds=Seconds(compute.dispatch_seconds),
            parameter_seconds=Seconds(compute.parameter_seconds),
        ),
        levels=tuple(levels) or (Level("host", 1, 1e12, Seconds(0.0)),),  # joins nothing
        provenance=_provenance(world, gpu),
        backend="nccl" if gpu else "gloo",
        collective_launch_seconds=Seconds(max(launches, default=0.0)),
        overlap=fit_overlap(samples),
        measured=Measured(_now(), float(f"{busy:.3g}"), tuple(_errors(compute, links))),
    )


def _now() -> datetime:
    """The time on rank 0, so that all ranks find equal machines."""
    found = [datetime.now(UTC).replace(microsecond=0)]
    dist.broadcast_object_list(found, 0)
    return found[0]


def _errors(compute: Compute, links: dict[str, Links]) -> Iterator[tuple[str, float, float]]:
    every = dict(compute.errors)
    for level, link in links.items():
        every |= {f"{level} {kind}": errors for kind, errors in link.errors.items()}
    for kind, (middle, most) in every.items():
        yield kind, float(f"{middle:.2g}"), float(f"{most:.2g}")


def _provenance(world: int, gpu: bool) -> str:
    threads = "" if gpu else f" of {torch.get_num_threads()} threads"
    return (
        f"measured on {socket.gethostname()} with torch {torch.__version__}, {world}"
        f" processes{threads} at once"
    )


def _memory_bytes(kind: str, processes: int) -> float:
    """Bytes of one device: a GPU's, or an equal share of the host's RAM within its limits."""
    if kind == "cuda":
        return float(torch.cuda.get_device_properties(0).total_memory)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container; "max" when there is none
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return float(total // processes)


def _cache_dir() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "shardwright"


def _cache_name(devices: int) -> str:
    """Names host, torch and devices, since the figures hold for nothing else."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    text = f"{socket.gethostname()}-torch{torch.__version__}-{gpus}gpu-{devices}devices"
    return re.sub(r"[^\w.+-]", "_", text) + ".toml"
