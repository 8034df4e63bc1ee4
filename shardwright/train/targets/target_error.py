"""Defines the error of a TARGET that gives no job."""


class TargetError(ValueError):
    """The TARGET is missing, cannot be read, or gives no job."""
