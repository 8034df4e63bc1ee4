"""Models whose steps take tens of milliseconds to a second on two cores: of every kind."""

from __future__ import annotations

from collections.abc import Callable
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
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

Subject = tuple[nn.Module, dict[str, Any]]


class Classified(nn.Module):
    """A network with its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.network(x), labels)


class Recurrent(nn.Module):
    """An LSTM over tokens that predicts the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1024, 384)
        self.lstm = nn.LSTM(384, 384, num_layers=2, batch_first=True)
        self.head = nn.Linear(384, 1024)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.embed(ids))
        return nn.functional.cross_entropy(self.head(states).flatten(0, 1), labels.flatten())


def gpt2(batch: int = 4) -> Subject:
    """GPT-2, 6 layers of 384, without dropout."""
    config = GPT2Config(
        vocab_size=4096, n_positions=256, n_layer=6, n_embd=384, n_head=6, bos_token_id=0,
        eos_token_id=0, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config), _tokens(4096, batch, 256)


def llama(batch: int = 2) -> Subject:
    """Llama, 4 layers of 512, grouped queries."""
    config = LlamaConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=1376, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=256,
    )  # fmt: skip
    return LlamaForCausalLM(config), {**_tokens(4096, batch, 256), "use_cache": False}


def bert(batch: int = 8) -> Subject:
    """BERT, 6 layers of 256, without dropout."""
    config = BertConfig(
        vocab_size=4096, hidden_size=256, num_hidden_layers=6, num_attention_heads=4,
        intermediate_size=1024, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config), _tokens(4096, batch, 128)


def t5(batch: int = 8) -> Subject:
    """T5, 3 and 3 layers of 256, without dropout."""
    config = T5Config(
        vocab_size=4096, d_model=256, d_kv=64, d_ff=1024, num_layers=3, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config), {**_tokens(4096, batch, 128), "use_cache": False}


def vit(batch: int = 16) -> Subject:
    """ViT, 6 layers of 384, on images of 64 x 64."""
    config = ViTConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536,
        image_size=64, patch_size=8, num_labels=10,
    )  # fmt: skip
    images, labels = torch.randn(batch, 3, 64, 64), torch.randint(10, (batch,))
    return ViTForImageClassification(config), {"pixel_values": images, "labels": labels}


def vgg(batch: int = 64) -> Subject:
    """Three blocks of convolutions, two wide linear layers."""
    layers: list[nn.Module] = []
    for inside, outside in ((3, 64), (64, 128), (128, 256)):
        layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(256 * 16, 2048), nn.ReLU(), nn.Linear(2048, 10)]
    return Classified(nn.Sequential(*layers)), _images(batch)


def resnet(batch: int = 64) -> Subject:
    """ResNet-20 for CIFAR-10."""
    return Classified(_cnn("resnet20_cifar10")), _images(batch)


def densenet(batch: int = 16) -> Subject:
    """DenseNet-40, growth 12, for CIFAR-10."""
    return Classified(_cnn("densenet40_k12_cifar10")), _images(batch)


def lstm(batch: int = 16) -> Subject:
    """Two LSTM layers of 384."""
    tokens = _tokens(1024, batch, 64)
    return Recurrent(), {"ids": tokens["input_ids"], "labels": tokens["labels"]}


def mlp(batch: int = 256) -> Subject:
    """Four layers of 2048: more parameters than arithmetic."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(2048, 2048), nn.GELU()]
    data = {"x": torch.randn(batch, 2048), "labels": torch.randint(10, (batch,))}
    return Classified(nn.Sequential(*layers, nn.Linear(2048, 10))), data


# Each takes the number of samples of its batch, or has its own.
MODELS: dict[str, Callable[..., Subject]] = {
    one.__name__: one for one in (gpt2, llama, bert, t5, vit, vgg, resnet, densenet, lstm, mlp)
}


def _cnn(name: str) -> nn.Module:
    from pytorchcv.model_provider import get_model

    found: nn.Module = get_model(name)
    return found


def _tokens(vocabulary: int, batch: int, length: int) -> dict[str, Any]:
    ids = torch.randint(vocabulary, (batch, length))
    return {"input_ids": ids, "labels": ids}


def _images(batch: int) -> dict[str, Any]:
    return {"x": torch.randn(batch, 3, 32, 32), "labels": torch.randint(10, (batch,))}
