"""Ways to train a network of `models` on all ranks: a function each, from network to step.

A step returns this rank's share of the loss; those of all ranks add up to that of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import shardwright as sw
from benchmarks.record import TUNE_HOST
from benchmarks.soybean.models import Classified

Batch = dict[str, Tensor]
Step = Callable[[], Tensor]

OURS = "ours"


def ours(model: Classified, batch: Batch, plan: sw.Plan) -> Step:
    """The plan that was searched for."""
    parallel = sw.parallelize(model, plan, tune_host=TUNE_HOST)
    optimizer = _sgd(parallel)
    return lambda: parallel.train_step(optimizer, batch) / dist.get_world_size()


def data_parallel(model: Classified, batch: Batch) -> Step:
    """`DistributedDataParallel`."""
    return _stepping(DistributedDataParallel(model), _part(batch), _sgd(model))


def fully_sharded(model: Classified, batch: Batch) -> Step:
    """FSDP2: `fully_shard` of each layer with parameters, then of all."""
    mesh = _mesh()
    for layer in (*model.features, *model.classifier):  # type: ignore[misc]
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _stepping(model, _part(batch), _sgd(model))


def tensor_parallel(model: Classified, batch: Batch) -> Step:
    """Megatron's: linear layers by columns, then by rows; the rest is computed by all."""
    styles: dict[str, ParallelStyle] = {
        "0": ColwiseParallel(),
        "2": RowwiseParallel(),
        "4": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model.classifier, _mesh(), styles)
    return _stepping(model, batch, _sgd(model.features, model.classifier))


def hybrid(model: Classified, batch: Batch) -> Step:
    """What an expert writes by hand: convolutions by batch under DDP, linear layers as Megatron's.

    Krizhevsky's one weird trick (arXiv 1404.5997), in torch's own parts.
    """
    styles: dict[str, ParallelStyle] = {
        "0": ColwiseParallel(input_layouts=Shard(0)),
        "2": RowwiseParallel(output_layouts=Shard(0)),
        "4": ColwiseParallel(input_layouts=Shard(0), output_layouts=Shard(0)),
    }
    parallelize_module(model.classifier, _mesh(), styles)
    features = DistributedDataParallel(model.features)
    summed = _Hybrid(features, model.classifier)
    return _stepping(summed, _part(batch), _sgd(features, model.classifier), mean=False)


class _Hybrid(nn.Module):
    """Each rank's share of the loss. DDP takes the mean of gradients of `features`, so one is sent
    there that is larger.
    """

    def __init__(self, features: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.features, self.classifier = features, classifier
        self.ranks = dist.get_world_size()

    def forward(self, inputs: Tensor, classes: Tensor) -> Tensor:
        found = self.features(inputs).flatten(1)
        found.register_hook(lambda grad: grad * self.ranks)
        loss = F.cross_entropy(self.classifier(found), classes, reduction="sum")
        return loss / (len(classes) * self.ranks)


RIVALS: dict[str, Callable[[Classified, Batch], Step]] = {
    "DistributedDataParallel": data_parallel,
    "fully_shard": fully_sharded,
    "parallelize_module": tensor_parallel,
    "hybrid by hand": hybrid,
}


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _part(batch: Batch) -> Batch:
    return {k: v.chunk(dist.get_world_size())[dist.get_rank()] for k, v in batch.items()}


def _stepping(
    model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer, *, mean: bool = True
) -> Step:
    """Steps of a model whose loss is a mean over ranks, or a sum."""
    ranks = dist.get_world_size() if mean else 1

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss: Tensor = model(**batch)
        loss.backward()
        optimizer.step()
        return loss.detach() / ranks

    return step


def _sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": list(module.parameters())} for module in modules]
    return torch.optim.SGD(groups, lr=1e-3, momentum=0.9, foreach=True)
