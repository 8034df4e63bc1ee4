"""Scripts on local ranks with the environment of torchrun, forked where that imports torch anew."""

import os
import runpy
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp

from tests.harness import captures
from tests.harness.ranks import run_forked


def run_script(world, script, *args, folder, timeout=400):
    """What `python script *args` writes on `world` ranks in `folder`, rank by rank.

    `script` is a file, or the name of a module. As under torchrun, ranks meet at a store of this
    process, and the first that fails ends the others; its output is raised then.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # ranks make no store of their own
        "TORCHELASTIC_RUN_ID": "tests",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryDirectory() as texts:
        given = str(script), [*map(str, args)], str(folder), environment, texts, captures.folder()
        try:
            run_forked(world, _rank, given, timeout, script)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as e:
            raise RuntimeError("\n".join([*_written(texts), str(e)])) from e
        return _written(texts)


def forked(command, environment, stdout):
    """Runs the command of `launch` with forked ranks, where torchrun and its ranks import torch.

    Returns the exit status, which is 0: a rank that fails raises.
    """
    (world,) = (one.split("=")[1] for one in command if one.startswith("--nproc-per-node="))
    module, *args = command[command.index("-m", command.index("torch.distributed.run")) + 1 :]
    stdout.writelines(run_script(int(world), module, *args, folder=os.getcwd()))
    return 0


def _rank(rank, script, args, folder, environment, texts, remembered):
    with open(Path(texts, f"{rank}"), "w") as out:
        for file in (sys.stdout, sys.stderr):
            os.dup2(out.fileno(), file.fileno())
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(folder)
    with nullcontext() if remembered is None else captures.remembered(remembered):
        _run(script, args)


def _run(script, args):
    if script.endswith(".py"):
        script = str(Path(script).resolve())  # by which captures tell files of one name apart
        sys.argv = [script, *args]
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")
    else:
        sys.argv = [script, *args]
        runpy.run_module(script, run_name="__main__", alter_sys=True)


def _written(texts):
    return [file.read_text() for file in sorted(Path(texts).iterdir())]
