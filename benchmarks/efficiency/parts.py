"""Steps in four micro-batches by hand: FSDP2 with accumulation, and pipelines of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.efficiency.strategies import (
    MLP,
    Batch,
    Llama,
    fully_sharded,
    optimizer_of,
    rank_part,
)

COUNT = 4  # micro-batches
Step = Callable[[], Tensor]
# The text of the strategy of ours, by the name of what is written by hand.
STRATEGIES: Mapping[str, str] = {
    "fully sharded, accumulated": f"dp_shard=2 mb={COUNT}",
    "1F1B": f"pp=2 mb={COUNT} cut={{cut}}",
}
# Repeated layers of each stage, such that both have the same stages. In an MLP a ReLU and the
# linear layer after it repeat; the first linear layer comes before.
CUTS = {"mlp": "2,3", "llama": "2,2"}


def text_of(strategy: str, model: str) -> str:
    """The text of a strategy for a model."""
    return STRATEGIES[strategy].format(cut=CUTS[model])


def accumulated(model: nn.Module, batch: Batch) -> Step:
    """FSDP2, whose gradients are reduced after every micro-batch and kept sharded."""
    wrapped = fully_sharded(model)
    parts = [rank_part(one) for one in _micro_batches(batch)]
    optimizer = optimizer_of(wrapped)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        losses = []
        for part in parts:
            loss = wrapped(**part) / COUNT
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        return torch.stack(losses).sum()

    return step


class MLPStage(nn.Module):
    """Half of the layers of an MLP; the second half begins with a ReLU."""

    def __init__(self, model: MLP, rank: int) -> None:
        super().__init__()
        self.rank, half = rank, len(model.layers) // 2
        self.layers = model.layers[rank * half : (rank + 1) * half]

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(torch.relu(x) if number or self.rank else x)
        return torch.relu(x) if self.rank else x


class LlamaStage(nn.Module):
    """Half of the layers of a Llama, with the table of words or the head."""

    def __init__(self, model: Llama, rank: int) -> None:
        super().__init__()
        inner: Any = model.network.model
        half = len(inner.layers) // 2
        self.layers = inner.layers[rank * half : (rank + 1) * half]
        self.embed = inner.embed_tokens if rank == 0 else None
        self.norm = inner.norm if rank else None
        self.head = model.network.lm_head if rank else None
        self.rotary = inner.rotary_emb

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        turned = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, position_ids=positions, position_embeddings=turned)
        if self.norm is None or self.head is None:
            return x
        logits: Tensor = self.head(self.norm(x))
        return logits


def next_token(logits: Tensor, ids: Tensor) -> Tensor:
    """The loss of a language model."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def pipelined(model: nn.Module, batch: Batch) -> Step:
    """A stage on each of two ranks, by `torch.distributed.pipelining`."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stage: nn.Module
    if isinstance(model, Llama):
        stage, given, target = LlamaStage(model, rank), batch["inputs"], batch["inputs"]
        loss: Callable[[Tensor, Tensor], Tensor] = next_token
    elif isinstance(model, MLP):
        stage, given, target = MLPStage(model, rank), batch["inputs"], batch["targets"]
        loss = nn.functional.mse_loss
    else:
        raise ValueError(f"no stages of {type(model).__name__}")
    runs = PipelineStage(stage, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(runs, COUNT, loss_fn=loss)
    optimizer = optimizer_of(stage)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(given, return_outputs=False)
        else:
            schedule.step(target=target, losses=losses, return_outputs=False)
        optimizer.step()
        # The mean over ranks is the loss, which only the last one has.
        return torch.stack(losses).mean().detach() * ranks if losses else torch.zeros(())

    return step


BY_HAND: Mapping[str, Callable[[nn.Module, Batch], Step]] = {
    "fully sharded, accumulated": accumulated,
    "1F1B": pipelined,
}


def _micro_batches(batch: Batch) -> Iterator[Batch]:
    for number in range(COUNT):
        yield {key: value.chunk(COUNT)[number] for key, value in batch.items()}
