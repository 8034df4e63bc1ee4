"""Muon: matrices by `torch.optim.Muon`, all other parameters by AdamW.

It orthogonalises the momentum of each matrix by five Newton-Schulz iterations in bfloat16 (Jordan
et al., "Muon: An optimizer for hidden layers in neural networks", 2024; Liu et al.,
arXiv 2502.16982), for which a sharded matrix is gathered.
"""

from __future__ import annotations

from shardwright.ir.options.optimizer_spec import MatrixUpdate, OptimizerSpec

_ITERATIONS = 5


def _flop(rows: int, columns: int) -> int:
    """Of an iteration two products of the small Gram matrix with the matrix, and its square."""
    small, large = sorted((rows, columns))
    return _ITERATIONS * (4 * small * small * large + 2 * small**3)


def _temporaries(rows: int, columns: int) -> int:
    """The matrix, the next one, the Gram matrix and its polynomial."""
    return 2 * rows * columns + 2 * min(rows, columns) ** 2


MUON = OptimizerSpec(
    name="muon",
    torch_class="AdamW",
    state_tensors=2,
    calls=8,
    passes=21,
    temporaries=2,
    foreach_temporaries=1,
    matrix=MatrixUpdate(
        torch_class="Muon",
        state_tensors=1,
        passes=13,
        calls=3 * _ITERATIONS + 3,
        flop=_flop,
        temporaries=_temporaries,
        dtype="bfloat16",
        options={"lr": 1e-3},
    ),
)
