"""PyTorch's own composition of a strategy, and the bytes that a step of it sends.

`fully_shard`, `parallelize_module` and `torch.distributed.pipelining` train a few layers.
Collectives are counted as the dispatcher sees them: what is gathered, scattered, summed or sent in
all, by kind and mesh axis.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shardwright.ir.strategy.strategy import Strategy

LAYERS, WIDTH, INNER, SEQUENCE, BATCH = 4, 16, 32, 8, 8


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Layers(nn.Module):
    """Layers that read a fixed table, and a sum: all parameters are in layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.register_buffer("table", torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH))

    def forward(self, ids):
        x = nn.functional.embedding(ids, self.table)
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def subject():
    """The model in float64, and a batch of tokens."""
    torch.manual_seed(0)
    ids = torch.randint(4, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
    return Layers().double(), ids


# Of each operator its kind, and which argument, or the result, has all that is moved.
WHOLE = {
    "_allgather_base_": ("all_gather", 0),
    "all_gather_into_tensor": ("all_gather", None),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "allreduce_": ("all_reduce", 0),
    "all_reduce": ("all_reduce", 0),
    "send": ("send", 0),
}


class SentBytes(TorchDispatchMode):
    """Bytes of collectives by kind and axis; `axis_of` has the axes of groups, by name.

    DTensor may use the groups of an equal mesh that was made before, so those are known, too.
    """

    def __init__(self, axis_of):
        super().__init__()
        self.axis_of, self.sent = axis_of, Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        space, _, name = function._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional") and name in WHOLE:
            kind, at = WHOLE[name]
            moved = result if at is None else args[at]
            tensors = moved if isinstance(moved, list | tuple) else [moved]
            axes = [self.axis_of[g] for g in map(_group, args) if g in self.axis_of]
            size = sum(x.numel() * x.element_size() for x in tensors)
            self.sent[kind, axes[0]] += size
        return result


_AXIS_OF = {}


def _group(argument):
    if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
        return dist.ProcessGroup.unbox(argument).group_name
    return argument if isinstance(argument, str) else None


def trained(text):
    """Bytes by kind and axis, and gradients by parameter, of one step of a strategy."""
    strategy = Strategy.parse(text)
    model, ids = subject()
    names = tuple(name for name, _ in strategy.axes)
    mesh = init_device_mesh("cpu", tuple(n for _, n in strategy.axes), mesh_dim_names=names)
    _AXIS_OF.update((mesh.get_group(name).group_name, name) for name in names)
    counted = SentBytes(_AXIS_OF)
    layers = list(model.layers)
    if strategy.pp > 1:
        each = LAYERS // strategy.pp
        stage = mesh["pp"].get_local_rank()
        layers = layers[each * stage : each * (stage + 1)]
    _wrap(layers, mesh, strategy)
    if strategy.recompute.kind == "full":
        for layer in layers:
            layer.forward = _checkpointed(layer.forward)
    own = _own(ids, mesh, strategy)
    if strategy.pp > 1:
        _pipeline(model, layers, own, mesh, strategy, counted)
    else:
        _step(model, layers, own, strategy, counted)
    gradients = {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad)
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return dict(counted.sent), gradients


def _checkpointed(forward):
    return lambda x: checkpoint(forward, x, use_reentrant=False)


def _own(ids, mesh, strategy):
    """This rank's part of the batch."""
    number = 0
    for name in ("dp_replicate", "dp_shard"):
        if name in mesh.mesh_dim_names:
            number = number * mesh[name].size() + mesh[name].get_local_rank()
    return ids.chunk(strategy.dp_replicate * strategy.dp_shard)[number]


def _wrap(layers, mesh, strategy):
    """Layers under tensor parallelism, then sharded data parallelism, as torchtitan does it."""
    names = mesh.mesh_dim_names
    if "tp" in names:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if strategy.sequence_parallel:
            plan = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            }
        for layer in layers:
            parallelize_module(layer, mesh["tp"], plan)
    data = tuple(name for name in ("dp_replicate", "dp_shard") if name in names)
    if data:
        for layer in layers:
            fully_shard(layer, mesh=mesh[data], reshard_after_forward=strategy.reshards)
            layer.set_gradient_divide_factor(1.0)


def _step(model, layers, own, strategy, counted):
    count, kept = strategy.micro_batches, strategy.zero in (1, 2)
    sharded = strategy.dp_shard > 1
    sequence = strategy.tp > 1 and strategy.sequence_parallel
    table, parts = model.table, own.chunk(count)
    for number, part in enumerate(parts):
        last = number == count - 1
        for layer in layers if sharded else ():
            layer.set_requires_gradient_sync(last or strategy.syncs_every)
            layer.set_reshard_after_backward(last or not kept)
        x = nn.functional.embedding(part, table)
        if sequence:
            mesh = layers[0].up.weight.device_mesh["tp"]
            x = DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(1)])
        with counted:
            for layer in layers:
                x = layer(x)
            loss = (x.to_local() if isinstance(x, DTensor) else x).square().sum()
            loss.backward()


def _pipeline(model, layers, own, mesh, strategy, counted):
    """1F1B; the first stage reads the table, the last one has the loss."""
    number, stages = mesh["pp"].get_local_rank(), strategy.pp
    module = nn.Sequential(*layers)
    if strategy.dp_shard > 1:  # so that the stage reduces gradients once
        fully_shard(module, mesh=mesh["dp_shard"], reshard_after_forward=False)
        module.set_gradient_divide_factor(1.0)
    x = nn.functional.embedding(own, model.table)
    stage = PipelineStage(module, number, stages, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(
        stage,
        strategy.micro_batches,
        loss_fn=lambda x, _: x.square().sum(),
        scale_grads=False,
    )
    given = (x,) if number == 0 else ()
    target = {"target": own} if number == stages - 1 else {}
    schedule.step(*given, **target)  # a stage runs its layers once more to learn their shapes
    module.zero_grad()
    with counted:
        schedule.step(*given, **target)
