"""Shampoo (Gupta, Koren and Singer, arXiv 1802.09568), as an optimizer of a user."""

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardwright.ir.options.optimizer_spec import MatrixUpdate, OptimizerSpec


def flop(rows, columns):
    products = 2 * (2 * rows * columns) * (rows + columns)
    return products + 10 * (rows**3 + columns**3)  # eigenvalues and roots


SHAMPOO = OptimizerSpec(
    *("shampoo", "Adagrad", 1, 4, 12, 1, 1),
    matrix=MatrixUpdate(
        torch_class="",
        state_tensors=0,
        passes=3,
        calls=10,
        flop=flop,
        temporaries=lambda rows, columns: 2 * rows * columns + 2 * max(rows, columns) ** 2,
        kept=lambda rows, columns: rows**2 + columns**2,
    ),
)


class Shampoo(torch.optim.Optimizer):
    """Whole matrices are preconditioned on both sides, other parameters are Adagrad's."""

    def __init__(self, parameters, lr=0.01, eps=1e-3):
        super().__init__(parameters, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() == 2:
                    self._matrix(p, group["lr"], group["eps"])
                elif p.grad is not None:
                    total = self.state[p].setdefault("sum", torch.zeros_like(p.grad))
                    total.add_(p.grad * p.grad)
                    p.add_(p.grad / (total.sqrt() + group["eps"]), alpha=-group["lr"])

    def _matrix(self, p, lr, eps):
        g = p.grad.full_tensor() if isinstance(p, DTensor) else p.grad
        state = self.state[p]
        if not state:
            state["left"], state["right"] = (eps * torch.eye(n, dtype=g.dtype) for n in g.shape)
        state["left"].add_(g @ g.T)
        state["right"].add_(g.T @ g)
        update = _root(state["left"]) @ g @ _root(state["right"])
        if isinstance(p, DTensor):
            mesh = p.device_mesh
            update = DTensor.from_local(update, mesh, [Replicate()] * mesh.ndim, run_check=False)
        p.add_(update, alpha=-lr)


def _root(x):
    """X to the power of -1/4."""
    values, vectors = torch.linalg.eigh(x)
    return vectors @ (values.clamp_min(1e-12) ** -0.25).diag() @ vectors.T
