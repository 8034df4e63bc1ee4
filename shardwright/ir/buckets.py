"""Communication buckets: of gradients that are summed, of sharded parameters that are gathered.

The passes of step programs and the cost tables use these functions. A bucket has a size. It ends
with a layer once it is half full, and what is left of a layer may exceed the size by half: so equal
layers have equal buckets.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.ir.graph import Graph
from shardwright.ir.options.mixed_precision import reduced_bytes

BUCKET_BYTES = 25 * 2**20  # as in torch's own data parallelism (Li et al., VLDB 2020)
_LEAST_SUM_BYTES = 2**18
_SUMS = 8  # of a model that is small enough
_LEAST_GATHER_BYTES = 2**20  # less in a bucket is not worth a message
_ENOUGH_BYTES = 2**22  # in a bucket of matrices that ends with a layer, however large buckets are
_VECTOR_BYTES = 2**16  # of a tensor that counts as a vector
MOST_FILLED = 1.5  # times the size of a bucket, if it ends with a layer


def gradient_bucket_bytes(total: int) -> int:
    """Size in bytes of a bucket of gradients, of a model with `total` bytes of gradients.

    An eighth, so that the all-reduces of small models too overlap with computation, within 256 KiB
    and 25 MiB.
    """
    return min(BUCKET_BYTES, max(_LEAST_SUM_BYTES, -(-total // _SUMS)))


def sum_bucket_bytes(graph: Graph) -> int:
    """Size in bytes of a bucket of gradients that are summed, of a whole model.

    Along each axis: where most parameters are sharded, the others share one sum at the end of a
    step, as layer norms do in Megatron-LM.
    """
    return gradient_bucket_bytes(sum(reduced_bytes(graph, name) for name in graph.trained))


def module_in_list(parameter: str) -> str:
    """The innermost element of a list of modules that a parameter is in; "" if there is none.

    Elements that are single modules with parameters of their own, as in a sequence of linear
    layers, do not count.

    >>> module_in_list("model.layers.3.mlp.experts.5.up.weight"), module_in_list("lm_head.weight")
    ('model.layers.3.mlp.experts.5', '')
    >>> module_in_list("blocks.3.mlp.0.weight")
    'blocks.3'
    """
    parts = parameter.split(".")[:-2]
    while parts and not parts[-1].isdecimal():
        parts.pop()
    return ".".join(parts)


def gradient_buckets(
    gradients: Sequence[tuple[int, str]], most: int
) -> tuple[tuple[int, ...], ...]:
    """The buckets of gradients, as indices into `gradients`.

    A gradient of at least `most` bytes has a bucket of its own, without a copy. The others fill
    buckets from the end, because the backward pass produces the last ones first. A bucket ends
    with a layer if it has half of `most`, and a full one has what is left of its layer if that is
    less than half of `most`.

    Args:
        gradients: bytes and parameter of each, in the order of the forward pass.
        most: bytes of a full bucket.

    >>> gradient_buckets([(1, "a"), (1, "b"), (9, "c"), (3, "d"), (1, "e"), (3, "f")], 4)
    ((0, 1, 3), (2,), (4, 5))
    """
    found: list[tuple[int, ...]] = []
    together: list[int] = []
    filled = 0
    left = _left_of_layers([(size if size < most else 0, name) for size, name in gradients[::-1]])
    for place in reversed(range(len(gradients))):
        size, name = gradients[place]
        if size >= most:
            found.append((place,))
            continue
        if filled >= most / 2 and module_in_list(name) != module_in_list(gradients[together[0]][1]):
            found.append(tuple(together))
            together, filled = [], 0
        together.insert(0, place)
        filled += size
        behind = left[len(gradients) - 1 - place] - size
        if filled >= most and not 0 < behind < most / 2:
            found.append(tuple(together))
            together, filled = [], 0
    return tuple(sorted([*found, tuple(together)] if together else found))


def gather_limit(largest: int) -> int:
    """The most bytes of a bucket of gathered parameters, the largest of which has `largest`.

    Twice the largest, so that prefetched buckets take little memory, within 1 and 25 MiB. Vectors,
    as those of norms that are sharded along more axes than matrices, fill large buckets: together
    they take little memory, and one by one many messages.
    """
    if largest <= _VECTOR_BYTES:
        return BUCKET_BYTES
    return max(_LEAST_GATHER_BYTES, min(BUCKET_BYTES, 2 * largest))


def enough_bytes(largest: int, least: int = 0) -> float:
    """Bytes with which a bucket of `gather_buckets` ends with a layer."""
    limit = max(least, gather_limit(largest))
    return limit / 2 if largest <= _VECTOR_BYTES else min(_ENOUGH_BYTES, limit / 2)


def gather_buckets(copies: Sequence[tuple[int, str]], least: int = 0) -> list[list[int]]:
    """The buckets of `copies`, as indices into them.

    Copies that follow one another share a bucket until it is full, of `least` bytes or more, or
    until a layer ends and it has enough: half of that, of matrices at most 4 MiB. What is left of a
    layer and is not enough for a bucket may exceed that of the copies before by half.

    Args:
        copies: bytes and parameter of each, in the order in which they are read.
        least: bytes of a full bucket at least.

    >>> gather_buckets([(2**20, "0.a.w"), (2**19, "0.b.w"), (8, "1.a.w"), (2**20, "1.b.w")])
    [[0, 1], [2, 3]]
    """
    largest = max((size for size, _ in copies), default=0)
    limit, enough = max(least, gather_limit(largest)), enough_bytes(largest, least)
    left = _left_of_layers(copies)
    found: list[list[int]] = []
    filled, before, is_large = 0, "", False
    for number, (size, name) in enumerate(copies):
        layer = module_in_list(name)
        ended = filled >= enough and layer != before
        # One larger than a bucket is copied neither in nor out as long as it is alone.
        is_rest = layer == before and left[number] < enough and not is_large
        if not found or ended or (filled + size > limit and not is_rest):
            found.append([])
            filled, is_large = 0, size > limit
        found[-1].append(number)
        filled, before = filled + size, layer
    return found


def _left_of_layers(tensors: Sequence[tuple[int, str]]) -> list[int]:
    """Bytes from each tensor to the last one of its layer, of those that follow one another."""
    found: list[int] = []
    total, behind = 0, ""
    for size, name in reversed(tensors):
        layer = module_in_list(name)
        total = size + (total if found and layer == behind else 0)
        found.append(total)
        behind = layer
    return found[::-1]
