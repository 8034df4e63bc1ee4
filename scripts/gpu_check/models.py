"""The models of the checks: one of each kind, small for exactness and large for predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

Batch = dict[str, torch.Tensor]
Subject = tuple[nn.Module, Batch]
Step = Callable[[], object]
Found = Iterator[tuple[str, Any, str]]  # what, its figures, and what is wrong with them or ""


class Loss(nn.Module):
    """The cross entropy of a Hugging Face model, in its own dtype: their own loss is in float32.

    Of a language model it is that of the next token.
    """

    def __init__(self, model: nn.Module, shift: bool = False) -> None:
        super().__init__()
        self.model, self.shift = model, shift

    def forward(self, labels: torch.Tensor, **batch: torch.Tensor) -> torch.Tensor:
        logits = self.model(**batch).logits
        if self.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())

    def eager_experts(self) -> None:
        """Compute experts one by one from now on: grouped products have no float64."""
        if isinstance(self.model, MixtralForCausalLM):
            self.model.set_experts_implementation("eager")


class Convolutions(nn.Module):
    """Convolutions with batch norm, a pool and a linear classifier."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)


def _tokens(vocabulary: int, rows: int, length: int) -> Batch:
    ids = torch.randint(vocabulary, (rows, length))
    return {"input_ids": ids, "labels": ids.clone()}


def _gpt2(layers: int, width: int, vocabulary: int, rows: int, length: int) -> Subject:
    config = GPT2Config(
        vocab_size=vocabulary, n_positions=length, n_layer=layers, n_embd=width,
        n_head=max(1, width // 64), attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return Loss(GPT2LMHeadModel(config), shift=True), _tokens(vocabulary, rows, length)


def gpt2_with_dropout() -> Subject:
    """GPT-2 of 124M parameters as published, with dropout of a tenth everywhere."""
    config = GPT2Config(bos_token_id=0, eos_token_id=0, use_cache=False)
    return Loss(GPT2LMHeadModel(config), shift=True), _tokens(config.vocab_size, 8, 1024)


def _llama(
    layers: int, width: int, inner: int, heads: int, vocabulary: int, rows: int, length: int
) -> Subject:
    config = LlamaConfig(
        vocab_size=vocabulary, max_position_embeddings=length, num_hidden_layers=layers,
        hidden_size=width, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4), use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    return Loss(LlamaForCausalLM(config), shift=True), _tokens(vocabulary, rows, length)


def _mixtral(
    layers: int, width: int, inner: int, vocabulary: int, rows: int, length: int
) -> Subject:
    heads = max(1, width // 64)
    config = MixtralConfig(
        vocab_size=vocabulary, max_position_embeddings=length, num_hidden_layers=layers,
        hidden_size=width, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=heads, num_local_experts=8, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    return Loss(MixtralForCausalLM(config), shift=True), _tokens(vocabulary, rows, length)


def _bert(layers: int, width: int, vocabulary: int, rows: int, length: int) -> Subject:
    config = BertConfig(
        vocab_size=vocabulary, max_position_embeddings=length, num_hidden_layers=layers,
        hidden_size=width, intermediate_size=4 * width, num_attention_heads=width // 64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return Loss(BertForMaskedLM(config)), _tokens(vocabulary, rows, length)


def _vit(layers: int, width: int, image: int, rows: int) -> Subject:
    config = ViTConfig(
        image_size=image, patch_size=16, num_hidden_layers=layers, hidden_size=width,
        intermediate_size=4 * width, num_attention_heads=width // 64, num_labels=1000,
    )  # fmt: skip
    pixels = torch.randn(rows, 3, image, image)
    batch = {"pixel_values": pixels, "labels": torch.randint(1000, (rows,))}
    return Loss(ViTForImageClassification(config)), batch


def _convolutions(width: int, blocks: int, image: int, rows: int) -> Subject:
    batch = {"images": torch.randn(rows, 3, image, image), "labels": torch.randint(10, (rows,))}
    return Convolutions(width, blocks), batch


SMALL: dict[str, Callable[[], Subject]] = {
    "GPT-2": lambda: _gpt2(3, 64, 128, 8, 32),
    "Llama": lambda: _llama(4, 64, 128, 4, 128, 8, 32),
    "Mixtral": lambda: _mixtral(2, 128, 64, 128, 8, 32),
    "BERT": lambda: _bert(2, 128, 128, 8, 32),
    "ViT": lambda: _vit(2, 128, 64, 8),
    "convolutions": lambda: _convolutions(16, 3, 16, 8),
}
LARGE: dict[str, Callable[[], Subject]] = {
    "GPT-2 124M, 16x1024": lambda: _gpt2(12, 768, 50304, 16, 1024),
    "Llama 1.1B, 4x2048": lambda: _llama(16, 2048, 8192, 32, 32000, 4, 2048),
    "Mixtral 8x0.2B, 4x1024": lambda: _mixtral(6, 1024, 3584, 32000, 4, 1024),
    "BERT-large, 32x512": lambda: _bert(24, 1024, 30528, 32, 512),
    "ViT-large, 64x224": lambda: _vit(24, 1024, 224, 64),
    "convolutions 256x16, 64x56": lambda: _convolutions(256, 16, 56, 64),
}

LONG: dict[str, Callable[[], Subject]] = {  # whose activations are most of its memory
    "Llama 1.1B, 24x2048": lambda: _llama(16, 2048, 8192, 32, 32000, 24, 2048),
}


def made(name: str, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Subject:
    """The model on a device in a dtype, with seeded weights, and its batch."""
    torch.manual_seed(seed)
    with device:  # large ones are drawn there in a moment
        model, batch = {**SMALL, **LARGE, **LONG}[name]()
    model = model.to(device, dtype)
    moved = {key: _to(value, device, dtype) for key, value in batch.items()}
    return model, moved


def eager_step(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> Step:
    """A training step of the module itself, as its users write it."""

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss: torch.Tensor = model(**batch)
        loss.backward()
        optimizer.step()
        return loss

    return step


def _to(value: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)
