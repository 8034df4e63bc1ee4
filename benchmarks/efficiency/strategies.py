"""The same strategy twice: a plan of ours, and what one writes by hand with torch's own parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

Batch = dict[str, Tensor]
VOCABULARY = 2048


class MLP(nn.Module):
    """Linear layers with ReLUs, and the loss."""

    def __init__(self, width: int = 1024, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = torch.relu(layer(inputs))
        return nn.functional.mse_loss(inputs, targets)


class Llama(nn.Module):
    """A small Llama that returns its loss."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=384, intermediate_size=1024,
            num_hidden_layers=layers, num_attention_heads=6, num_key_value_heads=6,
            max_position_embeddings=128,
        )  # fmt: skip
        self.network = LlamaForCausalLM(config)

    def forward(self, inputs: Tensor) -> Tensor:
        loss: Tensor = self.network(input_ids=inputs, labels=inputs).loss
        return loss


class VGG(nn.Module):
    """Convolutions and two linear layers, with the loss."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inside, outside in ((3, 32), (32, 64), (64, 128)):
            layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 16))

    def forward(self, inputs: Tensor, classes: Tensor) -> Tensor:
        scores = self.head(self.layers(inputs).flatten(1))
        return nn.functional.cross_entropy(scores, classes)


def mlp() -> tuple[nn.Module, Batch]:
    """Six layers of 1024."""
    return MLP(), {"inputs": torch.randn(256, 1024), "targets": torch.randn(256, 1024)}


def llama() -> tuple[nn.Module, Batch]:
    """Four layers of 384."""
    return Llama(), {"inputs": torch.randint(VOCABULARY, (8, 128))}


def vgg(batch: int = 32) -> tuple[nn.Module, Batch]:
    """Three convolutions; a step is so short that what does not depend on its size shows."""
    images = torch.randn(batch, 3, 32, 32)
    return VGG(), {"inputs": images, "classes": torch.randint(16, (batch,))}


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "mlp": mlp,
    "llama": llama,
    "vgg": vgg,
    "vgg-128": partial(vgg, 128),
}


def data_parallel(model: nn.Module) -> nn.Module:
    """DDP."""
    return DistributedDataParallel(model)


def fully_sharded(model: nn.Module) -> nn.Module:
    """FSDP2: each layer, then what is left."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = [*model.network.model.layers] if isinstance(model, Llama) else _parametrized(model)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(model: nn.Module) -> nn.Module:
    """Megatron's: by columns, then by rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    styles: dict[str, ParallelStyle] = {}
    if isinstance(model, Llama):
        layer = "network.model.layers.*."
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            styles[layer + name] = ColwiseParallel()
        styles[layer + "self_attn.o_proj"] = RowwiseParallel()
        styles[layer + "mlp.gate_proj"] = styles[layer + "mlp.up_proj"] = ColwiseParallel()
        styles[layer + "mlp.down_proj"] = RowwiseParallel()
        styles["network.lm_head"] = ColwiseParallel(output_layouts=Replicate())
    elif isinstance(model, MLP):
        for number in range(0, len(model.layers), 2):
            styles[f"layers.{number}"] = ColwiseParallel()
            styles[f"layers.{number + 1}"] = RowwiseParallel()
    else:
        raise ValueError(f"no styles for {type(model).__name__}")
    return parallelize_module(model, mesh, styles)


# By the name of the baseline of ours. Whether a rank gets a part of the batch, or all of it.
BY_HAND: Mapping[str, tuple[Callable[[nn.Module], nn.Module], bool]] = {
    "data parallel": (data_parallel, True),
    "fully sharded": (fully_sharded, True),
    "tensor parallel": (tensor_parallel, False),
}


def _parametrized(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]


def step_by_hand(
    name: str, model: nn.Module, batch: Batch, *, compiled: bool = False
) -> Callable[[], Tensor]:
    """A step of the strategy `name`; returns this rank's loss."""
    wrap, cut = BY_HAND[name]
    if compiled and isinstance(model, Llama) and name == "fully sharded":
        for layer in model.network.model.layers:  # its hooks stay outside, as torch advises
            layer.compile()
    wrapped = wrap(model)
    if compiled and name != "fully sharded":
        wrapped.compile()
    given = rank_part(batch) if cut else batch
    optimizer = optimizer_of(wrapped)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss: Tensor = wrapped(**given)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def rank_part(batch: Batch) -> Batch:
    """This rank's part of a batch."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    return {key: value.chunk(ranks)[rank] for key, value in batch.items()}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all parameters of `model`."""
    # Parameters that are DTensors and those that are not cannot be updated by one kernel.
    kinds: dict[type, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        kinds.setdefault(type(parameter.data), []).append(parameter)
    groups = [{"params": group} for group in kinds.values()]
    return torch.optim.SGD(groups, lr=1e-3, momentum=0.9, foreach=True)
