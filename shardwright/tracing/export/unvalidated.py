"""Turns off the checks of arguments of `torch.distributions` during a trace.

They raise or do nothing, depending on values, which a trace does not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributions import Distribution, Normal


@contextmanager
def unvalidated() -> Iterator[None]:
    """A context in which distributions do not check their arguments unless the model asks them."""
    checked = _are_checked()
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(checked)


def _are_checked() -> bool:
    """Whether distributions check their arguments by default."""
    try:
        # A caller's `with torch.device("meta")` must not reach these values.
        Normal(torch.zeros((), device="cpu"), -torch.ones((), device="cpu"))
    except ValueError:
        return True
    return False
