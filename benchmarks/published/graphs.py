"""Captured graphs of the models of rows, at full depth, kept in a folder between runs."""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import astuple, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwright as sw
from benchmarks.published.mixtures import Latent, Mixture, Sizes
from benchmarks.published.modules import Gpt, Linears, Llama
from benchmarks.published.row import Row
from scripts.gpu_check.models import made
from shardwright.ir.graph import Graph

FOLDER = Path(__file__).with_name("graphs.rows")  # git ignores it
OWN = "gpu_check"  # the family of rows whose modules are those of `scripts.gpu_check`, by name
_CAPTURE = ("tracing/**/*.py", "rules/**/*.py", "ir/graph.py")  # what graphs depend on
_LOSS_PART = 128  # rows of logits in a part of LitGPT's loss


class UnpriceableError(ValueError):
    """A row with something that cannot be priced yet; says what."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Everything of a row that its graph depends on; see `Row`.

    `mixed` says that parameters are float32 and computing is in half precision, `reduced` that
    gradients are summed in half precision then; `wide_loss`, that logits are cast to float32.
    `model` is the name of a module of `OWN`, else empty; `adapters`: roles and rank of `Linears`,
    and `loss_part` the positions of a part of LitGPT's loss. `experts`: of a layer, and of a
    token. `at_once` says that TransformerEngine's kernels compute rotary positions, gated MLPs and
    grouped attention.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    tied: bool
    sequence: int
    batch: int
    mixed: bool
    reduced: bool
    fused: bool
    composed_norms: bool
    wide_loss: bool
    dropout: float
    model: str = ""
    adapters: tuple[str, int] = ("", 0)
    loss_part: int = 0
    shared_norms: bool = False
    experts: tuple[int, int] = (0, 0)
    at_once: bool = False

    @classmethod
    def of(cls, row: Row) -> Shape:
        """The shape of a row; raises `UnpriceableError` for a model that has no module here."""
        if row.family not in (*FAMILIES, OWN):
            raise UnpriceableError(f"models of the family {row.family} have no module here")
        method, *adapters = row.tuning.split()
        if method != "all" and not adapters:
            raise UnpriceableError(f"training by {row.tuning} has no module here")
        if row.head_size * row.heads != row.hidden and not row.experts:
            raise UnpriceableError("heads that are wider than the residual stream have no module")
        return cls(
            row.family,
            row.layers,
            row.hidden,
            row.heads,
            row.kv_heads,
            row.head_size,
            row.ffn,
            row.vocab,
            row.tied,
            row.sequence,
            row.global_batch,
            mixed := not row.precision.startswith("pure-"),
            mixed and row.reduce in ("fp16", "bf16"),
            row.attention != "unfused",
            row.norms == "composed",
            row.loss == "float32",
            row.dropout,
            row.model if row.family == OWN else "",
            (adapters[0], int(adapters[1])) if adapters else ("", 0),
            _loss_part(row) if row.source == "litgpt" else 0,
            row.norms == "shared",
            (row.experts, row.chosen),
            row.source == "megatron-bridge",
        )


def _loss_part(row: Row) -> int:
    """Positions of a part of LitGPT's loss: of each sample, or where it trains all, of all."""
    return _LOSS_PART // row.micro_batch if row.tuning == "all" else _LOSS_PART


@lru_cache(maxsize=2)  # rows of one graph are priced after each other
def graph_of(shape: Shape, folder: Path = FOLDER) -> Graph:
    """The graph of a training step on the global batch, captured once for each shape."""
    file = folder / f"{_name(shape)}.pickle"
    if file.exists():
        kept: Graph = pickle.loads(file.read_bytes())
        return kept
    graph = _captured(shape)
    folder.mkdir(exist_ok=True)
    part = file.with_suffix(".part")
    part.write_bytes(pickle.dumps(graph))
    part.replace(file)
    return graph


def _name(shape: Shape) -> str:
    """Names a shape and the code that captures: with other code graphs are captured anew."""
    code = code_digest(
        (*_CAPTURE,),
        (
            Path(__file__),
            Path(__file__).with_name("modules.py"),
            Path(__file__).with_name("mixtures.py"),
        ),
    )
    return hashlib.sha256(repr((code, astuple(shape))).encode()).hexdigest()[:24]


@cache
def code_digest(patterns: tuple[str, ...], files: tuple[Path, ...]) -> str:
    """A hash of the package's files that match, of `files`, and of torch's version."""
    package = Path(sw.__file__).parent
    found = sorted({file for pattern in patterns for file in package.glob(pattern)})
    text = b"".join(file.read_bytes() for file in (*found, *files))
    return hashlib.sha256(text + torch.__version__.encode()).hexdigest()


def _captured(shape: Shape) -> Graph:
    if shape.model:
        # As they were measured.
        return sw.capture(*_own(shape.model), norms="model", logits="model")
    with torch.device("meta"):
        module = FAMILIES[shape.family](shape)
        tokens = torch.zeros(shape.batch, shape.sequence, dtype=torch.long)
    if not shape.mixed:
        module = module.to(torch.bfloat16)
    batch = {"input_ids": tokens, "labels": tokens}
    precision = "bf16" if shape.mixed else "model"
    reduce = "bf16" if shape.reduced else "stored"
    # Modules here have the norms, and the casts of logits, that rows have run.
    own = "model"
    return sw.capture(module, (), batch, precision=precision, reduce=reduce, norms=own, logits=own)


def _own(name: str) -> tuple[nn.Module, tuple[()], dict[str, torch.Tensor]]:
    module, batch = made(name, torch.device("meta"), torch.bfloat16)
    return module, (), batch


def _gpt(shape: Shape) -> nn.Module:
    return Gpt(
        shape.layers,
        shape.hidden,
        shape.heads,
        shape.ffn,
        shape.vocab,
        shape.sequence,
        tied=shape.tied,
        fused=shape.fused,
        wide_loss=shape.wide_loss,
        dropout=shape.dropout,
    )


def _llama(shape: Shape) -> nn.Module:
    return Llama(
        shape.layers,
        shape.hidden,
        shape.heads,
        shape.kv_heads,
        shape.ffn,
        shape.vocab,
        tied=shape.tied,
        composed_norms=shape.composed_norms,
        wide_loss=shape.wide_loss,
        linear=Linears(*shape.adapters, joint=shape.loss_part > 0),
        neox=shape.family == "neox",
        shared=shape.shared_norms,
        fused=shape.at_once,
        loss_part=shape.loss_part,
    )


def _mixture(shape: Shape) -> nn.Module:
    experts, chosen = shape.experts
    sizes = Sizes(
        shape.layers,
        shape.hidden,
        shape.heads,
        shape.kv_heads,
        shape.head_size,
        shape.ffn,
        shape.vocab,
        experts,
        chosen,
        **_MIXTURES[shape.family],
    )
    return Mixture(sizes, wide_loss=shape.wide_loss)


# What families of mixtures have beside the columns of rows: config.json of deepseek-ai/DeepSeek-V3
# and moonshotai/Kimi-K2-Base; Megatron-Bridge trains the former with its further token.
_DEEPSEEK: dict[str, Any] = {"shared_ffn": 2048, "dense_ffn": 18432, "latent": Latent()}
_MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3-moe": {},
    "deepseek-v3": {**_DEEPSEEK, "dense": 3, "predicted": 2},
    "kimi-k2": {**_DEEPSEEK, "dense": 1},
}
FAMILIES = {"gpt": _gpt, "llama": _llama, "neox": _llama} | dict.fromkeys(_MIXTURES, _mixture)
