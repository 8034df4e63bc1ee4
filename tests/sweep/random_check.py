"""Checks random modules on two ranks: the graph against the module, random tilings against it.

Rank 0 draws programs and shrinks those that fail; rank 1 does what it is sent.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.rules.placements import tiling_text, tilings
from shardwright.runtime.verify.module_comparison import TOLERANCE, errors_between
from shardwright.runtime.verify.module_comparison import measure as measured
from shardwright.tracing.call import CaptureError
from shardwright.tracing.discovery.discover import capture_with_rules
from tests.sweep.random_modules import SHAPE, OfProgram, Step, programs
from tests.sweep.sweep import FLOOR, MESH, Subject, parallel_module

ASSIGNMENTS = 3  # of random tilings to all operators of a module
EAGER_FAILS = "eager mode fails"  # a tensor of the backward pass was changed in place

Program = tuple[Step, ...]


def check_random(count: int, number: int) -> dict[str, int]:
    """On each of two ranks: check `count` modules drawn from the seed `number`.

    Returns how many had which verdict; raises `AssertionError` on rank 0 with the shortest program
    that is wrong.
    """
    warnings.simplefilter("ignore")
    device_mesh = init_device_mesh("cpu", MESH.shape, mesh_dim_names=MESH.names)
    if dist.get_rank() == 1:
        return _follow(device_mesh)
    found: Counter[str] = Counter()

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(programs)
    def right(program: Program) -> None:
        verdict, text = _together(program, device_mesh)
        found[verdict] += 1
        assert verdict != "wrong", f"{program}: {text}"

    try:
        right()
    finally:
        _send(None)
    return dict(found)


def _follow(device_mesh: DeviceMesh) -> dict[str, int]:
    while (program := _send(None)) is not None:
        _agreed(_verdict(program, device_mesh))
    return {}


def _together(program: Program, device_mesh: DeviceMesh) -> tuple[str, str]:
    _send(program)
    return _agreed(_verdict(program, device_mesh))


def _send(program: Program | None) -> Program | None:
    """The program of rank 0, on both ranks."""
    sent: list[Any] = [program]
    dist.broadcast_object_list(sent, src=0)
    found: Program | None = sent[0]
    return found


def _agreed(mine: tuple[str, str]) -> tuple[str, str]:
    """The worse verdict of both ranks."""
    every: list[Any] = [None, None]
    dist.all_gather_object(every, mine)
    order = ("exact", EAGER_FAILS, "refused", "wrong")
    worst: tuple[str, str] = max(every, key=lambda one: order.index(one[0]))
    return worst


def _verdict(program: Program, device_mesh: DeviceMesh) -> tuple[str, str]:
    module = OfProgram(program)
    x = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    try:
        module(x).backward()
    except RuntimeError as e:
        return EAGER_FAILS, str(e)
    module = OfProgram(program)
    try:
        captured = capture_with_rules(module, (x,))
    except CaptureError as e:
        return ("refused" if "\n" not in str(e).strip() else "wrong"), str(e)
    except Exception as e:
        return "wrong", f"capture: {type(e).__name__}: {e}"
    try:
        subject = Subject.of(module, captured, (x,))
    except Exception as e:
        return "wrong", f"comparison: {type(e).__name__}: {e}"
    if subject.wrong:
        return "wrong", subject.wrong
    draw = random.Random(str(program))
    for _ in range(ASSIGNMENTS):
        chosen = {
            op.name: draw.choice([t for t, _ in tilings(subject.analysis.rules[op.name], MESH)])
            for op in subject.captured.graph.ops
        }
        if text := _difference(subject, chosen, device_mesh):
            return "wrong", text
    return "exact", ""


def _difference(subject: Subject, chosen: Any, device_mesh: DeviceMesh) -> str:
    """How one assignment of tilings differs from one device; empty where it does not."""
    said = {name: " ".join(tiling_text(tiling)) for name, tiling in chosen.items()}
    try:
        parallel = parallel_module(
            subject.captured, subject.analysis, subject.payload, chosen, device_mesh
        )
        results = measured(parallel, torch.optim.SGD, subject.payload["batch"])
    except Exception as e:
        return f"{type(e).__name__}: {e} under {said}"
    errors = errors_between(subject.serial, results, FLOOR)
    worst = max(errors, key=lambda key: errors[key])
    if errors[worst] <= TOLERANCE:
        return ""
    return f"{' '.join(worst)} differs by {errors[worst]:.1e} under {said}"
