"""The error of a training config that cannot be read or written."""

from __future__ import annotations


class FrameworkError(ValueError):
    """A training config that cannot be read, contradicts itself, or cannot be written."""
