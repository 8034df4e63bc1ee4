"""All models on one group of four ranks, against one device.

They run under a chosen plan, random tilings and uniform strategies. Each rank captures, plans and
runs on one device every fourth model and leaves the others a file; then all ranks check one model
after the other. On the mesh of one axis two pairs of ranks share the assignments, as many each,
because models with selections compare their batches in the whole world: with the chosen plan that
is an odd number of random ones. On meshes of two axes, and under strategies, all four run every
one.
"""

import pickle
import random
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.api import search_with as search
from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import Bytes, Mesh, Seconds
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.machine.presets import preset
from shardwright.planner.tables.layout_codes import decode, storable
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.order import check_order
from shardwright.rules.placements import tiling_text, tilings
from tests.zoo import ZOO
from tests.zoo import strategies as uniform
from tests.zoo.subject import Subject, descend, descend_locally, worst

MESHES = ("a=2", "a=2 b=2")
WORLD = 4
_REDUCED = 100  # times, about, that models are narrower than published ones


@dataclass(frozen=True)
class Error:
    """The worst error of some assignments, relative, and where it is.

    `split`: under a strategy, the share of the multiply-adds that all of its axes split.
    """

    size: float
    where: str
    split: float = 1.0


@dataclass(frozen=True)
class Assignment:
    """A tiling per operator and a layout per parameter."""

    name: str
    mesh: Mesh
    chosen: dict
    storage: dict

    def __str__(self):
        chosen = " ".join(f"{k}={'/'.join(tiling_text(t))}" for k, t in self.chosen.items())
        return f"{self.name} on {self.mesh}: {chosen}"


def verify(names, count, folder, progress=False):
    """On each of four ranks: errors by model, mesh or strategy, and kind.

    Kinds are "plan", "random" and "strategy".

    A model that cannot be captured, planned or run on one device has the error's text instead.
    """
    rank = dist.get_rank()
    for name in names[rank::WORLD]:
        Path(folder, name).write_bytes(pickle.dumps(_prepared(name, count)))
    dist.barrier()
    ranks = torch.arange(WORLD).view(2, 2)
    pair = DeviceMesh("cpu", ranks, mesh_dim_names=("pair", "a"))["a"]
    device_meshes = {"a=2": pair, "a=2 b=2": DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b"))}
    found = {}
    for name in names:
        prepared = pickle.loads(Path(folder, name).read_bytes())
        if not isinstance(prepared, str):
            try:
                searched, shared = prepared
                prepared = {
                    **_checked(*searched, device_meshes, rank // 2),
                    **_under_strategies(*shared, device_meshes),
                }
            except Exception as e:  # the other ranks wait for this one: nothing can go on
                raise RuntimeError(f"{name}: {type(e).__name__}: {e}") from e
        found[name] = prepared
        if progress and rank == 0:
            print(f"{name} ran on {WORLD} ranks", flush=True)
    return found


def merged(by_rank):
    """What `verify` found on all ranks: the worst of it."""
    first = dict(by_rank[0])
    for other in by_rank[1:]:
        for name, errors in other.items():
            if isinstance(errors, str):
                continue
            first[name] = {
                key: max(first[name][key], error, key=lambda e: e.size)
                for key, error in errors.items()
            }
    return first


def _prepared(name, count):
    """Twice a subject, what it gives on one device, and what to run; or what went wrong.

    First with assignments, then with strategies, for which the batch is one that ranks can share.
    """
    try:
        model, batch = ZOO[name]()
        even = Subject(model, uniform.shared(batch))
        strategies = even, even.run(even.one_device()), uniform.chosen(even)
        one = Subject(*ZOO[name]())
        assignments = [
            assignment
            for text in MESHES
            for assignment in (
                chosen_plan(one, Mesh.parse(text)),
                *random_assignments(one, Mesh.parse(text), count, f"{name} {text}"),
            )
        ]
        return (one, one.run(one.one_device()), assignments), strategies
    except Exception as e:
        return f"{type(e).__name__}: {e}"


def _checked(one, serial, assignments, device_meshes, pair):
    """Errors by mesh and kind; this rank's share of them."""
    found = {(text, kind): Error(0.0, "") for text in MESHES for kind in ("plan", "random")}
    for number, assignment in enumerate(assignments):
        text = str(assignment.mesh)
        if assignment.mesh.size < WORLD and number % 2 != pair:
            continue
        module = one.module(
            assignment.mesh, assignment.chosen, assignment.storage, device_meshes[text]
        )
        _check_programs(module, assignment.mesh, device_meshes[text])
        kind = "plan" if assignment.name == "plan" else "random"
        step = descend if kind == "plan" else descend_locally
        size, key = worst(serial, one.run(module, step))
        error = Error(size, f"{key}, {assignment}")
        found[text, kind] = max(found[text, kind], error, key=lambda e: e.size)
    return found


def _under_strategies(one, serial, strategies, device_meshes):
    """Errors by strategy; all four ranks run each."""
    found = {}
    for chosen in strategies:
        mesh = chosen.decisions.mesh
        text = str(mesh)
        if text not in device_meshes:
            names, shape = zip(*mesh.axes, strict=True)
            ranks = torch.arange(WORLD).view(shape)
            device_meshes[text] = DeviceMesh("cpu", ranks, mesh_dim_names=names)
        module = one.decided(chosen.decisions, device_meshes[text])
        _check_programs(module, mesh, device_meshes[text])
        size, key = worst(serial, one.run(module, descend_locally))
        where = f"{key}, {chosen.strategy}"
        found[chosen.strategy, "strategy"] = Error(size, where, chosen.split)
    return found


def _check_programs(module, mesh, device_mesh):
    """Raise `VerifyError` where the step programs of all ranks do not fit together."""
    programs = [None] * mesh.size
    group = device_mesh.get_group() if device_mesh.ndim == 1 else None  # else all ranks
    dist.all_gather_object(programs, module._sw_program.program, group=group)
    if programs[0].rank == module._sw_program.program.rank:  # one rank checks for all
        check_order(programs)


def chosen_plan(one, mesh):
    """The fastest plan on devices as much slower as reduced models have less to compute.

    On devices as they are, nothing is worth splitting in models this small, nor where hosts need
    time to issue kernels.
    """
    machine = preset(f"{mesh.size}xH100")
    peaks = tuple((dtype, peak / _REDUCED) for dtype, peak in machine.device.flop_per_s)
    none = Seconds(0.0)
    machine = replace(
        machine,
        device=replace(
            machine.device,
            memory_bytes=Bytes(2**50),
            flop_per_s=peaks,
            launch_seconds=none,
            issue_seconds=none,
        ),
        levels=tuple(replace(level, latency_seconds=none) for level in machine.levels),
        collective_launch_seconds=none,
    )
    plan = search(one.narrow, machine, PlanOptions.of(meshes=[mesh])).fastest()
    decisions = read_plan(plan, one.narrow, one.analysis)
    chosen = decisions.tilings
    if all(choice is None for tiling in chosen.values() for choice in tiling):
        raise AssertionError(f"the plan on {mesh} splits nothing, so it shows nothing")
    return Assignment("plan", mesh, chosen, decisions.storage)


def random_assignments(one, mesh, count, seed):
    """Every operator draws one of its tilings and every parameter one of its layouts."""
    draw = random.Random(seed)
    options = {
        op.name: [tiling for tiling, _ in tilings(one.analysis.rules[op.name], mesh)]
        for op in one.graph.ops
    }
    layouts = {
        leaf.name: _storage(one.analysis.atoms[leaf.name], mesh)
        for leaf in one.graph.leaves_of(LeafKind.PARAMETER)
    }
    for number in range(count):
        chosen = {key: draw.choice(found) for key, found in options.items()}
        storage = {key: draw.choice(found) for key, found in layouts.items()}
        yield Assignment(f"random tiling {number}", mesh, chosen, storage)


def _storage(atoms, mesh):
    """Every layout in which a parameter may be stored."""
    return [decode(code, atoms, mesh) for code in storable(atoms, mesh).tolist()]
