"""Numerics options: how far a parallel step may differ from the single-device step.

The choice is made when a model is captured, is part of the graph's fingerprint
and travels with the plan, so that a plan runs as it was planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from shardwright.ir.options.fp8 import is_recipe, recipe_of

_MEANING = {
    ("rng", "fast"): (
        "fast: dropout and attention keep torch's fused kernels, seeded by seed, step, operator and"
        " tile; replicas of a tile draw the same numbers, another plan draws others"
    ),
    ("batch_norm", "local"): (
        "local: statistics are of each device's own part of the batch, as under DDP, so results"
        " differ from those of one device; running buffers are the mean over the parts"
    ),
    ("precision", "bf16"): (
        "bf16: operators compute in bfloat16, on casts of parameters that are kept, and whose"
        " gradients are summed, in float32"
    ),
    ("precision", "fp16"): (
        "fp16: operators compute in float16, on casts of parameters that are kept, and whose"
        " gradients are summed, in float32; the loss is scaled, and updates whose gradients are not"
        " finite are skipped"
    ),
    ("precision", "tf32"): (
        "tf32: products of float32 matrices round their operands to 10 bits behind the point on"
        " GPUs that have TF32; elsewhere they are those of float32"
    ),
    ("reduce", "bf16"): (
        "bf16: gradients of parameters kept in float32 are rounded to bfloat16 before devices sum"
        " them, which halves what is sent; sums over micro-batches stay in float32"
    ),
    ("reduce", "fp16"): (
        "fp16: gradients of parameters kept in float32 are rounded to float16 before devices sum"
        " them, which halves what is sent; sums over micro-batches stay in float32"
    ),
}
_FP8 = "products of linear layers but the last are in 8 bits, and differ from the model's"
_TILE_SCALES = (
    "scales are of a rank's tiles in one micro-batch, and are those of one device only where no"
    " dimension that their maxima go over is split"
)
_CHUNKS = (
    "logits of one part of the vocabulary exist at a time and are computed again in the backward"
    " pass; gradients of what they are computed from are sums over the parts"
)
_MLP_CHUNKS = (
    "tensors of the inner width of an MLP exist for one part of a rank's rows at a time and are"
    " computed again in the backward pass; gradients of its weights are sums over the parts"
)
CHOICES = {
    "rng": ("exact", "fast"),
    "batch_norm": ("exact", "local"),
    "precision": ("model", "bf16", "fp16", "tf32"),
    "reduce": ("stored", "bf16", "fp16"),
    "norms": ("fused", "model"),
    "logits": ("fused", "model"),
}


class NumericsError(ValueError):
    """An unknown option or value, or two that contradict each other."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """Options for random numbers, batch norms, dtypes, and chunks of the loss and of MLPs.

    * `rng`: "exact" draws what one device draws, under any plan; "fast" keeps
      torch's fused kernels, whose numbers depend on the plan;
    * `batch_norm`: "exact" takes the statistics of the whole batch; "local" of
      each device's own part of it, without reducing anything;
    * `precision`: "model" computes in the model's own dtypes; "bf16" in bfloat16 and "fp16" in
      float16 on casts of the parameters, which stay float32 (`ir/options/mixed_precision.py`);
      "tf32" in float32, with products that GPUs may compute in TF32;
    * `reduce`: "stored" sums gradients over devices in the dtype in which parameters
      are stored; "bf16" and "fp16" in 16 bits, with that precision alone;
    * `norms`: "fused" computes RMS norms of single operators by torch's kernel, which rounds once
      in half precision where they round twice; "model" as the model does;
    * `logits`: "fused" computes a cross entropy of half-precision logits that are cast to float32
      without the whole copy; "model" on the copy, as the model does, which gives the same;
    * `loss_chunks`: parts of the vocabulary in which the last projection and the cross entropy are
      computed, so that logits of one part exist at a time (`rules/operators/loss_chunks.py`);
    * `mlp_chunks`: parts of a rank's rows in which MLPs are computed, so that tensors of the inner
      width exist for one part at a time (`rules/operators/mlp_chunks.py`);
    * `fp8`: the key of the recipe of matrix products in 8 bits (`ir/options/fp8.py`), of which some
      are executed; empty: there are none.

    Raises `NumericsError` for a word that is not known, for a `reduce` in other 16 bits than those
    of `precision`, and for a number of chunks that is none.
    """

    rng: str = "exact"
    batch_norm: str = "exact"
    precision: str = "model"
    reduce: str = "stored"
    norms: str = "fused"
    logits: str = "fused"
    loss_chunks: int = 1
    mlp_chunks: int = 1
    fp8: str = ""

    @property
    def is_mixed(self) -> bool:
        """Whether operators compute in 16 bits on casts of parameters kept in float32."""
        return self.precision in ("bf16", "fp16")

    def __post_init__(self) -> None:
        for name, words in CHOICES.items():
            if (given := getattr(self, name)) not in words:
                known = " or ".join(f"{name}={word!r}" for word in words)
                raise NumericsError(f"{name}={given!r} is not known; write {known}")
        if self.reduce not in ("stored", self.precision):
            raise NumericsError(
                f"reduce={self.reduce!r} is for gradients of parameters that are kept in float32;"
                f" add precision={self.reduce!r}"
            )
        for name in ("loss_chunks", "mlp_chunks"):
            count = getattr(self, name)
            if type(count) is not int or count < 1:
                raise NumericsError(f"{name}={count!r} is no number of chunks; give 1 or more")
        if not isinstance(self.fp8, str) or not is_recipe(self.fp8):
            raise NumericsError(
                f"fp8={self.fp8!r} is no recipe; price a strategy, as 'fp8=delayed'"
            )

    def require_executed(self) -> None:
        """Raise `NumericsError` for what is priced and not executed."""
        if not self._runs_fp8:
            raise NumericsError(
                f"fp8={self.fp8} is priced, not executed here; price its strategy with"
                " `shardwright price`, train it with that library, or plan with compile=regional,"
                " fp8=tensorwise or rowwise, and fp8_gather=off"
            )

    @property
    def _runs_fp8(self) -> bool:
        """Whether products in 8 bits, if there are any, are executed."""
        recipe = recipe_of(self.fp8)
        return recipe is None or recipe.is_executed

    def lines(self) -> Iterator[tuple[str, str]]:
        """Name and consequence of every option that is not exact."""
        for field in fields(self):
            if (field.name, value := getattr(self, field.name)) in _MEANING:
                yield field.name, _MEANING[field.name, value]
        if self.loss_chunks > 1:
            yield "loss", f"in {self.loss_chunks} chunks: {_CHUNKS}"
        if self.mlp_chunks > 1:
            yield "mlp", f"in {self.mlp_chunks} chunks: {_MLP_CHUNKS}"
        if self.fp8:
            ends = _TILE_SCALES if self._runs_fp8 else "priced, not executed here"
            yield "fp8", f"{self.fp8}: {_FP8}; {ends}"

    def __str__(self) -> str:
        words = [f"rng={self.rng}", f"batch_norm={self.batch_norm}"]
        words += [f"precision={self.precision}"] if self.precision != "model" else []
        words += [f"reduce={self.reduce}"] if self.reduce != "stored" else []
        words += [f"norms={self.norms}"] if self.norms != "fused" else []
        # No word on `logits`, which leaves another operator and the same numbers.
        words += [f"loss_chunks={self.loss_chunks}"] if self.loss_chunks > 1 else []
        words += [f"mlp_chunks={self.mlp_chunks}"] if self.mlp_chunks > 1 else []
        words += [f"fp8={self.fp8}"] if self.fp8 else []
        return " ".join(words)  # part of fingerprints: plans made before there were these run


EXACT = Numerics()
