"""Rules of recurrent layers: the batch is parallel, time and state are whole."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from shardwright.rules.call import Call
from shardwright.rules.notation import Notation, parse


def layers(call: Call) -> Notation | None:
    """`lstm`, `gru`, `rnn_tanh`, `rnn_relu` over (time, batch, features) or (batch, time, ...)."""
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
