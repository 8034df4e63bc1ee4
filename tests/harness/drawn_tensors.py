"""Tensors drawn for calls of operators, always the same in the same order."""

import torch

_generator = torch.Generator().manual_seed(0)


def f(*shape):
    """Floating-point numbers around zero."""
    return torch.randn(shape, generator=_generator, dtype=torch.float64).requires_grad_()


def u(*shape):
    """Floating-point numbers well inside of (0, 1), where every function is defined."""
    x = torch.rand(shape, generator=_generator, dtype=torch.float64)
    return (0.1 + 0.8 * x).requires_grad_()


def z(*shape):
    """Complex numbers around zero."""
    return torch.randn(shape, generator=_generator, dtype=torch.complex128).requires_grad_()


def i(*shape, below=9):
    return torch.randint(below, shape, generator=_generator)


def b(*shape):
    return torch.randint(2, shape, generator=_generator).bool()


def recurrent(gates, *, inside=3, state=4, layers=1, directions=1, biases=True):
    """Weights of a recurrent layer as torch wants them: one flat list."""
    found = []
    for layer in range(layers):
        for _ in range(directions):
            width = inside if layer == 0 else directions * state
            found += [f(gates * state, width), f(gates * state, state)]
            found += [f(gates * state), f(gates * state)] if biases else []
    return found


def infinite(*shape):
    """Numbers around zero, the last row all of minus infinity but for one of infinity."""
    x = torch.randn(shape, generator=_generator, dtype=torch.float64)
    x[-1], x[-1, 2] = -torch.inf, torch.inf
    return x.requires_grad_()
