"""Random tilings of a zoo model on the ranks at hand, against one device, in float64.

The captured graph is widened, because a Hugging Face loss casts its logits to float32 whatever
the model's precision.
"""

import copy
import itertools
import random
import warnings
from dataclasses import replace

import torch
from torch.distributed.device_mesh import init_device_mesh

from shardwright.capture.capture import capture_call
from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import REPLICATE, Layout, Mesh, Shard, fits
from shardwright.ir.widen import widen
from shardwright.rules.analysis import analyze
from shardwright.rules.placing import tiling_text, tilings
from shardwright.runtime.parallel import ParallelModule
from tests.zoo import ZOO


def double(batch):
    """The batch with its floating-point tensors in float64."""
    return {
        key: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for key, value in batch.items()
    }


class Subject:
    """A model's graph, in float64 if `wide`, ready to run on one device or on many."""

    def __init__(self, model, batch, wide=True):
        captured = capture_call(model, (), batch)
        self.graph = widen(captured.graph) if wide else captured.graph
        self.captured = replace(captured, graph=self.graph)
        self.analysis = analyze(self.graph)
        self.model = model.double() if wide else model
        self.batch = double(batch) if wide else batch

    def one_device(self):
        mesh = Mesh.parse("a=1")
        chosen = {op.name: (None,) for op in self.graph.ops}
        storage = {leaf.name: Layout.replicated(mesh) for leaf in self.graph.leaves}
        return self.module(mesh, chosen, storage, None)

    def module(self, mesh, chosen, storage, device_mesh):
        return ParallelModule(
            self.captured,
            self.analysis,
            mesh,
            chosen,
            storage,
            weights=dict(self.model.named_parameters(remove_duplicate=False)),
            buffers=dict(self.model.named_buffers(remove_duplicate=False)),
            persistent=frozenset(),
            device_mesh=device_mesh,
            device=torch.device("cpu"),
            seed=3,
            training=self.model.training,
        )

    def run(self, module):
        """Loss, gradients, updated buffers, and parameters after a step of plain descent."""
        loss = module(**self.batch)
        loss.backward()
        found = {"loss": loss.detach()}
        for key, parameter in module.named_parameters():
            found[f"gradient of {key}"] = _whole(parameter.grad)
        for key, _ in self.graph.updates:
            found[f"buffer {key}"] = module.get_buffer(key).clone()
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        for key, parameter in module.named_parameters():
            found[f"parameter {key}"] = _whole(parameter)
        return found


def capture_error(name):
    """The graph on one device against the module itself: loss, gradients and buffers.

    In the module's own precision, and where it draws random numbers both in eval mode.
    """
    model, batch = ZOO[name]()
    if any(op.kind in ("dropout", "uniform") for op in capture_call(model, (), batch).graph.ops):
        model.eval()
    one = Subject(model, batch, wide=False)
    alone = copy.deepcopy(one.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = alone(**one.batch)
    loss = loss if torch.is_tensor(loss) else loss["loss"]
    loss.backward()
    expected = {"loss": loss.detach()}
    for key, parameter in alone.named_parameters():
        expected[f"gradient of {key}"] = parameter.grad
    for key, _ in one.graph.updates:
        expected[f"buffer {key}"] = alone.get_buffer(key)
    found = one.run(one.one_device())
    return worst(expected, {key: found[key] for key in expected})


def random_tilings(name, meshes, count):
    """Worst error, and the key it is at, over `count` assignments on each mesh."""
    one = Subject(*ZOO[name]())
    serial = one.run(one.one_device())
    errors = []
    for text in meshes:
        mesh = Mesh.parse(text)
        device_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names)
        draw = random.Random(f"{name} {text}")
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
            tiled = one.run(one.module(mesh, chosen, storage, device_mesh))
            error, key = worst(serial, tiled)
            text_of = " ".join(f"{k}={'/'.join(tiling_text(t))}" for k, t in chosen.items())
            errors.append((error, f"{key} on {mesh}, assignment {number}: {text_of}"))
    return max(errors)


def _storage(atoms, mesh):
    """Every way to store a parameter: each axis replicates it or shards one of its atoms."""
    shards = [Shard(d, a) for d, sizes in enumerate(atoms) for a in range(len(sizes))]
    ways = itertools.product([REPLICATE, *shards], repeat=len(mesh.axes))
    return [layout for way in ways if fits(atoms, layout := Layout(mesh, way))]


def worst(expected, found):
    """The largest error, relative to each tensor's largest element or to 1, and where."""
    assert expected.keys() == found.keys()
    return max((_error(expected[key], found[key]), key) for key in expected)


def _error(expected, found):
    if expected is None or found is None:
        # A parameter that nothing depends on has no gradient, or one of zeros.
        other = expected if found is None else found
        return 0.0 if other is None or not other.any() else float("inf")
    scale = max(1.0, expected.abs().max().item())
    difference = (expected.reshape(found.shape).double() - found.double()).abs().max().item()
    return difference / scale if difference == difference else float("inf")


def _whole(tensor):
    if tensor is None:
        return None
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()
