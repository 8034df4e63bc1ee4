"""Rules of products, convolutions, recurrent layers, attention and embedding look-ups."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from math import prod

from shardwright.ir.graph import Arg
from shardwright.rules.call import Call
from shardwright.rules.notation import Notation, parse
from shardwright.rules.operators.steps import (
    EVERY,
    EXPERTS_BIASES,
    EXPERTS_PRODUCT,
    EXPERTS_STEPS,
    EXPERTS_TURNED,
)

_SUM, _MAX = 0, 2  # of bags of embeddings, as torch numbers them


def matmul(call: Call) -> Notation:
    """`torch.matmul`, with broadcasting batch dimensions and vector operands."""
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


def _convolved(call: Call) -> tuple[str, Arg, Iterator[str]]:
    """The batch or nothing, groups, and the dimensions of kernel, input and output."""
    spatial = len(call.operands[1]) - 2
    batch = "b" if len(call.operands[0]) == spatial + 2 else ""
    places = (" ".join(f"{letter}{i}!" for i in range(spatial)) for letter in ("k", "y", "q"))
    return batch, call.arg(6, "groups", 1), places


def convolution(call: Call) -> Notation:
    """`conv1d/2d/3d`: batch and output channels are parallel, input channels are summed.

    The batch may be missing.
    """
    b, groups, (kernel, inside, outside) = _convolved(call)
    sizes = {"g": groups} if isinstance(groups, int) and groups > 1 else {"g": 1}
    text = f"{b} (g c) {inside}, (g o) c {kernel}, +(g o) -> {b} (g o) {outside}"
    work = f"{b} g c o {kernel} {outside}".replace("!", "")
    return parse(text, call.operands, call.results, sizes=sizes, work=work)


def transposed_convolution(call: Call) -> Notation:
    """`conv_transpose1d/2d/3d`: its weight is (input channels, output channels per group, ...)."""
    b, groups, (kernel, inside, outside) = _convolved(call)
    assert isinstance(groups, int)
    text = f"{b} (g c) {inside}, (g c) o {kernel}, +(g o) -> {b} (g o) {outside}"
    work = f"{b} g c o {kernel} {inside}".replace("!", "")
    return parse(text, call.operands, call.results, sizes={"g": groups}, work=work)


def bilinear(call: Call) -> Notation:
    """`xᵀ W y + b` over leading dimensions."""
    return parse("... i, ... j, o i j, +o -> ... o", call.operands, call.results, work="... i j o")


def attention(call: Call) -> Notation | None:
    """Scaled dot-product attention.

    The softmax runs over keys, so the length of keys is split only together with that of queries,
    by devices that send keys around a ring (ring attention). Under a causal mask late queries cost
    more than early ones; splitting `z` gives every device some of both (zigzag). With dropout and a
    causal mask queries are not split, because the kernel numbers its random draws from query zero.
    """
    causal, drops = call.arg(5, "is_causal", False), call.arg(4, "dropout_p", 0.0)
    grouped = call.arg(7, "enable_gqa", False)
    query = "l!" if causal and drops else "l"
    rank = len(call.operands[0])
    if rank < 3 or any(len(shape) != rank for shape in call.operands[:3]):
        return None
    heads, sizes = "h", {}
    if grouped and call.operands[0][-3] != call.operands[1][-3]:
        heads = "(h r)"
        sizes = {"h": call.operands[1][-3]}
        if len(call.operands) > 3 and call.operands[3][-3:-2] not in ((), (1,)):
            return None
    mask = ["...", "h", query, "t!"][-len(call.operands[3]) :] if len(call.operands) > 3 else []
    text = (
        f"... {heads} {query} e!, ... h s! e!, ... h s! f!, {' '.join(mask)}"
        f" -> ... {heads} {query} f!"
    )
    one = parse(text, call.operands, call.results, sizes=sizes, work="... h r l s e")
    queries, keys = (one.sizes.get(name, 1) for name in "ls")
    joint_splits: tuple[tuple[str, ...], ...] = ()
    if not drops and not causal and min(queries, keys) > 1:
        joint_splits = (("l", "s"),)
    elif not drops and queries == keys > 1:
        joint_splits = (("l", "z"), ("l", "s", "z"))
        one = replace(one, sizes={**one.sizes, "z": queries}, whole=one.whole | {"z"})
    return replace(one, work_repeats=2, joint_splits=joint_splits)


def embedding(call: Call) -> Notation:
    """Embedding; if rows of the table are split, look-ups of other devices' rows give zeros.

    With `scale_grad_by_freq` gradients depend on the frequency of rows, so indices stay whole.
    """
    whole = "!" if call.arg(3, "scale_grad_by_freq", False) else ""
    indices = " ".join(f"i{d}{whole}" for d in range(len(call.operands[1])))
    return parse(f"v h, {indices} -> {indices} h", call.operands, call.results)


def embedding_bags(call: Call) -> Notation:
    """Embedding bags; if rows of the table are split, look-ups of other rows add zeros.

    Bags of different lengths, given by offsets, are not split. The look-ups of one bag may be split
    only in mode "sum", and the table not in mode "max". With `scale_grad_by_freq` only the width
    may be split.
    """
    mode, _, _, scale = call.op.args[4:8]
    table = "v!" if scale or mode == _MAX else "v"
    if len(call.operands[1]) == 1:
        bags, given = "b!", ["n!", "o!", "n!"]
    else:
        bags = "b!" if scale else "b"
        given = [f"{bags} {'l' if mode == _SUM and not scale else 'l!'}"] * 2
    operands = [f"{table} h", *given]
    text = f"{', '.join(operands[: len(call.operands)])} -> {bags} h"
    return parse(text, call.operands, call.results)


def experts(call: Call) -> Notation:
    """A mixture of experts: tokens are parallel; experts and their inner features are summed.

    Tokens and experts may be split along one axis, with tokens sent to the devices of their
    experts. The two parts of a gated inner layer, which are halves or every second feature, are
    split in the same way. Torch's grouped matrix product needs rows of a multiple of 16 bytes.
    """
    turned, product = call.op.args[EXPERTS_TURNED], call.op.args[EXPERTS_PRODUCT]
    assert isinstance(turned, tuple) and isinstance(product, str)
    steps = json.loads(str(call.op.args[EXPERTS_STEPS]))
    (_, *up), (_, *down) = call.operands[3:5]
    inner = down[1 if turned[1] else 0]
    halves = up[0 if turned[0] else 1] // inner
    aligned = "_grouped_mm" in product
    unit = "m" if not aligned else "m a!" if inner % 16 == 0 else "m!"
    parts = f"({unit} g!)" if any(step[0] == EVERY for step in steps) else f"(g! {unit})"
    of_up = [parts, "h!"]
    of_down = ["o!", f"({unit})"]
    words = [
        " ".join(words if t else reversed(words))
        for words, t in zip((of_up, of_down), turned, strict=True)
    ]
    sizes = {"g": halves, **({"a": 16} if "a!" in unit else {})}
    tiles = " a" if "a!" in unit else ""
    biases = zip((f"e {parts}", "+e o!"), call.op.args[EXPERTS_BIASES], strict=False)
    operands = [f"e {words[0]}", f"e {words[1]}", *(text for text, bias in biases if bias)]
    one = parse(
        f"n h!, n k!, n k!, {', '.join(operands)} -> n o!",
        call.operands,
        call.results,
        sizes=sizes,
        work=f"n k m{tiles} h",
    )
    return replace(one, work_repeats=halves + 1, routes=(("n", "e"),))


def chunked_mlp(call: Call) -> Notation:
    """An MLP: rows are parallel, inner features are terms of a sum, other features stay whole.

    The steps between its products work element by element (`rules/operators/mlp_chunks.py`). The
    parts of a product that these split are split in the same way.
    """
    _, ups, biases, _, bias, turned, *_ = call.op.args
    assert isinstance(ups, tuple) and isinstance(biases, tuple) and isinstance(turned, tuple)
    down = call.operands[len(call.operands) - 1 - (bias is not None)]
    inner = down[1 if turned[-1] else 0]
    shapes = call.operands[1 : len(ups) + 1]
    parts = [up[0 if t else 1] // inner for up, t in zip(shapes, turned, strict=False)]
    features = [f"(g{i}! i)" if count > 1 else "i" for i, count in enumerate(parts)]
    words = ["... h!"]
    words += [f"{i} h!" if t else f"h! {i}" for i, t in zip(features, turned, strict=False)]
    words += [i for i, one in zip(features, biases, strict=True) if one is not None]
    words += ["o! i" if turned[-1] else "i o!", *(["+o!"] if bias is not None else [])]
    one = parse(
        f"{', '.join(words)} -> ... o!",
        call.operands,
        call.results,
        sizes={f"g{i}": count for i, count in enumerate(parts) if count > 1},
        work="... h i",
        reason="every device needs all features of a row for its part of the inner ones",
    )
    return replace(one, work_repeats=sum(parts) + 1)


def grouped_mm(call: Call) -> Notation | None:
    """Grouped matrix product, one matrix per run of tokens: columns parallel, inner dim summed.

    The runs depend on the values of the offsets, so tokens and experts are not split.
    """
    if [len(shape) for shape in call.operands] != [2, 3, 1]:
        return None
    return parse("t! k, e! k n, e! -> t! n", call.operands, call.results, work="t k n")


def aligned_grouped_mm(call: Call) -> Notation | None:
    """`grouped_mm` by torch's kernel, which needs rows of 16 bytes: tiles of 16 elements."""
    if [len(shape) for shape in call.operands] != [2, 3, 1]:
        return None
    inner, outer = call.operands[1][1:]
    k, n = ("(k a!)" if inner % 16 == 0 else "k!"), ("(n b!)" if outer % 16 == 0 else "n!")
    text = f"t! {k}, e! {k} {n}, e! -> t! {n}"
    tiles = [name for name in "ab" if f"{name}!" in text]
    return parse(
        text,
        call.operands,
        call.results,
        sizes=dict.fromkeys(tiles, 16),
        work=" ".join(["t k n", *tiles]),
    )


def recurrent_layers(call: Call) -> Notation | None:
    """`lstm`, `gru`, `rnn_tanh`, `rnn_relu` over (time, batch, features) or (batch, time, ...).

    The batch is parallel, time and state are whole.
    """
    if len(call.operands[0]) != 3:  # packed sequences have no batch dimension
        return None
    batch_first = call.op.args[8]
    hidden = call.op.args[1]
    states = len(hidden) if isinstance(hidden, tuple) else 1
    x, out = ("b t! i!", "b t! o!") if batch_first else ("t! b i!", "t! b o!")
    parts = [x, *(f"l! b h{s}!" for s in range(states))]
    weights = call.operands[1 + states :]
    parts += [" ".join(f"w{w}d{d}!" for d in range(len(shape))) for w, shape in enumerate(weights)]
    results = [out, *(f"l! b h{s}!" for s in range(states))]
    matrices = {w: shape for w, shape in enumerate(weights) if len(shape) == 2}
    first = min(matrices)
    one = parse(
        f"{', '.join(parts)} -> {', '.join(results)}",
        call.operands,
        call.results,
        work=f"t b w{first}d0 w{first}d1",
    )
    repeats = sum(map(prod, matrices.values())) / prod(matrices[first])
    return replace(one, work_repeats=max(1, round(repeats)))
