"""Rules of products, convolutions, attention and embedding look-ups."""

from __future__ import annotations

from dataclasses import replace

from shardwright.rules.call import Call
from shardwright.rules.notation import Notation, parse

_SUM, _MAX = 0, 2  # of bags of embeddings, as torch numbers them


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


def convolution(call: Call) -> Notation:
    """`conv1d/2d/3d`: batch and output channels are parallel, input channels are summed.

    The batch may be missing.
    """
    spatial = len(call.operands[1]) - 2
    b = "b" if len(call.operands[0]) == spatial + 2 else ""
    groups = call.arg(6, "groups", 1)
    kernel, inside, outside = (
        " ".join(f"{letter}{i}!" for i in range(spatial)) for letter in ("k", "y", "q")
    )
    sizes = {"g": groups} if isinstance(groups, int) and groups > 1 else {"g": 1}
    text = f"{b} (g c) {inside}, (g o) c {kernel}, +(g o) -> {b} (g o) {outside}"
    work = f"{b} g c o {kernel} {outside}".replace("!", "")
    return parse(text, call.operands, call.results, sizes=sizes, work=work)


def transposed_convolution(call: Call) -> Notation:
    """`conv_transpose1d/2d/3d`: its weight is (input channels, output channels per group, ...)."""
    spatial = len(call.operands[1]) - 2
    b = "b" if len(call.operands[0]) == spatial + 2 else ""
    groups = call.arg(6, "groups", 1)
    kernel, inside, outside = (
        " ".join(f"{letter}{i}!" for i in range(spatial)) for letter in ("k", "y", "q")
    )
    assert isinstance(groups, int)
    text = f"{b} (g c) {inside}, (g c) o {kernel}, +(g o) -> {b} (g o) {outside}"
    work = f"{b} g c o {kernel} {inside}".replace("!", "")
    return parse(text, call.operands, call.results, sizes={"g": groups}, work=work)


def bilinear(call: Call) -> Notation:
    """`xᵀ W y + b` over leading dimensions."""
    return parse("... i, ... j, o i j, +o -> ... o", call.operands, call.results, work="... i j o")


def attention(call: Call) -> Notation | None:
    """Scaled dot-product attention.

    Keys are normalised over, so their length is cut only together with the queries', by devices
    that pass them around. Under a causal flag late queries have more to do than early ones: `z` is
    cut where every device has some of both. With dropout under a causal flag queries stay whole,
    because the kernel that draws counts them from zero.
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
    together: tuple[tuple[str, ...], ...] = ()
    if not drops and not causal and min(queries, keys) > 1:
        together = (("l", "s"),)
    elif not drops and queries == keys > 1:
        together = (("l", "z"), ("l", "s", "z"))
        one = replace(one, sizes={**one.sizes, "z": queries}, whole=one.whole | {"z"})
    return replace(one, work_repeats=2, together=together)


def embedding(call: Call) -> Notation:
    """Rows of a table, of which a device may hold some: look-ups of the others give zeros there.

    Gradients that are scaled by how often a row is looked up need all look-ups.
    """
    whole = "!" if call.arg(3, "scale_grad_by_freq", False) else ""
    indices = " ".join(f"i{d}{whole}" for d in range(len(call.operands[1])))
    return parse(f"v h, {indices} -> {indices} h", call.operands, call.results)


def embedding_bags(call: Call) -> Notation:
    """Bags of look-ups in a table, of which a device may hold some rows: others add zeros.

    Bags of several lengths, given by their offsets, stay together. So do the look-ups of one bag
    but in a sum, the table where the largest is wanted, and all but the width where gradients are
    scaled by how often a row is looked up.
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
    """A mixture of experts: each token is a row of its own, each expert a term of the sum.

    So is each inner unit. Tokens and experts may be cut together, and each token sent where its
    experts are. The halves of a gated inner layer stay together; torch's grouped product wants
    rows of whole 16 bytes.
    """
    turned, product, between = call.op.args[5:8]
    assert isinstance(turned, tuple) and isinstance(product, str) and isinstance(between, str)
    (_, *up), (_, *down) = call.operands[3:5]
    inner = down[1 if turned[1] else 0]
    halves = up[0 if turned[0] else 1] // inner
    aligned = "_grouped_mm" in product
    unit = "m" if not aligned else "m a!" if inner % 16 == 0 else "m!"
    of_up = [f"(g! {unit})", "h!"]
    of_down = ["o!", f"({unit})"]
    words = [
        " ".join(words if t else reversed(words))
        for words, t in zip((of_up, of_down), turned, strict=True)
    ]
    sizes = {"g": halves, **({"a": 16} if "a!" in unit else {})}
    tiles = " a" if "a!" in unit else ""
    one = parse(
        f"n h!, n k!, n k!, e {words[0]}, e {words[1]} -> n o!",
        call.operands,
        call.results,
        sizes=sizes,
        work=f"n k m{tiles} h",
    )
    return replace(one, work_repeats=halves + 1, routes=(("n", "e"),))


def grouped_mm(call: Call) -> Notation | None:
    """Each expert multiplies its own run of tokens: columns are parallel, the inner side is summed.

    Which tokens are whose only the offsets know, so tokens and experts stay whole.
    """
    if [len(shape) for shape in call.operands] != [2, 3, 1]:
        return None
    return parse("t! k, e! k n, e! -> t! n", call.operands, call.results, work="t k n")


def aligned_grouped_mm(call: Call) -> Notation | None:
    """The same by torch's kernel, which wants rows of whole 16 bytes: tiles of 16 elements."""
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
