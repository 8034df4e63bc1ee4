"""Shapes of models that several sources name, as their published configurations have them."""

from __future__ import annotations

from typing import Any

GPT2_VOCAB = 50257


def padded(vocab: int, tp: int) -> int:
    """The rows of Megatron's embedding: a multiple of 128 on each tensor parallel rank."""
    multiple = 128 * tp
    return -(-vocab // multiple) * multiple


def megatron(layers: int, hidden: int, heads: int, vocab: int) -> dict[str, Any]:
    """A GPT of Megatron: MLP of four times the width, learned positions, tied head."""
    return _shape("gpt", layers, hidden, heads, heads, 4 * hidden, vocab, tied=True)


def mpt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """An MPT of llm-foundry: as GPT, with a vocabulary of 50368."""
    return _shape("gpt", layers, hidden, heads, heads, 4 * hidden, 50368, tied=True)


def llama(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int
) -> dict[str, Any]:
    """A Llama: gated MLP, rotary positions, a head of its own."""
    return _shape("llama", layers, hidden, heads, kv_heads, ffn, vocab, tied=False)


def _shape(
    family: str, layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, *, tied: bool
) -> dict[str, Any]:
    return {
        "family": family,
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv,
        "head_size": hidden // heads,
        "ffn": ffn,
        "vocab": vocab,
        "tied": tied,
    }


LLAMA2 = {
    "7B": llama(32, 4096, 32, 32, 11008, 32000),
    "13B": llama(40, 5120, 40, 40, 13824, 32000),
    "34B": llama(48, 8192, 64, 8, 22016, 32000),
    "70B": llama(80, 8192, 64, 8, 28672, 32000),
}
LLAMA3 = {
    "1B": llama(16, 2048, 32, 8, 8192, 128256),
    "3B": llama(28, 3072, 24, 8, 8192, 128256),
    "8B": llama(32, 4096, 32, 8, 14336, 128256),
    "70B": llama(80, 8192, 64, 8, 28672, 128256),
    "405B": llama(126, 16384, 128, 8, 53248, 128256),
}
