"""Recipes of matrix products in 8 bits: what their casts move, and what they save.

The products of a linear layer, forward and for both gradients, run in 8 bits with results in the
model's dtype. Before each product its operands are scaled and cast. On Hopper, products in 8 bits
take operands with the contracted dimension last, so that each operand is needed a second time in
the other layout. Two libraries do this:

* torchao casts in code that `torch.compile` generates. Its linear layer saves the operands as they
  were, and casts them again for the backward pass (`torchao/float8/float8_linear.py`; the kernels
  of each cast are those that `torchao/testing/training/roofline_utils.py` counts, pytorch/ao at
  36027d82).
* TransformerEngine has a kernel for each cast, which writes both layouts at once. Its linear layer
  saves the input in 8 bits, and casts weights once a step (NVIDIA's documentation of
  low-precision training: "FP8 current scaling", "FP8 blockwise scaling", "Performance
  considerations").

Both gather sharded weights in 8 bits where that is asked for (torchao's
`enable_fsdp_float8_all_gather`, Megatron-LM's `fp8-param-gather`): each rank casts its shard, whose
scale is that of the whole weight, and layers multiply what arrives. Of it the backward pass needs
the other layout, which is a copy in 8 bits (`torchao/float8/float8_ops.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

TORCHAO, TRANSFORMER_ENGINE = "torchao", "TransformerEngine"
GATHERABLE = ("tensorwise", "delayed")  # of one scale for a weight: recipes whose shards are cast
_GATHER = "gather"
FLOAT8 = "float8_e4m3fn"  # in which devices state their peaks of products in 8 bits
MXFP8 = "mxfp8"  # the same with a scale for each 32 elements, which products apply themselves


@dataclass(frozen=True, slots=True)
class Cast:
    """The kernels of a cast of one tensor.

    Attributes:
        kernels: for each, how many times it moves all elements in the model's dtype, and in 8 bits.
        scale_bytes: of scales, for each element in 8 bits.
    """

    kernels: tuple[tuple[int, int], ...] = ()
    scale_bytes: float = 0.0

    def bytes_each(self, item_bytes: int) -> tuple[float, ...]:
        """Bytes that each kernel moves for an element of `item_bytes`.

        >>> Cast(((1, 0), (1, 2))).bytes_each(2)
        (2.0, 4.0)
        """
        narrow = 1 + self.scale_bytes
        return tuple(float(wide * item_bytes + some * narrow) for wide, some in self.kernels)

    def without_copies(self) -> Cast:
        """The cast with one result in 8 bits of each kernel, and no kernel that only copies."""
        casts = tuple((wide, min(some, 1)) for wide, some in self.kernels if wide)
        return replace(self, kernels=casts)


_AMAX, _ONE, _BOTH, _TRANSPOSED = (1, 0), (1, 1), (1, 2), (2, 0)  # kernels
_TURNED = Cast(((0, 2),))  # a copy in 8 bits of a weight in the other layout


@dataclass(frozen=True, slots=True)
class Fp8Recipe:
    """One way of scaling by one library.

    Attributes:
        name: that of a strategy's `fp8`.
        library: which executes it.
        activation: the cast of a layer's input in the forward pass.
        weight: the cast of the weight in the forward pass.
        gradient: the cast of the result's gradient.
        activation_again: that of the input in the backward pass.
        weight_again: that of the weight in the backward pass.
        scale_bytes: of scales, for each element in 8 bits.
        rate: of its products, over those with one scale for each operand.
        reads_maxima: whether a pass over a tensor finds its scale before it is cast.
        gathers: whether shards of weights are cast before they are gathered.
    """

    name: str
    library: str
    activation: Cast
    weight: Cast
    gradient: Cast
    activation_again: Cast = Cast()
    weight_again: Cast = Cast()
    scale_bytes: float = 0.0
    rate: float = 1.0
    reads_maxima: bool = False
    gathers: bool = False

    @property
    def key(self) -> str:
        """Its name in a graph's numerics, as "torchao:tensorwise", or with ":gather" behind it."""
        return f"{self.products_key}:{_GATHER}" if self.gathers else self.products_key

    @property
    def products_key(self) -> str:
        """Its name without what is gathered, as "torchao:rowwise"."""
        return f"{self.library}:{self.name}"

    @property
    def plain(self) -> Fp8Recipe:
        """The recipe with weights that are gathered as they are."""
        return _BY_KEY[self.products_key]

    @property
    def products(self) -> str:
        """The dtype whose peak its products run at."""
        return MXFP8 if self.name == "mxfp8" else FLOAT8

    @property
    def saves_8_bit(self) -> bool:
        """Whether the backward pass keeps the input in 8 bits, in place of the input."""
        return self.library == TRANSFORMER_ENGINE

    @property
    def is_executed(self) -> bool:
        """Whether plans with it run here: those of torchao that `scaled_mm` of torch has scales of.

        Weights are gathered in the dtype that layers read.
        """
        return self.library == TORCHAO and self.products == FLOAT8 and not self.gathers

    @property
    def covers_experts(self) -> bool:
        """Whether grouped products of experts are in 8 bits too; torchao has an option apart."""
        return self.library == TRANSFORMER_ENGINE

    @property
    def casts_weights_once(self) -> bool:
        """Whether weights are cast once a step, and not in each micro-batch."""
        return self.library == TRANSFORMER_ENGINE

    def without_copies(self) -> Fp8Recipe:
        """The recipe on devices whose products take operands in any layout: one copy of each.

        TransformerEngine makes no second one there, but where scales are of blocks ("Performance
        considerations").
        """
        if self.library != TRANSFORMER_ENGINE or self.scale_bytes:
            return self
        casts = (self.activation, self.weight, self.gradient)
        x, w, y = (cast.without_copies() for cast in casts)
        return replace(self, activation=x, weight=w, gradient=y)


_PER_32, _PER_128 = 1 / 32, 4 / 128  # bytes of scales: of 8 bits, and of float32
# Kernels with a scale for each row are slower by up to a half (pytorch/pytorch#147971). With this
# rate a step of Llama 3 8B on eight H100 is priced 1.09 times as fast as in bfloat16, where torchao
# measured 1.10 (docs/source/workflows/training.md of pytorch/ao at 36027d82); with 0.9 it is 1.18.
_RATE_BY_ROWS = 0.75


def _torchao() -> tuple[Fp8Recipe, ...]:
    scaled, again = Cast((_AMAX, _ONE)), Cast((_ONE,))
    rows, turned = Cast((_ONE,)), Cast((_TRANSPOSED, _ONE))
    blocks, both = Cast((_ONE,), _PER_32), Cast((_ONE, _ONE), _PER_32)
    return (
        Fp8Recipe(
            "tensorwise", TORCHAO, scaled, scaled, Cast((_AMAX, _BOTH)), again, again,
            reads_maxima=True,
        ),
        Fp8Recipe(
            "rowwise", TORCHAO, rows, rows, Cast(((2, 1), _ONE)), turned, turned,
            rate=_RATE_BY_ROWS,
        ),
        Fp8Recipe("mxfp8", TORCHAO, blocks, blocks, both, blocks, blocks, _PER_32),
    )  # fmt: skip


def _engine() -> tuple[Fp8Recipe, ...]:
    known = (
        ("delayed", (_BOTH,), 0.0),
        ("tensorwise", (_AMAX, _BOTH), 0.0),
        ("blockwise", (_BOTH,), _PER_128),
        ("mxfp8", (_BOTH,), _PER_32),
    )
    return tuple(
        Fp8Recipe(
            name, TRANSFORMER_ENGINE, *(Cast(kernels, scales),) * 3, scale_bytes=scales,
            reads_maxima=_AMAX in kernels,
        )
        for name, kernels, scales in known
    )  # fmt: skip


def _gathering(recipe: Fp8Recipe) -> Fp8Recipe:
    """A recipe with weights that arrive in 8 bits; TransformerEngine turns them once a step."""
    once = recipe.casts_weights_once
    weight, again = (_TURNED, Cast()) if once else (Cast(), _TURNED)
    return replace(recipe, weight=weight, weight_again=again, gathers=True)


_PLAIN = (*_torchao(), *_engine())
_BY_KEY: Mapping[str, Fp8Recipe] = {
    one.key: one
    for plain in _PLAIN
    for one in (plain, *([_gathering(plain)] if plain.name in GATHERABLE else []))
}


def recipe_of(key: str) -> Fp8Recipe | None:
    """The recipe with a `key`; None for an empty key, which is that of no recipe."""
    return _BY_KEY[key] if key else None


def executed_by(name: str, *, compiled: bool, gathers: bool = False) -> Fp8Recipe | None:
    """The recipe `name` of torchao where layers are compiled, else that of TransformerEngine.

    torchao's casts need the compiler, and the other's layers are not compiled. None if that library
    does not have it, or does not gather its weights in 8 bits where it `gathers`.

    >>> executed_by("tensorwise", compiled=True).library
    'torchao'
    """
    library = TORCHAO if compiled else TRANSFORMER_ENGINE
    return _BY_KEY.get(f"{library}:{name}:{_GATHER}" if gathers else f"{library}:{name}")


def is_recipe(key: str) -> bool:
    """Whether a key is that of a recipe, or empty."""
    return not key or key in _BY_KEY
