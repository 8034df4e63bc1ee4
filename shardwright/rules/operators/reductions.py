"""Rules of reductions, norms, losses and operators that mix along a dimension."""

from __future__ import annotations

from dataclasses import replace

from shardwright.ir.graph import Op, whole_numbers
from shardwright.rules.call import Call
from shardwright.rules.notation import Notation, elementwise, parse

# Reductions of floating-point numbers whose split dimensions are reduced inside the operator.
JOINT = ("amax", "amin", "max", "min", "logsumexp", "prod")


def sum_(call: Call) -> Notation:
    """Sums: summed dimensions may be split, which leaves partial sums."""
    return _reduced(call, summed=True)


def reduction(call: Call) -> Notation:
    """Reductions other than sums: reduced dimensions are not split, or are reduced internally.

    The internal reductions are of the result and of the number of elements that attain it.
    """
    one = call.graph.tensor[call.op.operands[0]]
    alone = len(call.results) == 1 and not dict(call.op.kwargs).get("dtype")
    if call.op.kind not in JOINT or not alone or not call.floating or not one.shape:
        return _reduced(call, summed=False)
    found = replace(_reduced(call, summed=True), linear=())
    return replace(found, internal_reductions=(found.results[0],) * 2)


def reduced_dims(op: Op, rank: int) -> set[int]:
    """The dimensions of its operand that a reduction reduces, from its argument `dim`."""
    given = op.args[1] if len(op.args) > 1 else dict(op.kwargs).get("dim")
    dims = (given,) if isinstance(given, int) and not isinstance(given, bool) else given
    chosen = {d % rank for d in whole_numbers(dims)} if isinstance(dims, tuple) else set()
    return chosen or set(range(rank))


def _reduced(call: Call, *, summed: bool) -> Notation:
    """The notation of a reduction; only sums pass partial sums on."""
    shape = call.operands[0]
    if not shape:  # of a scalar, torch accepts dimension 0
        return Notation(((),), ((),) * len(call.results), {})
    chosen = reduced_dims(call.op, len(shape))
    reason = "it reduces every dimension, and is no sum"
    one = elementwise([shape], shape, whole=() if summed else sorted(chosen), reason=reason)
    keep = len(call.results[0]) == len(shape)
    result = tuple(
        () if d in chosen else names
        for d, names in enumerate(one.operands[0])
        if keep or d not in chosen
    )
    linear = (frozenset({0}),) if summed and call.floating else ()
    return replace(one, results=(result,) * len(call.results), linear=linear)


def along_dim(call: Call) -> Notation:
    """Operators that keep the shape and mix elements along the dimensions in `dim`."""
    given = call.arg(1, "dim", -1)
    if call.op.kind == "roll":  # without `dims` it rolls the flattened tensor
        given = call.arg(2, "dims") or None
    rank = len(call.operands[0])
    if isinstance(given, tuple):
        chosen = [d % max(rank, 1) for d in whole_numbers(given)]
    elif isinstance(given, int) and not isinstance(given, bool):
        chosen = [given % max(rank, 1)]
    else:
        chosen = list(range(rank))
    whole, reason = chosen if rank else (), "it works along every dimension"
    one = elementwise(call.operands, call.results[0], whole=whole, reason=reason)
    return replace(one, results=one.results * len(call.results))


def layer_norm(call: Call) -> Notation:
    """Norms over the trailing dimensions."""
    normalized = call.op.args[1]
    count = len(normalized) if isinstance(normalized, tuple) else 1
    names = " ".join(f"n{i}!" for i in range(count))
    rest = ", ".join(f"{names}" for _ in call.operands[1:])
    text = f"... {names}{', ' + rest if rest else ''} -> ... {names}"
    return parse(text, call.operands, call.results, reason="it normalizes over every dimension")


def local_batch_norm(call: Call) -> Notation:
    """Batch norm with statistics of the local batch; its buffer updates are partial sums."""
    positions = " ".join(f"s{i}!" for i in range(len(call.operands[0]) - 2))
    text = f"n c {positions}, c, c -> n c {positions}, p! c, p! c, q! c"
    return parse(text, call.operands, call.results)


def group_norm(call: Call) -> Notation:
    """Norms over each group of channels and all positions, sample by sample."""
    groups = call.op.args[1]
    assert isinstance(groups, int)
    positions = " ".join(f"s{i}!" for i in range(len(call.operands[0]) - 2))
    text = f"n (g c!) {positions}, (g c!), (g c!) -> n (g c!) {positions}"
    return parse(text, call.operands, call.results, sizes={"g": groups})


def extremum(call: Call) -> Notation:
    """`min` and `max`, of one tensor over dimensions or of two element by element."""
    if len(call.operands) == 2:
        return elementwise(call.operands, call.results[0])
    return reduction(call)


def cross_entropy(call: Call) -> Notation:
    """Summed or unreduced cross entropy.

    Each device computes the terms of its own classes, after the largest logit and the sum of
    exponentials of every sample are all-reduced.
    """
    found = _per_class(call, "c")
    sampled = tuple(names for names in found.operands[0] if names != ("c",))
    return replace(found, internal_reductions=(sampled, sampled))


def linear_cross_entropy(call: Call) -> Notation:
    """A projection and its summed cross entropy: tokens and classes are summed, features whole.

    Each device computes the terms of its own classes, as in `cross_entropy`.
    """
    words = ("n h!", "c h!", "c", "n", "c")  # hidden states, weight, bias, target, class weights
    given = [word for word, arg in zip(words, call.op.args, strict=False) if arg is not None]
    reason = "every device needs all features of a token for its logits"
    text = f"{', '.join(given)} -> "
    found = parse(text, call.operands, call.results, work="n c h", reason=reason)
    sampled = found.operands[given.index("n")]
    return replace(found, internal_reductions=(sampled, sampled))


def nll_loss(call: Call) -> Notation:
    """Negative log-likelihood of log-probabilities: classes stay whole."""
    return _per_class(call, "c!")


def _per_class(call: Call, c: str) -> Notation:
    logits, target = call.operands[:2]
    names = [c] if len(logits) == 1 else ["n", c, *(f"s{i}" for i in range(len(logits) - 2))]
    sampled = names if len(target) == len(logits) else [n for n in names if n != c]
    text = f"{' '.join(names)}, {' '.join(sampled)}, {c} -> "
    if call.results[0]:
        text += " ".join(n for n in names if n != c)
    return parse(text, call.operands, call.results)


def elementwise_loss(call: Call) -> Notation:
    """A loss between tensors that broadcast, summed or per element."""
    rank = max(len(shape) for shape in call.operands)
    padded = [(1,) * (rank - len(shape)) + shape for shape in call.operands]
    one = elementwise(call.operands, tuple(map(max, *padded)))
    return one if call.results[0] else replace(one, results=((),))
