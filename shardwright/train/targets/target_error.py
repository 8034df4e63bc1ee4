"""The error of a TARGET that leads to no job."""


class TargetError(ValueError):
    """A TARGET that does not lead to a job."""
