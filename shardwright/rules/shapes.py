"""Rules of operators whose arguments decide about their notation: views, norms, attention…

Every function takes the call and gives its `Notation`, or None where this form
of the call has no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd

from shardwright.ir.graph import Arg, Graph, Op
from shardwright.rules.notation import Notation, Shape, elementwise, parse, reshape


class Call:
    """One operator call with its shapes at hand."""

    def __init__(self, graph: Graph, op: Op) -> None:
        self.graph = graph
        self.op = op
        self.operands: list[Shape] = [graph.tensor[name].shape for name in op.operands]
        self.results: list[Shape] = [graph.tensor[name].shape for name in op.outputs]

    def arg(self, index: int, name: str, default: Arg = None) -> Arg:
        """Positional argument `index`, or keyword `name`, or the default."""
        if index < len(self.op.args):
            return self.op.args[index]
        return dict(self.op.kwargs).get(name, default)

    def dim(self, index: int, name: str = "dim", default: int = 0) -> int:
        """The argument `dim`, counted from the front of the first operand."""
        value = self.arg(index, name, default)
        assert isinstance(value, int)
        return value % max(1, len(self.operands[0]))

    @property
    def floating(self) -> bool:
        """Whether the first operand and result can be partial sums."""
        first = self.graph.tensor[self.op.operands[0]]
        out = self.graph.tensor[self.op.outputs[0]]
        return first.dtype == out.dtype and "float" in first.dtype


Builder = Callable[[Call], Notation | None]


def view(call: Call) -> Notation:
    """Views and reshapes."""
    return reshape(call.operands[0], call.results[0])


def permute(call: Call) -> Notation:
    """Dimensions in another order."""
    dims = call.op.args[1]
    assert isinstance(dims, tuple)
    return _moved(call, [int(d) for d in dims])  # type: ignore[arg-type]


def transpose(call: Call) -> Notation:
    """Two dimensions exchanged; of a vector, itself."""
    rank = len(call.operands[0])
    order = list(range(rank))
    if rank >= 2:
        a, b = (int(call.arg(i, "", i - 1)) % rank for i in (1, 2))  # type: ignore[arg-type]
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


def squeeze(call: Call) -> Notation:
    """`squeeze` and `unsqueeze`: only dimensions of size one come or go."""
    return reshape(call.operands[0], call.results[0])


def expand(call: Call) -> Notation:
    """Dimensions of size one, or new ones, repeated."""
    return elementwise(call.operands, call.results[0])


def fill_shape(call: Call) -> Notation:
    """`full`, `zeros`, `new_zeros` …: every element is the same, whichever part it is of."""
    one = elementwise([], call.results[0])
    return replace(one, operands=tuple(((),) * len(shape) for shape in call.operands))


def arange(call: Call) -> Notation:
    """Positions: every device counts all of them."""
    return elementwise([], call.results[0], whole=range(len(call.results[0])))


def slice_(call: Call) -> Notation:
    """A slice that is one of equal chunks keeps the index inside the chunk; others are whole."""
    dim = call.dim(1)
    size, length = call.operands[0][dim], call.results[0][dim]
    start = int(call.arg(2, "start") or 0)  # type: ignore[arg-type]
    start = max(0, start + size if start < 0 else start)
    step = call.arg(4, "step", 1)
    if length == size:
        return elementwise(call.operands, call.results[0], linear=[[0]])
    if step == 1 and length > 0 and size % length == 0 and start % length == 0:
        return _chunks(call, dim, length)
    return _opaque(call, dim)


def split(call: Call) -> Notation | None:
    """`split`, `chunk`, `unbind` into pieces that share a common size."""
    dim = call.dim(2)
    return _chunks(call, dim, gcd(*(shape[dim] for shape in call.results)))


def unbind(call: Call) -> Notation:
    """Slices along one dimension, which must be whole."""
    return _without_dim(call, call.dim(1))


def select(call: Call) -> Notation:
    """One slice along a dimension, which must be whole."""
    return _without_dim(call, call.dim(1))


def _without_dim(call: Call, dim: int) -> Notation:
    one = elementwise([call.operands[0]], call.operands[0], whole=[dim])
    kept = tuple(names for d, names in enumerate(one.operands[0]) if d != dim)
    return replace(one, results=(kept,) * len(call.results), linear=(frozenset({0}),))


def _chunks(call: Call, dim: int, chunk: int) -> Notation:
    """Dimension `dim` is (n c) with c the chunk; each result has some whole chunks of it."""
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


def _opaque(call: Call, *dims: int) -> Notation:
    """All operands and results alike but for `dims`, which nobody may split."""
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
    return Notation(operands, results, sizes, whole & frozenset(sizes))


def pad(call: Call) -> Notation:
    """Padding: padded dimensions are new ones, and whole."""
    before, after = call.operands[0], call.results[0]
    changed = [d for d in range(len(before)) if before[d] != after[d]]
    return _opaque(call, *changed)


def cat(call: Call) -> Notation:
    """Equal parts make a dimension (n c); unequal ones leave it whole."""
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
    """A new dimension, one part each."""
    rank = len(call.operands[0]) + 1
    dim = int(call.arg(1, "dim", 0)) % rank  # type: ignore[arg-type]
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


def reduction(call: Call) -> Notation:
    """Reductions that are no sums: what they reduce stays whole."""
    return _reduced(call, summed=False)


def sum_(call: Call) -> Notation:
    """Sums: what is summed may be split, and leaves partial sums."""
    return _reduced(call, summed=True)


def _reduced(call: Call, *, summed: bool) -> Notation:
    shape = call.operands[0]
    given = call.arg(1, "dim")
    dims = (given,) if isinstance(given, int) and not isinstance(given, bool) else given
    chosen = {int(d) % len(shape) for d in dims} if isinstance(dims, tuple) and dims else set()  # type: ignore[arg-type]
    chosen = chosen or set(range(len(shape)))
    one = elementwise([shape], shape, whole=() if summed else sorted(chosen))
    keep = len(call.results[0]) == len(shape)
    result = tuple(
        () if d in chosen else names
        for d, names in enumerate(one.operands[0])
        if keep or d not in chosen
    )
    linear = (frozenset({0}),) if summed and call.floating else ()
    return replace(one, results=(result,) * len(call.results), linear=linear)


def along_dim(call: Call) -> Notation:
    """Operators that keep the shape and mix along given dimensions."""
    given = call.arg(2 if call.op.kind == "roll" else 1, "dim", -1)
    rank = len(call.operands[0])
    if isinstance(given, tuple):
        chosen = [int(d) % rank for d in given]  # type: ignore[arg-type]
    elif isinstance(given, int) and not isinstance(given, bool):
        chosen = [given % max(rank, 1)]
    else:
        chosen = list(range(rank))
    one = elementwise(call.operands, call.results[0], whole=chosen if rank else ())
    return replace(one, results=one.results * len(call.results))


def layer_norm(call: Call) -> Notation:
    """Norms over the trailing dimensions."""
    normalized = call.op.args[1]
    count = len(normalized) if isinstance(normalized, tuple) else 1
    names = " ".join(f"n{i}!" for i in range(count))
    rest = ", ".join(f"{names}" for _ in call.operands[1:])
    text = f"... {names}{', ' + rest if rest else ''} -> ... {names}"
    return parse(text, call.operands, call.results)


def embedding(call: Call) -> Notation:
    """Rows of a table; the whole table at every place, its columns may be split."""
    indices = " ".join(f"i{d}" for d in range(len(call.operands[1])))
    return parse(f"v! h, {indices} -> {indices} h", call.operands, call.results)


def convolution(call: Call) -> Notation | None:
    """`conv1d/2d/3d`: batch and output channels are parallel, input channels are summed."""
    spatial = len(call.operands[1]) - 2
    if len(call.operands[0]) != spatial + 2:
        return None
    groups = call.arg(6, "groups", 1)
    kernel, inside, outside = (
        " ".join(f"{letter}{i}!" for i in range(spatial)) for letter in ("k", "y", "q")
    )
    sizes = {"g": groups} if isinstance(groups, int) and groups > 1 else {"g": 1}
    text = f"b (g c) {inside}, (g o) c {kernel}, +(g o) -> b (g o) {outside}"
    work = f"b g c o {kernel} {outside}".replace("!", "")
    return parse(text, call.operands, call.results, sizes=sizes, work=work)


def matmul(call: Call) -> Notation:
    """`torch.matmul` with its broadcasting batch dimensions and its vectors."""
    left = "k" if len(call.operands[0]) == 1 else "... m k"
    right = "k" if len(call.operands[1]) == 1 else "... k n"
    result = " ".join(
        word
        for word, there in (
            ("...", "..." in left or "..." in right),
            ("m", "m" in left),
            ("n", "n" in right),
        )
        if there
    )
    return parse(f"{left}, {right} -> {result}", call.operands, call.results, work="... m k n")


def addmm(call: Call) -> Notation:
    """A matrix product with a bias added."""
    bias = " ".join(["m", "n"][-len(call.operands[0]) :]) if call.operands[0] else ""
    return parse(f"+{bias}, m k, k n -> m n", call.operands, call.results, work="m k n")


def baddbmm(call: Call) -> Notation:
    """Batched matrix products with a bias added."""
    bias = " ".join(["b", "m", "n"][3 - len(call.operands[0]) :])
    return parse(f"+{bias}, b m k, b k n -> b m n", call.operands, call.results, work="b m k n")


def attention(call: Call) -> Notation | None:
    """Scaled dot-product attention.

    Keys are normalised over, so their length stays whole; under a causal flag so
    does the queries', because the kernel counts both from zero.
    """
    causal = call.arg(5, "is_causal", False)
    grouped = call.arg(7, "enable_gqa", False)
    query = "l!" if causal else "l"
    rank = len(call.operands[0])
    if rank < 3 or any(len(shape) != rank for shape in call.operands[:3]):
        return None
    heads, sizes = "h", {}
    if grouped and call.operands[0][-3] != call.operands[1][-3]:
        heads = "(h r)"
        sizes = {"h": call.operands[1][-3]}
        if len(call.operands) > 3 and call.operands[3][-3:-2] not in ((), (1,)):
            return None
    mask = ["...", "h", query, "s!"][-len(call.operands[3]) :] if len(call.operands) > 3 else []
    text = (
        f"... {heads} {query} e!, ... h s! e!, ... h s! f!, {' '.join(mask)}"
        f" -> ... {heads} {query} f!"
    )
    one = parse(text, call.operands, call.results, sizes=sizes, work="... h r l s e")
    return replace(one, work_repeats=2)


def cross_entropy(call: Call) -> Notation | None:
    """Summed or unreduced cross entropy: classes stay whole, samples are summed."""
    logits, target = call.operands[:2]
    names = ["c!"] if len(logits) == 1 else ["n", "c!", *(f"s{i}" for i in range(len(logits) - 2))]
    sampled = names if len(target) == len(logits) else [n for n in names if n != "c!"]
    text = f"{' '.join(names)}, {' '.join(sampled)}, c! -> "
    if call.results[0]:
        text += " ".join(n for n in names if n != "c!")
    return parse(text, call.operands, call.results)


def elementwise_loss(call: Call) -> Notation:
    """A loss between tensors of one shape, summed or per element."""
    shape = max(call.operands, key=len)
    one = elementwise(call.operands, shape)
    return one if call.results[0] else replace(one, results=((),))


def add(call: Call) -> Notation:
    """Sums of two tensors let partial sums through when both are."""
    both = len(call.operands) == 2 and call.floating
    return elementwise(call.operands, call.results[0], linear=[[0, 1]] if both else [])


def mul(call: Call) -> Notation:
    """Products let partial sums of either factor through."""
    linear = [[i] for i in range(len(call.operands))] if call.floating else []
    return elementwise(call.operands, call.results[0], linear=linear)


def div(call: Call) -> Notation:
    """Quotients let partial sums of the dividend through."""
    rounded = dict(call.op.kwargs).get("rounding_mode") is not None
    linear = [[0]] if call.floating and not rounded and _divides(call) else []
    return elementwise(call.operands, call.results[0], linear=linear)


def _divides(call: Call) -> bool:
    """Whether the first operand is the dividend: not in `2.0 / x`."""
    return bool(call.op.args) and not isinstance(call.op.args[0], int | float)


def where(call: Call) -> Notation:
    """A choice between tensors lets partial sums through when both are."""
    dtypes = [call.graph.tensor[name].dtype for name in call.op.operands]
    linear = (
        [[1, 2]] if len(dtypes) == 3 and dtypes[1] == dtypes[2] and "float" in dtypes[1] else []
    )
    return elementwise(call.operands, call.results[0], linear=linear)


def dropout(call: Call) -> Notation:
    """A mask times a tensor: linear in the tensor."""
    return elementwise(call.operands, call.results[0], linear=[[0]] if call.floating else [])


BUILDERS: dict[str, Builder] = {
    "view": view,
    "_unsafe_view": view,
    "reshape": view,
    "flatten": view,
    "unflatten": view,
    "squeeze": squeeze,
    "unsqueeze": squeeze,
    "permute": permute,
    "transpose": transpose,
    "t": transpose,
    "expand": expand,
    "full": fill_shape,
    "zeros": fill_shape,
    "ones": fill_shape,
    "empty": fill_shape,
    "new_zeros": fill_shape,
    "new_ones": fill_shape,
    "new_full": fill_shape,
    "scalar_tensor": fill_shape,
    "arange": arange,
    "slice": slice_,
    "split": split,
    "split_with_sizes": split,
    "chunk": split,
    "unbind": unbind,
    "select": select,
    "pad": pad,
    "constant_pad_nd": pad,
    "cat": cat,
    "stack": stack,
    "repeat": repeat,
    "sum": sum_,
    "layer_norm": layer_norm,
    "rms_norm": layer_norm,
    "embedding": embedding,
    "conv1d": convolution,
    "conv2d": convolution,
    "conv3d": convolution,
    "matmul": matmul,
    "addmm": addmm,
    "baddbmm": baddbmm,
    "scaled_dot_product_attention": attention,
    "cross_entropy_loss": cross_entropy,
    "nll_loss_nd": cross_entropy,
    "add": add,
    "sub": add,
    "mul": mul,
    "div": div,
    "where": where,
    "dropout": dropout,
}
