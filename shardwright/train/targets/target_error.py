"""The error of a TARGET that names no job."""


class TargetError(ValueError):
    """The TARGET does not name a job."""
