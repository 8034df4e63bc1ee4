"""Communication buckets: of gradients that are summed, of sharded parameters that are gathered.

The passes of step programs and the cost tables use these functions. A bucket has a size, and ends
with a layer that is worth a message of its own, so that equal layers have equal buckets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardwright.ir.graph import Graph
from shardwright.ir.options.mixed_precision import reduced_bytes

BUCKET_BYTES = 25 * 2**20  # as in torch's own data parallelism (Li et al., VLDB 2020)
_LEAST_SUM_BYTES = 2**18
_SUMS = 8  # of a model that is small enough
_MESSAGE_BYTES = 2**20  # less is not worth a message, if there is more to send


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

    >>> module_in_list("model.layers.3.mlp.experts.5.up.weight"), module_in_list("lm_head.weight")
    ('model.layers.3.mlp.experts.5', '')
    """
    parts = parameter.split(".")[:-1]
    while parts and not parts[-1].isdecimal():
        parts.pop()
    return ".".join(parts)


def gradient_buckets(
    gradients: Sequence[tuple[int, str]], most: int
) -> tuple[tuple[int, ...], ...]:
    """The buckets of gradients, as indices into `gradients`.

    A gradient of at least `most` bytes has a bucket of its own, without a copy. The others fill
    buckets from the end, because the backward pass produces the last ones first. A layer that is
    worth it shares no bucket with another.

    Args:
        gradients: bytes and parameter of each, in the order of the forward pass.
        most: bytes of a full bucket.

    >>> gradient_buckets([(1, "a"), (1, "b"), (9, "c"), (3, "d"), (1, "e"), (3, "f")], 4)
    ((0,), (1, 3), (2,), (4, 5))
    """
    layers = _layers(gradients, most)
    found: list[tuple[int, ...]] = []
    together: list[int] = []
    for place in reversed(range(len(gradients))):
        size, _ = gradients[place]
        if size >= most:
            found.append((place,))
            continue
        if together and layers[place] != layers[together[0]]:
            found.append(tuple(together))
            together = []
        together.insert(0, place)
        if sum(gradients[i][0] for i in together) >= most:
            found.append(tuple(together))
            together = []
    return tuple(sorted([*found, tuple(together)] if together else found))


def gather_limit(largest: int) -> int:
    """The most bytes of a bucket of gathered parameters, the largest of which has `largest`.

    Twice the largest, so that prefetched buckets take little memory, within 1 and 25 MiB.
    """
    return max(_MESSAGE_BYTES, min(BUCKET_BYTES, 2 * largest))


def gather_buckets(copies: Sequence[tuple[int, str]], least: int = 0) -> list[list[int]]:
    """The buckets of `copies`, as indices into them.

    Copies that follow one another share a bucket until it is full, of `least` bytes or more. A
    layer that is worth it shares no bucket with another.

    Args:
        copies: bytes and parameter of each, in the order in which they are read.
        least: bytes of a full bucket at least.

    >>> gather_buckets([(2**20, "0.a"), (2**20, "0.b"), (8, "0.c"), (2**20, "1.a")])
    [[0, 1], [2], [3]]
    """
    limit = max(least, gather_limit(max((size for size, _ in copies), default=0)))
    layers = _layers(copies, limit)
    found: list[list[int]] = []
    filled = 0
    for number, (size, _) in enumerate(copies):
        if not found or layers[number] != layers[number - 1] or filled + size > limit:
            found.append([])
            filled = 0
        found[-1].append(number)
        filled += size
    return found


def _layers(tensors: Sequence[tuple[int, str]], limit: int) -> list[str]:
    """The layer whose buckets a tensor is in; "" if it has too few bytes for its own."""
    total: Counter[str] = Counter()
    names = [module_in_list(name) for _, name in tensors]
    for (size, _), name in zip(tensors, names, strict=True):
        total[name] += size
    least = min(_MESSAGE_BYTES, limit // 2)
    return [name if total[name] >= least else "" for name in names]
