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


def _mixture(
    family: str,
    layers: int,
    hidden: int,
    heads: tuple[int, int, int],  # of queries, of keys and values, and the width of one
    ffn: int,
    vocab: int,
    experts: int,
    chosen: int,
) -> dict[str, Any]:
    queries, key_values, width = heads
    shape = _shape(family, layers, hidden, queries, key_values, ffn, vocab, tied=False)
    return shape | {"head_size": width, "experts": experts, "chosen": chosen}


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
# Of config.json of Qwen/Qwen3-30B-A3B, Qwen/Qwen3-235B-A22B, deepseek-ai/DeepSeek-V3 and
# moonshotai/Kimi-K2-Base. Heads of the latter two are those of their queries and keys.
MIXTURES = {
    "Qwen3_30B_a3B": _mixture("qwen3-moe", 48, 2048, (32, 4, 128), 768, 151936, 128, 8),
    "Qwen3_235B_a22B": _mixture("qwen3-moe", 94, 4096, (64, 4, 128), 1536, 151936, 128, 8),
    "DeepSeekV3": _mixture("deepseek-v3", 61, 7168, (128, 128, 192), 2048, 129280, 256, 8),
    "Kimi_K2": _mixture("kimi-k2", 61, 7168, (64, 64, 192), 2048, 163840, 384, 8),
}
