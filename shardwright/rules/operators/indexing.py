"""Rules of data-dependent indexing: index, gather, scatter, top-k.

Indexed dimensions are not split; dimensions of the index tensors and dimensions that are not
indexed may be.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.ir.graph import Ref
from shardwright.rules.call import Call
from shardwright.rules.notation import Notation, Shape, elementwise, parse

_COLLISION = "two of its writes may hit the same place"


def index(call: Call) -> Notation | None:
    """`x[i, :, j]`: the dimensions of the index tensors are the look-ups."""
    places = _indexed_dims(call)
    if places is None:
        return None
    looked_up, result = _lookup_words(call, places, call.operands[1:], whole="")
    indices = [_aligned(shape, "i") for shape in call.operands[1:]]
    text = f"{looked_up}, {', '.join(indices)} -> {result}"
    return parse(text, call.operands, call.results)


def index_put(call: Call) -> Notation | None:
    """`x[i, :, j] = values`: writes may collide, so the index tensors are not split."""
    places = _indexed_dims(call)
    if places is None:
        return None
    into, values = _lookup_words(call, places, call.operands[1:-1], whole="!")
    indices = [_aligned(shape, "i", "!") for shape in call.operands[1:-1]]
    given = " ".join(values.split()[-len(call.operands[-1]) :]) if call.operands[-1] else ""
    text = f"{into}, {', '.join(indices)}, {given} -> {into}"
    return parse(text, call.operands, call.results, reason=_COLLISION)


def _indexed_dims(call: Call) -> list[int] | None:
    """Dimensions with an index tensor; None for boolean masks, whose result size is dynamic."""
    given = call.op.args[1]
    assert isinstance(given, tuple)
    if any(call.graph.tensor[a.name].dtype == "bool" for a in given if isinstance(a, Ref)):
        return None
    return [d for d, arg in enumerate(given) if isinstance(arg, Ref)]


def _lookup_words(
    call: Call, places: list[int], indices: list[Shape], whole: str
) -> tuple[str, str]:
    """Notation of the indexed tensor, and of the result."""
    rank = len(call.operands[0])
    words = [f"v{d}!" if d in places else f"d{d}" for d in range(rank)]
    kept = [f"d{d}" for d in range(rank) if d not in places]
    together = places == list(range(places[0], places[0] + len(places)))
    at = places[0] if together else 0
    look_ups = [f"i{k}{whole}" for k in reversed(range(max(map(len, indices))))]
    return " ".join(words), " ".join([*kept[:at], *look_ups, *kept[at:]])


def _aligned(shape: Shape, letter: str, whole: str = "") -> str:
    """Notation of a tensor that broadcasts with others: indices numbered from the right."""
    return " ".join(f"{letter}{k}{whole}" for k in reversed(range(len(shape))))


def gather(call: Call) -> Notation | None:
    """`gather(x, dim, index)`: the other dimensions are shared where their sizes are equal."""
    if len(call.operands[0]) != len(call.operands[1]):  # one of them is a number
        return None
    source, found = _gather_words(call, call.dim(1), whole="")
    return parse(f"{source}, {found} -> {found}", call.operands, call.results)


def scatter(call: Call) -> Notation | None:
    """`scatter(x, dim, index, values)` and its sums: whole along `dim`."""
    if len({len(shape) for shape in call.operands}) > 1:  # one of them is a number
        return None
    into, hits = _gather_words(call, call.dim(1), whole="!")
    parts = [into, hits]
    if len(call.operands) > 2:
        pairs = zip(hits.split(), call.operands[1], call.operands[2], strict=True)
        parts.append(" ".join(w if n == m else f"s{d}!" for d, (w, n, m) in enumerate(pairs)))
    text = f"{', '.join(parts)} -> {into}"
    return parse(text, call.operands, call.results, reason=_COLLISION)


def _gather_words(call: Call, dim: int, whole: str) -> tuple[str, str]:
    """Notation of a tensor and of an index tensor of the same rank, which may be smaller."""
    words, places = [], []
    for d, (n, m) in enumerate(zip(call.operands[0], call.operands[1], strict=True)):
        shared = n == m and d != dim
        words.append(f"d{d}" if shared else f"v{d}!")
        places.append(f"d{d}" if shared else f"i{d}{whole}" if d == dim else f"i{d}!")
    return " ".join(words), " ".join(places)


def index_select(call: Call) -> Notation:
    """Slices along one dimension, selected by a vector of indices."""
    dim = call.dim(1)
    rank = len(call.operands[0])
    source = [f"v{d}!" if d == dim else f"d{d}" for d in range(rank)]
    found = ["i" if d == dim else f"d{d}" for d in range(rank)]
    places = "i" if call.operands[1] else ""
    return parse(f"{' '.join(source)}, {places} -> {' '.join(found)}", call.operands, call.results)


def of_whole_mask(call: Call) -> Notation:
    """Positions of the True elements of a mask, or their numbers in order: all of it is needed."""
    mask, result = (
        " ".join(f"{letter}{d}!" for d in range(len(shape)))
        for letter, shape in (("m", call.operands[0]), ("p", call.results[0]))
    )
    return parse(f"{mask} -> {result}", call.operands, call.results, reason="it counts over all")


def topk(call: Call) -> Notation:
    """The largest elements along one dimension, which is whole and changes its size."""
    dim = call.dim(2, "dim", -1)
    rank = len(call.operands[0])
    before = " ".join(f"v{d}!" if d == dim else f"d{d}" for d in range(rank))
    after = " ".join(f"k{d}!" if d == dim else f"d{d}" for d in range(rank))
    return parse(f"{before} -> {after}, {after}", call.operands, call.results)


def slice_scatter(call: Call) -> Notation:
    """A slice of one dimension is replaced; that dimension is whole."""
    dim = call.dim(2)
    rank = len(call.operands[0])
    into = " ".join(f"v{d}!" if d == dim else f"d{d}" for d in range(rank))
    part = " ".join(f"p{d}!" if d == dim else f"d{d}" for d in range(rank))
    return parse(f"{into}, {part} -> {into}", call.operands, call.results)


def select_scatter(call: Call) -> Notation:
    """One index of a dimension is replaced; that dimension is whole."""
    dim = call.dim(2)
    one = elementwise([call.operands[0]], call.operands[0], whole=[dim])
    kept = tuple(names for d, names in enumerate(one.operands[0]) if d != dim)
    return replace(one, operands=(one.operands[0], kept))


def histogram(call: Call) -> Notation:
    """Counts per bin: everything whole."""
    one = elementwise(call.operands, call.operands[0], whole=range(len(call.operands[0])))
    bins = call.results[0][0]
    known = {"bins": bins} if bins > 1 else {}
    return replace(
        one,
        results=((tuple(known),),),
        sizes={**one.sizes, **known},
        whole=one.whole | frozenset(known),
        reason="it counts over every dimension",
    )
