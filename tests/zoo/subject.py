"""A model of the zoo as what runs on ranks: its graph, weights and batch.

The captured graph is widened to float64, because a Hugging Face loss casts its logits to float32
whatever the model's precision.
"""

import copy
import warnings
from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

from shardwright.ir.layout import Layout, Mesh
from shardwright.program.decisions import Decisions
from shardwright.rules.analysis import analyze
from shardwright.runtime.module_options import ModuleOptions
from shardwright.runtime.parallel_module import ParallelModule
from shardwright.runtime.verify.verify import to_float64
from shardwright.tracing.capture import capture_call
from shardwright.tracing.discovery.discover import with_rules
from shardwright.tracing.gradients.autograd_functions import calls_runnable
from tests.zoo import ZOO


class Subject:
    """A model's graph, in float64 if `wide`, ready to run on one device or on many.

    It can be pickled, and holds no module.
    """

    def __init__(self, model, batch, wide=True):
        captured = capture_call(model, (), batch)
        with calls_runnable(captured.opaque):
            self.narrow = with_rules(captured.graph)
        self.graph = to_float64(self.narrow) if wide else self.narrow
        constants = _double(captured.constants) if wide else captured.constants
        self.captured = replace(captured, graph=self.graph, constants=constants)
        self.analysis = analyze(self.graph)
        model = model.double() if wide else model
        self.weights = dict(model.named_parameters(remove_duplicate=False))
        self.buffers = dict(model.named_buffers(remove_duplicate=False))
        self.training = model.training
        self.batch = _double(batch) if wide else batch

    def one_device(self):
        mesh = Mesh.parse("a=1")
        chosen = {op.name: (None,) for op in self.graph.ops}
        storage = {leaf.name: Layout.replicated(mesh) for leaf in self.graph.leaves}
        return self.module(mesh, chosen, storage, None)

    def module(self, mesh, chosen, storage, device_mesh):
        return self.decided(Decisions(mesh, chosen, storage), device_mesh)

    def decided(self, decisions, device_mesh):
        return ParallelModule(
            self.captured,
            self.analysis,
            decisions,
            ModuleOptions(self.weights, self.buffers, seed=3, training=self.training),
            device_mesh,
        )

    def run(self, module, step=None):
        """Loss, gradients, updated buffers, and parameters after a step of plain descent.

        `step` takes that step, with `torch.optim.SGD` if not given.
        """
        loss = module(**self.batch)
        loss.backward()
        parameters = dict(module.named_parameters())
        found = {"loss": loss.detach()}
        for key, parameter in parameters.items():
            found[f"gradient of {key}"] = (
                None if parameter.grad is None else parameter.grad.detach()
            )
        for key, _ in self.graph.updates:
            found[f"buffer {key}"] = module.get_buffer(key).clone()
        (step or descend)(parameters.values())
        for key, parameter in parameters.items():
            found[f"parameter {key}"] = parameter.detach()
        return found


def descend(parameters):
    torch.optim.SGD(parameters, lr=0.1).step()


def descend_locally(parameters):
    """The same on the tiles of DTensors: spares torch's search for how to run each operator."""
    tiles = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        assert parameter.grad.placements == parameter.placements
        tile = parameter.detach().to_local()
        tile.grad = parameter.grad.to_local()
        tiles.append(tile)
    descend(tiles)


def capture_error(name):
    """The graph on one device against the module itself: loss, gradients and buffers.

    In the module's own precision, and where it draws random numbers both in eval mode.
    """
    model, batch = ZOO[name]()
    if any(op.kind in ("dropout", "uniform") for op in capture_call(model, (), batch).graph.ops):
        model.eval()
    alone = copy.deepcopy(model)
    one = Subject(model, batch, wide=False)
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


def worst(expected, found):
    """The largest error and where: relative to each tensor's largest element, if above 1e-4.

    Of a DTensor, this rank's tile is compared.
    """
    assert expected.keys() == found.keys()
    return max((_error(expected[key], found[key]), key) for key in expected)


def _error(expected, found):
    if expected is None or found is None:
        # A parameter that nothing depends on has no gradient, or one of zeros.
        other = expected if found is None else _local(found)
        return 0.0 if other is None or not other.any() else float("inf")
    scale = max(1e-4, expected.abs().max().item())
    expected = expected.reshape(found.shape)
    if isinstance(found, DTensor):
        expected = _tile(expected, found)
    difference = (expected.double() - _local(found).double()).abs().max().item()
    return difference / scale if difference == difference else float("inf")


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _tile(whole, like):
    """The part of a whole tensor that this rank's tile of `like` should be."""
    mesh = like.device_mesh
    for placement, at, ways in zip(like.placements, mesh.get_coordinate(), mesh.shape, strict=True):
        if not placement.is_replicate():
            assert placement.is_shard(), f"{placement} is no result"
            whole = whole.chunk(ways, placement.dim)[at]
    return whole


def _double(batch):
    """The batch with its floating-point tensors in float64."""
    return {
        key: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for key, value in batch.items()
    }
