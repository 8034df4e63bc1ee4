"""The models that the search is measured on: as published for time, shallow for the optimum.

All are built on the meta device, so nothing is downloaded or allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH = 128  # two for each of 64 devices
Built = tuple[nn.Module, dict[str, Any]]


class Classifier(nn.Module):
    """A network for images with its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        """Images (B, 3, H, W) and classes (B,) to the mean cross entropy."""
        return F.cross_entropy(self.network(images), classes)


def llama(layers: int, batch: int = BATCH) -> Built:
    """Llama-3-8B's shape, sequence 2048, in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
    )  # fmt: skip
    ids = torch.zeros((batch, 2048), dtype=torch.long)
    return LlamaForCausalLM(config).to(torch.bfloat16), {"input_ids": ids, "labels": ids}


def gpt2(layers: int = 12, batch: int = BATCH) -> Built:
    """GPT-2 small, sequence 1024."""
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = torch.zeros((batch, 1024), dtype=torch.long)
    return GPT2LMHeadModel(GPT2Config(n_layer=layers)), {"input_ids": ids, "labels": ids}


def bert(layers: int = 24, batch: int = BATCH) -> Built:
    """BERT-large, sequence 512."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=4096
    )
    ids = torch.zeros((batch, 512), dtype=torch.long)
    return BertForMaskedLM(config), {"input_ids": ids, "labels": ids}


def t5(layers: int = 24, batch: int = BATCH) -> Built:
    """T5-large, an encoder and a decoder, sequences of 512."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=1024, d_ff=4096, num_layers=layers, num_heads=16, decoder_start_token_id=0
    )
    ids = torch.zeros((batch, 512), dtype=torch.long)
    return T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}


def vit(layers: int = 24, batch: int = BATCH) -> Built:
    """ViT-L/16 on images of 224."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=4096,
        num_labels=1000,
    )  # fmt: skip
    images, classes = _pictures(batch, 224)
    return ViTForImageClassification(config), {"pixel_values": images, "labels": classes}


def cnn(name: str, batch: int = BATCH) -> Built:
    """A network of pytorchcv on images of 224."""
    images, classes = _pictures(batch, 224)
    return Classifier(import_module("pytorchcv.model_provider").get_model(name)), {
        "images": images,
        "classes": classes,
    }


def unet(batch: int = BATCH) -> Built:
    """A U-Net of five stages on images of 256."""
    images, _ = _pictures(batch, 256)
    classes = torch.zeros((batch, 256, 256), dtype=torch.long)
    return _plain("UNet", [64, 128, 256, 512, 1024], 21), {"images": images, "classes": classes}


def lstm(batch: int = BATCH) -> Built:
    """A language model of two LSTM layers, 1,500 wide, sequence 35."""
    ids = torch.zeros((batch, 35), dtype=torch.long)
    return _plain("LanguageLSTM", 33278, 1500, 2), {"input_ids": ids, "labels": ids}


def _plain(name: str, *args: Any) -> nn.Module:
    """One of the plain models that coverage is measured on; its module has no types."""
    model: nn.Module = getattr(import_module("tests.zoo.plain.networks"), name)(*args)
    return model


def _pictures(batch: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(batch, 3, size, size), torch.zeros(batch, dtype=torch.long)


DEPTHS = {f"llama-8b, {n} layers": (lambda n=n: llama(n)) for n in (4, 32, 128)}
DEEP = {"llama-8b, 126 layers": lambda: llama(126, 2 * 1024)}  # for 1024 devices in stages
PUBLISHED: dict[str, Callable[[], Built]] = {
    "bert-large": bert,
    "t5-large": t5,
    "vit-large": vit,
    "resnet50": lambda: cnn("resnet50"),
    "densenet121": lambda: cnn("densenet121"),
    "vgg16": lambda: cnn("vgg16"),
    "u-net": unet,
    "lstm": lstm,
}
SHALLOW: dict[str, Callable[[], Built]] = {  # for eight devices, and for a program of integers
    "gpt2, 1 layer": lambda: gpt2(1, 16),
    "llama-8b, 1 layer": lambda: llama(1, 16),
    "bert-large, 1 layer": lambda: bert(1, 16),
    "alexnet": lambda: cnn("alexnet", 128),
    "lstm": lambda: lstm(64),
}
