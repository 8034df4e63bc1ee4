"""Predicted and counted memory of a step, for tests that compare them."""

from pathlib import Path

import torch

from shardwright.ir.options.optimizers import by_tiles, optimizer_spec
from shardwright.machine.backends import BACKENDS
from shardwright.profile.measure import channel_block_here
from shardwright.program.step.lower.plan_lowering import PlanLowering
from shardwright.runtime.parameters.peak_memory import metered, tensors_of
from shardwright.simulate.memory.step.rank_step import StepSimulation, Trainer
from shardwright.simulate.memory.values import RankModel
from shardwright.tracing.op_memory.footprints import Footprints

CPU = torch.device("cpu")


def predicted(graph, analysis, decisions, rank=0, optimizer="adamw"):
    # Compared with what this host takes, whatever its processor is.
    host = RankModel(BACKENDS["gloo"], channel_block_here())
    spec = optimizer_spec(optimizer)
    trainer = Trainer(spec, host, spec.runs(plain=by_tiles(spec), on_gpu=False))
    lowering = PlanLowering(graph, analysis, decisions, host.backend.alone_bytes)
    return StepSimulation(lowering, rank, trainer, Footprints(on_cpu=True)).memory()


def counted(module, batch, optimizer=torch.optim.AdamW, steps=1):
    """Bytes at the peak of a step after the first, as `run` counts them; the least of `steps`.

    On several ranks Gloo's threads sometimes let go of what they sent a moment late.
    """
    optimizer = optimizer(module.parameters(), foreach=False)
    module.train_step(optimizer, batch)
    given = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    found = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        held = [*module.parameters(), *module.buffers(), *tensors_of(optimizer), *given]
        found.append(metered(lambda: module.train_step(optimizer, batch), held, CPU)[1])
    return min(found)


def resident_growth(work):
    """The result of `work`, and the bytes by which resident memory grew in it at the most.

    As Linux counts them; pages of mapped files count too.
    """
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    before = _status("VmRSS")
    result = work()
    return result, _status("VmHWM") - before


def _status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
