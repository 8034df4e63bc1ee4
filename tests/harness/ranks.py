"""Local ranks for tests: gloo processes that meet in a file, so no port can clash."""

import os
import pickle
import tempfile
import time
import traceback
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from shardwright.runtime.verify import verify, worker
from tests.harness import captures

# The server imports once what every rank needs and forks the ranks off, in milliseconds.
_PRELOAD = ["tests.harness.preloaded"]


def run_ranks(world, function, *args, timeout=420):
    """`function(*args)` on `world` ranks; what each returned, by rank.

    `function` must be importable: a top-level function of a test file. An error on one rank ends
    the others and is raised here with the traceback of the rank that failed first: those that it
    left waiting fail after it. `timeout`, in seconds, ends all ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = world, folder, timeout, captures.folder(), function, args
        try:
            run_forked(world, _rank, given, timeout, f"{world} ranks of {function}")
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as e:
            if first := _first_error(folder):
                raise RuntimeError(first) from e
            raise
        return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(world)]


def run_forked(world, function, args, timeout, what):
    """Run `function(rank, *args)` in as many forked processes, which the first error ends."""
    mp.get_context("forkserver").set_forkserver_preload(_PRELOAD)
    ranks = mp.start_processes(function, args, nprocs=world, join=False, start_method="forkserver")
    end = time.monotonic() + timeout
    try:
        while not ranks.join(timeout=max(0.0, end - time.monotonic())):
            if time.monotonic() >= end:
                raise TimeoutError(f"{what} ran for {timeout} s")
    finally:
        for process in ranks.processes:
            if process.is_alive():
                process.kill()
            process.join()


def _rank(rank, world, folder, timeout, remembered, function, args):
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"  # models are made of configurations alone
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    try:
        with nullcontext() if remembered is None else captures.remembered(remembered):
            returned = function(*args)
        dist.barrier()  # none leaves while another still sends
    except Exception:  # told before the group is gone and the others fail for want of it
        _error(folder, rank).write_text(f"rank {rank}, {time.time_ns()}\n{traceback.format_exc()}")
        raise
    finally:
        dist.destroy_process_group()
    _result(folder, rank).write_bytes(pickle.dumps(returned))


@contextmanager
def verify_forks():
    """Within, ranks of `sw.verify` are forked, where torchrun takes seconds to import torch."""

    def run(module, args, processes, *, timeout=600.0):
        assert module == worker.__name__
        run_ranks(processes, worker.measure_payload, *map(Path, args), timeout=timeout)

    with mock.patch.object(verify, "run_ranks", run):
        yield


def _result(folder, rank):
    return Path(folder) / f"rank{rank}.pickle"


def _error(folder, rank):
    return Path(folder) / f"rank{rank}.error"


def _first_error(folder):
    found = [path.read_text() for path in Path(folder).glob("rank*.error")]
    return min(found, key=lambda text: int(text.split(", ")[1].split("\n")[0]), default=None)


def whole(tensor):
    """A parameter or gradient, of one device or of a parallel module, as one plain tensor."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()
