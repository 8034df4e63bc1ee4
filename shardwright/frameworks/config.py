"""`TrainingConfig`: what a framework's config says, as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shardwright.ir.strategy.strategy import ModelLimits, Strategy


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a config file.

    Attributes:
        name: as it is written in the file.
        line: where it stands, from 1.
        value: its value.
        sets: what was read from it: fields of `Strategy`, "batch", "model" or "semantics".
        why: of a key that is not used, why it changes nothing in the strategy; "" if unknown.
    """

    name: str
    line: int
    value: Any
    sets: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The samples, tokens and micro-batches of one step.

    Attributes:
        samples: sequences of the global batch; None: the file does not say.
        micro: sequences of one micro-batch on one data-parallel rank; None: the same.
        sequence: tokens of a sequence; None: the same.
    """

    samples: int | None = None
    micro: int | None = None
    sequence: int | None = None

    @property
    def tokens(self) -> int | None:
        """Tokens of a step; None where the file does not say."""
        if self.samples is None or self.sequence is None:
            return None
        return self.samples * self.sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHints:
    """Sizes of the model that a config states; None where it states nothing.

    Attributes:
        name: as the framework calls it, as "llama3 8B" or a path.
        layers, hidden, ffn, heads, key_value_heads, vocabulary: sizes.
        experts, experts_per_token, expert_ffn: of a mixture of experts.
        head_dim: features of an attention head; None: `hidden` over `heads`.
        feed_forward: "swiglu", "gelu" or "squared-relu".
        tied: whether embedding and output share their weights.
    """

    name: str | None = None
    layers: int | None = None
    hidden: int | None = None
    ffn: int | None = None
    heads: int | None = None
    key_value_heads: int | None = None
    vocabulary: int | None = None
    experts: int | None = None
    experts_per_token: int | None = None
    expert_ffn: int | None = None
    head_dim: int | None = None
    feed_forward: str | None = None
    tied: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Semantics:
    """Settings that change the numbers that training gives.

    Attributes:
        gradient_sync: gradients are reduced after "every" or after the "last" micro-batch.
        clip: the norm to which gradients are clipped; None: they are not, or the file is silent.
        loss_mean: over "tokens of the step", or a mean of "micro-batches".
        global_batch: sequences of a step; None: the file does not say.
    """

    gradient_sync: str
    clip: float | None
    loss_mean: str
    global_batch: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """The contents of a framework's config.

    Attributes:
        framework: its name, as "torchtitan".
        dialect: the kind of file, as "TOML of versions until 2026-02".
        source: the file's name.
        strategy: how it trains in parallel, without what has no effect (`canonical`).
        batch: what a step computes.
        model: what is said of the model.
        semantics: what changes results.
        used: keys that were read, in the order of the file.
        unused: keys that were not.
        differences: where the strategy is not exactly what the file says, one sentence each.
        notes: other remarks, one sentence each.
    """

    framework: str
    dialect: str
    source: str
    strategy: Strategy
    batch: Batch
    model: ModelHints
    semantics: Semantics
    used: tuple[Key, ...] = field(default=())
    unused: tuple[Key, ...] = field(default=())
    differences: tuple[str, ...] = field(default=())
    notes: tuple[str, ...] = field(default=())

    @property
    def limits(self) -> ModelLimits:
        """Sizes of model and batch that limit degrees of parallelism."""
        return ModelLimits(
            batch=self.batch.samples,
            sequence=self.batch.sequence,
            heads=self.model.heads,
            key_value_heads=self.model.key_value_heads,
            layers=self.model.layers,
            experts=self.model.experts,
        )
