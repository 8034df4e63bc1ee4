"""Law 6: any assignment of tilings, however silly, gives what one device gives.

Every operator draws one of its tilings, every parameter one of its storage layouts, and whether
copies of it are gathered again in the backward pass; some operators are recomputed together. Loss,
every gradient and every updated buffer are compared in float64: the captured graph is widened,
because a Hugging Face loss casts its logits to float32 whatever the model's precision.
"""

import functools
import random
from dataclasses import replace

import pytest
from torch.distributed.device_mesh import init_device_mesh

from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import Layout, Mesh
from shardwright.planner.tables.layout_codes import decode, storable
from shardwright.program.decisions import Decisions
from shardwright.rules.analysis import analyze
from shardwright.rules.placements import tiling_text, tilings
from shardwright.runtime.module_options import ModuleOptions
from shardwright.runtime.parallel_module import ParallelModule
from shardwright.runtime.verify.verify import to_float64
from shardwright.tracing.capture import capture_call
from tests.harness import models
from tests.harness.ranks import run_ranks, whole
from tests.harness.rotation import rotating

ASSIGNMENTS = {"gpt2": 12, "llama": 12, "cnn": 12}  # of others 6
TOLERANCE = 1e-9
MESHES = {2: ["a=2"], 3: ["a=3"], 4: ["a=4", "a=2 b=2"]}
EXAMPLES = {
    **models.EXAMPLES,
    "batch norm": lambda: models.cnn(norm=True),
    "traps": models.traps,
}
RUNS = [(name, world) for name in models.EXAMPLES for world in MESHES]
RUNS += [("batch norm", 2), ("traps", 4)]
CASES = [
    pytest.param(name, world, marks=pytest.mark.hf if name in ("gpt2", "llama") else ())
    for name, world in rotating(RUNS, 3, kinds=lambda run: run)  # all models, all worlds
]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name, world", CASES)
def test_any_assignment_of_tilings_equals_one_device(name, world):
    run_ranks(world, _compare_assignments, name, MESHES[world], *_subject(name))


@functools.cache
def _subject(name):
    one = Widened(*models.double(*EXAMPLES[name]()))
    return one, one.run(one.one_device())


def _compare_assignments(name, meshes, one, serial):
    for text in meshes:
        mesh = Mesh.parse(text)
        device_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names)
        draw = random.Random(f"{name} {text}")
        options = {
            op.name: [tiling for tiling, _ in tilings(one.analysis.rules[op.name], mesh)]
            for op in one.graph.ops
        }
        layouts = {
            leaf.name: stored_as(one.analysis.atoms[leaf.name], mesh)
            for leaf in one.graph.leaves_of(LeafKind.PARAMETER)
        }
        numbers = range(ASSIGNMENTS.get(name, 6))
        run = rotating(numbers, 2)
        for number in numbers:
            chosen = {key: draw.choice(found) for key, found in options.items()}
            storage = {key: draw.choice(found) for key, found in layouts.items()}
            again = frozenset(key for key in storage if draw.random() < 0.5)
            segments = some_segments(one.graph, draw)
            if number not in run:
                continue
            parallel = one.run(one.module(mesh, chosen, storage, device_mesh, again, segments))
            assert serial.keys() == parallel.keys()
            errors = {key: error(serial[key], parallel[key]) for key in serial}
            worst = max(errors, key=errors.get)
            tiled = {key: " ".join(tiling_text(tiling)) for key, tiling in chosen.items()}
            stored = {
                key: f"{layout}{' regathered' * (key in again)}" for key, layout in storage.items()
            }
            assert errors[worst] <= TOLERANCE, (
                f"{name} on {text}, assignment {number}: {worst} is {errors[worst]:.1e} off under"
                f" {tiled}, {stored} and {segments}"
            )


class Widened:
    """A model's graph in float64, and what it takes to run it on one device or on many.

    It can be pickled, so that ranks need not capture the model again.
    """

    def __init__(self, model, batch):
        captured = capture_call(model, (), batch)
        self.graph = to_float64(captured.graph)
        self.captured = type(captured)(self.graph, captured.constants, captured.output_keys)
        self.analysis = analyze(self.graph)
        self.weights = dict(model.named_parameters(remove_duplicate=False))
        self.buffers = dict(model.named_buffers(remove_duplicate=False))
        self.batch = batch

    def one_device(self, micro_batches=1):
        mesh = Mesh.parse("a=1")
        chosen = {op.name: (None,) for op in self.graph.ops}
        storage = {leaf.name: Layout.replicated(mesh) for leaf in self.graph.leaves}
        return self.module(mesh, chosen, storage, None, micro_batches=micro_batches)

    def module(
        self,
        mesh,
        chosen,
        storage,
        device_mesh,
        regathered=frozenset(),
        segments=None,
        micro_batches=1,
        host_devices=0,
    ):
        kept = frozenset(regathered), segments or {}
        decisions = Decisions(mesh, chosen, storage, *kept, micro_batches)
        return ParallelModule(
            self.captured,
            self.analysis,
            replace(decisions, host_devices=host_devices),
            ModuleOptions(self.weights, self.buffers, seed=3),
            device_mesh,
        )

    def run(self, module):
        """Loss, gradients and updated buffers after one forward and backward."""
        loss = module(**self.batch)
        loss.backward()
        found = {"loss": loss.detach()}
        for key, parameter in module.named_parameters():
            found[f"gradient of {key}"] = whole(parameter.grad)
        for key, _ in self.graph.updates:
            found[f"buffer {key}"] = module.get_buffer(key).clone()
        return found


def stored_as(atoms, mesh):
    """Every way to store a parameter: along each axis replicated, or one of its atoms sharded."""
    return [decode(code, atoms, mesh) for code in storable(atoms, mesh).tolist()]


def some_segments(graph, draw):
    """Up to three runs of operators that are recomputed, each as a whole."""
    cuts = sorted(draw.sample(range(len(graph.ops) + 1), 6))
    spans = list(zip(cuts[::2], cuts[1::2], strict=True))[: draw.randrange(4)]
    return {op.name: i for i, span in enumerate(spans, 1) for op in graph.ops[slice(*span)]}


def error(serial, parallel):
    if serial is None or parallel is None:
        return 0.0 if serial is parallel else float("inf")
    difference = (serial.reshape(parallel.shape) - parallel).abs().max().item()
    return difference if difference == difference else float("inf")
