"""Sizes of the models that torchtitan calls by flavor, with the parameters that they have."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from shardwright.frameworks.config import ModelHints
from shardwright.frameworks.documents.document import Document
from shardwright.frameworks.errors import FrameworkError
from shardwright.frameworks.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Flavor:
    """One model of a registry.

    Attributes:
        model: its shape.
        head_dim: features of an attention head.
        tied: whether embedding and output share their weights.
        dense_layers: layers of a mixture that have a dense feed-forward of `model.ffn` instead.
        shared_experts: experts that every token passes.
    """

    model: ModelHints
    head_dim: int
    tied: bool = False
    dense_layers: int = 0
    shared_experts: int = 0


def _dense(name: str, shape: str, head_dim: int, vocabulary: int, tied: bool = False) -> Flavor:
    """A dense decoder; the shape is hidden, layers, heads, key-value heads, ffn."""
    hidden, layers, heads, key_value, ffn = map(int, shape.split())
    sizes = ModelHints(
        name=name,
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        key_value_heads=key_value,
        vocabulary=vocabulary,
    )
    return Flavor(model=sizes, head_dim=head_dim, tied=tied)


def _experts(name: str, shape: str, head_dim: int, vocabulary: int, dense: str) -> Flavor:
    """A mixture; the shape is hidden, layers, heads, key-value heads, experts, top k, expert ffn.

    `dense` is the number of dense layers, their ffn, and the number of shared experts.
    """
    hidden, layers, heads, key_value, experts, top, expert_ffn = map(int, shape.split())
    dense_layers, ffn, shared = map(int, dense.split())
    sizes = ModelHints(
        name=name,
        layers=layers,
        hidden=hidden,
        ffn=ffn or None,
        heads=heads,
        key_value_heads=key_value,
        vocabulary=vocabulary,
        experts=experts,
        experts_per_token=top,
        expert_ffn=expert_ffn,
    )
    return Flavor(model=sizes, head_dim=head_dim, dense_layers=dense_layers, shared_experts=shared)


_LLAMA, _QWEN = 128256, 151936
FLAVORS = {
    one.model.name: one
    for one in (
        _dense("llama3 1B", "2048 16 32 8 8192", 64, _LLAMA, tied=True),
        _dense("llama3 3B", "3072 28 24 8 8192", 128, _LLAMA, tied=True),
        _dense("llama3 8B", "4096 32 32 8 14336", 128, _LLAMA),
        _dense("llama3 70B", "8192 80 64 8 28672", 128, _LLAMA),
        _dense("llama3 405B", "16384 126 128 8 53248", 128, _LLAMA),
        _dense("qwen3 0.6B", "1024 28 16 8 3072", 128, _QWEN, tied=True),
        _dense("qwen3 1.7B", "2048 28 16 8 6144", 128, _QWEN, tied=True),
        _dense("qwen3 4B", "2560 36 32 8 9728", 128, _QWEN, tied=True),
        _dense("qwen3 8B", "4096 36 32 8 12288", 128, _QWEN),
        _dense("qwen3 14B", "5120 40 40 8 17408", 128, _QWEN),
        _dense("qwen3 32B", "5120 64 64 8 25600", 128, _QWEN),
        _experts("qwen3 30B-A3B", "2048 48 32 4 128 8 768", 128, _QWEN, "0 0 0"),
        _experts("qwen3 235B-A22B", "4096 94 64 4 128 8 1536", 128, _QWEN, "0 0 0"),
        _experts("deepseek_v3 16B", "2048 27 16 16 64 6 1408", 192, 102400, "1 10944 2"),
        _experts("deepseek_v3 671B", "7168 61 128 128 256 8 2048", 192, 129280, "3 18432 1"),
        _experts("gpt_oss 20b", "2880 24 64 8 32 4 2880", 64, 201088, "0 0 0"),
        _experts("gpt_oss 120b", "2880 36 64 8 128 4 2880", 64, 201088, "0 0 0"),
        _experts("llama4 17bx16e", "5120 48 40 8 16 1 8192", 128, 202048, "0 16384 1"),
        _experts("llama4 17bx128e", "5120 48 40 8 128 1 8192", 128, 202048, "24 16384 1"),
    )
}


def known_model(hints: ModelHints) -> ModelHints:
    """The sizes of a model that a config names alone, as "Qwen/Qwen3-30B-A3B", if it is a flavor.

    >>> known_model(ModelHints(name="meta-llama/Llama-3.1-8B-Instruct")).layers
    32
    """
    if hints.name is None or hints.layers is not None:
        return hints
    name = re.split(r"[/.](?=\D)", hints.name)[-1]  # of a hub's or a Python path the last part
    found = flavor(None, _ENDINGS.sub("", _LLAMA_3.sub("llama3 ", name)))
    return hints if found.layers is None else replace(found, name=hints.name)


def flavor_of(model: ModelHints) -> Flavor | None:
    """The flavor that a model is by its sizes, whatever its name; None if it is none."""
    sizes = replace(model, name=None)
    for one in FLAVORS.values():
        if replace(one.model, name=None) == sizes:
            return one
    return None


def flavor(family: str | None, size: str | None) -> ModelHints:
    """The shape of a flavor, as ("llama3", "8B") or ("llama3", "llama3_8b").

    Of a name that is not in the table, the name alone.
    """
    if family is None and size is None:
        return ModelHints()
    wanted = f"{family or ''} {size or ''}".strip()
    plain = _plain(wanted)
    for name, one in FLAVORS.items():
        known = _plain(name or "")
        if plain in (known, _plain(f"{family} {name}")):
            return one.model
    return ModelHints(name=wanted)


_LLAMA_3 = re.compile(r"^(meta[-_])?llama[-_]?3([._][1-3])?[-_]", re.I)  # 3, 3.1, 3.2 and 3.3
_ENDINGS = re.compile(r"[-_](base|instruct)$", re.I)


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


_SIZES = {  # of ModelHints -> keys of a Hugging Face config.json, the first that is there
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "ffn": ("intermediate_size", "n_inner", "d_ff"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "key_value_heads": ("num_key_value_heads", "num_attention_heads", "n_head"),
    "vocabulary": ("vocab_size",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "expert_ffn": ("moe_intermediate_size",),
}


def model_of_config(document: Document) -> ModelHints:
    """The sizes in a Hugging Face config.json; raises `FrameworkError` for one without layers."""
    settings = Settings(document)
    sizes: dict[str, Any] = {
        size: next((found for k in keys if (found := settings.integer(k, None)) is not None), None)
        for size, keys in _SIZES.items()
    }
    if sizes["layers"] is None:
        raise FrameworkError(f"{document.name}: a config.json with num_hidden_layers is needed")
    return ModelHints(name=settings.text("model_type", None), **sizes)
