"""Asynchronous pipelines on real ranks: bit for bit the simulation, and no rank hangs."""

import copy
import itertools
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from shardwright.runtime.async_pipeline import AsyncPipeline, PipelineError
from shardwright.runtime.async_sim import AsyncSimulation
from shardwright.runtime.channel import StageFailed
from shardwright.runtime.stage import capture_stages, cut_stages
from shardwright.runtime.weights import weights_named
from tests.models import cnn, double, gpt2
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.ranks

PAGE = Path(__file__).parents[2] / "docs" / "async.md"
STEPS = 60
CPU = torch.device("cpu")
OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
}
MODES = [(o, w) for o in OPTIMIZERS for w in ("stale", "stash", "spectrain")]
MODES += [("adamw", "pipeoptim"), ("momentum", "pipeoptim-decay")]


@pytest.fixture(scope="module")
def captured():
    """Models, batches and graphs: captured once, for all ranks."""
    found = {}
    for name, make in (("gpt2", gpt2), ("cnn", lambda: cnn(norm=True))):
        model, batch = double(*make())
        batches = [batch, {k: v.flip(0) for k, v in batch.items()}]
        found[name] = model, batches, capture_stages(model, (), batch, stages=1)
    return found


def cut(captured, world):
    """The subjects of the tests below: each model, its batches, its stages."""
    return {
        name: (model, batches, cut_stages(stages.captured, world))
        for name, (model, batches, stages) in captured.items()
    }


def on_ranks(subject, optimizer, how, steps, **options):
    """Losses of this rank, its loss of an evaluation, its weights after all is drained."""
    model, batches, stages = subject
    pipeline = AsyncPipeline(stages, model, weights_named(how), device=CPU)
    steps_of = OPTIMIZERS[optimizer](pipeline.parameters())
    losses = [pipeline.train_step(steps_of, batches[m % 2], **options) for m in range(steps)]
    losses = [loss for loss in losses if not loss.isnan()] + pipeline.drain(steps_of, **options)
    return losses, pipeline.evaluate(batches[0]), pipeline.state_dict()


def simulated(subject, optimizer, how, steps, **options):
    model, batches, stages = subject
    simulation = AsyncSimulation(stages, model, how, OPTIMIZERS[optimizer], **options)
    losses = [simulation.train_step(batches[m % 2]) for m in range(steps)]
    simulation.drain()
    return losses, simulation.evaluate(batches[0]), simulation.state_dict()


def compare(subject, optimizer, how, steps, **options):
    losses, evaluated, weights = on_ranks(subject, optimizer, how, steps, **options)
    expected = simulated(subject, optimizer, how, steps, **options)
    assert len(losses) == steps
    assert losses == expected[0], (optimizer, how)
    assert evaluated == expected[1]
    for key, value in weights.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, expected[2][key]), (optimizer, how, key)


def all_modes(subjects):
    for optimizer, how in MODES:
        compare(subjects["gpt2"], optimizer, how, STEPS)
    compare(subjects["cnn"], "momentum", "spectrain", 20, clip_norm=0.1)


def drains_and_resumes(subject):
    """Ten steps, a checkpoint, ten more in another pipeline: the run that was only drained."""
    model, batches, stages = subject
    make, how = OPTIMIZERS["adamw"], weights_named("spectrain")
    first = AsyncPipeline(stages, model, how, device=CPU)
    optimizer = make(first.parameters())
    for m in range(10):
        first.train_step(optimizer, batches[m % 2])
    first.drain(optimizer)
    saved = {k: v.clone() if torch.is_tensor(v) else v for k, v in first.state_dict().items()}
    resumed = AsyncPipeline(stages, model, how, device=CPU)
    resumed.load_state_dict(saved)
    other = make(resumed.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # it would share the tensors
    found = []
    for pipeline, steps in ((first, optimizer), (resumed, other)):
        losses = [pipeline.train_step(steps, batches[m % 2]) for m in range(10)]
        found.append([x for x in losses if not x.isnan()] + pipeline.drain(steps))
    assert found[0] == found[1]
    assert len(found[0]) == 10
    with pytest.raises(PipelineError, match=r"call drain\(optimizer\) before evaluate"):
        first.train_step(optimizer, batches[0])
        first.evaluate(batches[0])
    first.drain(optimizer)


def fail_at(call):
    """A hook that raises when it is called for the `call`th time."""
    count = itertools.count(1)

    def hook(*_):
        if next(count) == call:
            raise ZeroDivisionError("the loss is odd <&>")

    return hook


def one_fails(subject):
    """Every rank ends with the error of the one that failed, soon, and can be used again."""
    model, batches, stages = subject
    for culprit in range(dist.get_world_size()):
        pipeline = AsyncPipeline(stages, model, weights_named("stash"), device=CPU)
        optimizer = OPTIMIZERS["adamw"](pipeline.parameters())
        if dist.get_rank() == culprit:
            optimizer.register_step_pre_hook(fail_at(5))
        dist.barrier()
        start = time.monotonic()
        with pytest.raises((StageFailed, ZeroDivisionError)) as caught:
            for m in range(20):
                pipeline.train_step(optimizer, batches[m % 2])
            pipeline.drain(optimizer)
        assert time.monotonic() - start < 60
        if dist.get_rank() != culprit:
            text = f"stage {culprit} failed: ZeroDivisionError: the loss is odd <&>"
            assert str(caught.value) == text
        with pytest.raises(StageFailed):
            pipeline.train_step(optimizer, batches[0])
        dist.barrier()


def ranks_that_disagree(subject):
    model, _, stages = subject
    how = weights_named("stash" if dist.get_rank() == 1 else "stale")
    with pytest.raises(PipelineError, match=r"rank 1 has other stages or weights \(.*stash\)"):
        AsyncPipeline(stages, model, how, device=CPU)


def documented(subject):
    """The example of docs/async.md runs, and learns."""
    model, batches, _ = subject
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    names = {"torch": torch, "model": model, "batch": batches[0]}
    first = model(**batches[0])
    exec(code, names)
    assert names["loss"] < first
    assert names["schedule"].last_epoch == 20
    assert set(names["state"]) > set(dict(names["pipeline"].named_parameters()))


def two_ranks(subjects):
    all_modes(subjects)
    drains_and_resumes(subjects["gpt2"])
    one_fails(subjects["gpt2"])
    ranks_that_disagree(subjects["gpt2"])
    documented(subjects["cnn"])


def four_ranks(subjects):
    all_modes(subjects)
    one_fails(subjects["gpt2"])


def test_two_stages(captured):
    run_ranks(2, two_ranks, cut(captured, 2))


def test_four_stages(captured):
    run_ranks(4, four_ranks, cut(captured, 4))


def killed(rank, folder, subject):
    """Rank 1 of 3 dies in mid-run; the others write down how they learned of it, and when."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    model, batches, stages = subject
    pipeline = AsyncPipeline(stages, model, weights_named("spectrain"), device=CPU)
    optimizer = OPTIMIZERS["momentum"](pipeline.parameters())
    try:
        for m in range(1000):
            if rank == 1 and m == 7:
                (folder / "rank1").write_text(f"{time.time()} dies")
                os.kill(os.getpid(), signal.SIGKILL)
            pipeline.train_step(optimizer, batches[0])
    except StageFailed as e:
        (folder / f"rank{rank}").write_text(f"{time.time()} {e}")


def test_a_stage_that_is_killed_is_named_by_all_others(captured, tmp_path):
    context = mp.get_context("forkserver")
    subject = cut(captured, 3)["cnn"]
    processes = [context.Process(target=killed, args=(k, tmp_path, subject)) for k in range(3)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(120)
    finally:
        for process in processes:
            process.kill()
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL, 0]
    (died, _), *others = [(tmp_path / f"rank{k}").read_text().split(" ", 1) for k in (1, 0, 2)]
    for when, text in others:
        assert text.startswith("stage 1 (rank 1) is gone")
        assert float(when) - float(died) < 30
