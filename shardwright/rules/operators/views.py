"""Rules of operators that rearrange: views, slices, concatenations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from shardwright.ir.graph import whole_number, whole_numbers
from shardwright.rules.call import Call
from shardwright.rules.notation import Notation, Shape, elementwise, parse, reshape

RESHAPES = ("view", "_unsafe_view", "reshape", "flatten", "unflatten")  # kinds of operators


def view(call: Call) -> Notation:
    """Views and reshapes."""
    return reshape(call.operands[0], call.results[0])


def squeeze(call: Call) -> Notation:
    """`squeeze` and `unsqueeze`: remove or add dimensions of size one."""
    return reshape(call.operands[0], call.results[0])


def permute(call: Call) -> Notation:
    """Dimensions in another order."""
    return _moved(call, whole_numbers(call.op.args[1]))


def transpose(call: Call) -> Notation:
    """Two dimensions exchanged; of a vector, itself."""
    rank = len(call.operands[0])
    order = list(range(rank))
    if rank >= 2:
        a, b = (whole_number(call.arg(i, "", i - 1)) % rank for i in (1, 2))
        order[a], order[b] = order[b], order[a]
    return _moved(call, order)


def _moved(call: Call, order: Sequence[int]) -> Notation:
    shape = call.operands[0]
    order = [d % len(shape) for d in order]
    one = elementwise([shape], shape)
    return replace(
        one,
        results=(tuple(one.operands[0][d] for d in order),),
        linear=(frozenset({0}),),
    )


def expand(call: Call) -> Notation:
    """Dimensions of size one, or new ones, repeated."""
    return elementwise(call.operands, call.results[0])


def broadcast_tensors(call: Call) -> Notation:
    """Several tensors, each repeated to the shape of all."""
    one = elementwise(call.operands, call.results[0])
    return replace(one, results=one.results * len(call.results))


def slice_(call: Call) -> Notation:
    """A slice; its dimension may be split inside the chunk if it is one of equal chunks."""
    dim = call.dim(1)
    size, length = call.operands[0][dim], call.results[0][dim]
    start = whole_number(call.arg(2, "start") or 0)
    start = max(0, start + size if start < 0 else start)
    step = call.arg(4, "step", 1)
    if length == size:
        return elementwise(call.operands, call.results[0], linear=[[0]])
    if step == 1 and length > 0 and size % length == 0 and start % length == 0:
        return _chunks(call, dim, length)
    return _opaque(call, dim)


def split(call: Call) -> Notation | None:
    """`split` and `chunk` into chunks whose sizes have a common divisor."""
    dim = call.dim(2)
    return _chunks(call, dim, gcd(*(shape[dim] for shape in call.results)))


def _chunks(call: Call, dim: int, chunk: int) -> Notation:
    """Dimension `dim` is (n c) with c the size of a chunk; each result has some whole chunks."""
    one = elementwise([call.operands[0]], call.operands[0])
    sizes = {name: size for name, size in one.sizes.items() if name != f"d{dim}"}
    whole = set()
    if chunk > 1:
        sizes["c"] = chunk

    def dims(shape: Shape, name: str) -> tuple[tuple[str, ...], ...]:
        found = list(one.operands[0])
        names = []
        if shape[dim] > chunk:
            sizes[name] = shape[dim] // chunk
            whole.add(name)
            names.append(name)
        found[dim] = (*names, *(["c"] if chunk > 1 else []))
        return tuple(found)

    return Notation(
        operands=(dims(call.operands[0], "n"),),
        results=tuple(dims(shape, f"n{i}") for i, shape in enumerate(call.results)),
        sizes=sizes,
        whole=frozenset(whole),
        linear=(frozenset({0}),) if call.floating else (),
    )


def unbind(call: Call) -> Notation:
    """Slices along one dimension, which must be whole."""
    return _without_dim(call, call.dim(1))


def select(call: Call) -> Notation:
    """One slice along a dimension, which must be whole."""
    return _without_dim(call, call.dim(1))


def _without_dim(call: Call, dim: int) -> Notation:
    reason = "it takes apart the only dimension"
    one = elementwise([call.operands[0]], call.operands[0], whole=[dim], reason=reason)
    kept = tuple(names for d, names in enumerate(one.operands[0]) if d != dim)
    return replace(one, results=(kept,) * len(call.results), linear=(frozenset({0}),))


def cat(call: Call) -> Notation:
    """`cat`; the dimension becomes (n c) for parts of equal size, and is not split otherwise."""
    dim = call.dim(1)
    lengths = {shape[dim] for shape in call.operands}
    if len(lengths) > 1:
        return _opaque(call, dim)
    (chunk,) = lengths
    one = elementwise([call.operands[0]], call.operands[0])
    sizes = {**{k: v for k, v in one.sizes.items() if k != f"d{dim}"}, "n": len(call.operands)}
    part, whole_result = list(one.operands[0]), list(one.operands[0])
    part[dim], whole_result[dim] = (), ("n",)
    if chunk > 1:
        sizes["c"] = chunk
        part[dim], whole_result[dim] = ("c",), ("n", "c")
    if len(call.operands) == 1:
        return elementwise(call.operands, call.results[0], linear=[[0]])
    return Notation(
        operands=(tuple(part),) * len(call.operands),
        results=(tuple(whole_result),),
        sizes=sizes,
        whole=frozenset({"n"}),
        linear=(frozenset(range(len(call.operands))),) if call.floating else (),
    )


def stack(call: Call) -> Notation:
    """`stack`: the operands become the elements of a new dimension."""
    rank = len(call.operands[0]) + 1
    dim = whole_number(call.arg(1, "dim", 0)) % rank
    one = elementwise(call.operands, call.operands[0])
    result = list(one.operands[0])
    sizes = dict(one.sizes)
    if len(call.operands) > 1:
        sizes["n"] = len(call.operands)
    result.insert(dim, ("n",) if len(call.operands) > 1 else ())
    return replace(one, results=(tuple(result),), sizes=sizes, whole=frozenset({"n"} & set(sizes)))


def repeat(call: Call) -> Notation:
    """`repeat`: each dimension becomes (repeats, old)."""
    before, after = call.operands[0], call.results[0]
    offset = len(after) - len(before)
    sizes: dict[str, int] = {}
    operand, result = [], []
    for d, size in enumerate(after):
        old = before[d - offset] if d >= offset else 1
        if old > 1:
            sizes[f"d{d}"] = old
        if size > old:
            sizes[f"r{d}"] = size // old
        if d >= offset:
            operand.append((f"d{d}",) if old > 1 else ())
        result.append(tuple(n for n in (f"r{d}", f"d{d}") if n in sizes))
    whole = frozenset(n for n in sizes if n.startswith("r"))
    return Notation((tuple(operand),), (tuple(result),), sizes, whole)


def repeat_interleave(call: Call) -> Notation | None:
    """`repeat_interleave`: one dimension becomes (old, repeats)."""
    dim = call.arg(2, "dim")
    if not isinstance(call.arg(1, "repeats"), int) or not isinstance(dim, int):
        return None
    dim %= len(call.operands[0])
    before = " ".join(f"d{d}" for d in range(len(call.operands[0])))
    after = before.replace(f"d{dim}", f"(d{dim} r!)" if call.operands[0][dim] > 1 else "r!")
    return parse(f"{before} -> {after}", call.operands, call.results, linear=[[0]])


def pixel_shuffle(call: Call) -> Notation:
    """Channels to pixels."""
    factor = call.op.args[1]
    assert isinstance(factor, int)
    text = "... (c r! s!) y x -> ... c (y r) (x s)"
    return parse(text, call.operands, call.results, sizes={"r": factor, "s": factor})


def glu(call: Call) -> Notation:
    """`glu`: one half of a dimension gates the other half, so the dimension is not split."""
    return _opaque(call, call.dim(1, "dim", -1))


def pad(call: Call) -> Notation:
    """Padding; padded dimensions are not split and not unified with those of the operand.

    The padded dimensions are read from the argument, last dimension first. Sizes do not show them:
    padding by 1 and -1 keeps the size.
    """
    rank, amounts = len(call.operands[0]), call.op.args[1]
    assert isinstance(amounts, tuple)
    padded = {rank - 1 - i // 2 for i, amount in enumerate(amounts) if amount != 0}
    return _opaque(call, *padded)


def _opaque(call: Call, *dims: int) -> Notation:
    """Elementwise in all dimensions but `dims`, which may not be split."""
    rank = len(call.results[0])
    sizes: dict[str, int] = {}

    def one(shape: Shape, tag: str) -> tuple[tuple[str, ...], ...]:
        found = []
        for d, size in enumerate(shape):
            name = f"{tag}{d}" if d in dims else f"d{d}"
            if size > 1:
                sizes[name] = size
            found.append((name,) if size > 1 else ())
        return tuple(found)

    operands = tuple(one(shape, f"i{i}_") for i, shape in enumerate(call.operands))
    results = tuple(one(shape, f"o{i}_") for i, shape in enumerate(call.results))
    whole = frozenset(n for n in sizes if not n.startswith("d")) | {
        f"d{d}" for d in range(rank) if d in dims
    }
    reason = "it cuts, joins or pads every dimension"
    return Notation(operands, results, sizes, whole & frozenset(sizes), reason=reason)
