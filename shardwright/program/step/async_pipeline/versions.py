"""Weight versions, and what one call of an asynchronous pipeline's program leaves to the next."""

from __future__ import annotations

from dataclasses import dataclass

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Version:
    """Makes versions of parameters: (parameter, the version of it).

    They are the parameters `updates` updates later, predicted by `method` from the state of the
    optimizer; without a method they are copies.
    """

    parameters: Pairs
    updates: int = 0
    method: str = ""

    def __str__(self) -> str:
        made = ", ".join(f"%{result}" for _, result in self.parameters)
        leaves = ", ".join(f"%{leaf}" for leaf, _ in self.parameters)
        if not self.method:
            return f"{made} = copy {leaves}"
        count = f"{self.updates} update{'s' * (self.updates > 1)}"
        return f"{made} = predict {leaves} by {count}, {self.method}"


@dataclass(frozen=True, slots=True)
class Carried:
    """The names of all that a call leaves to the next one: (name at its end, name in the next).

    The forward pass of a call is that of its mini-batch, the backward pass that of the mini-batch
    of `lag` calls before. `values`, calls of regions whose backward pass is to come, and `handles`
    of messages in flight are carried. What the pipeline's first calls have not made yet is left
    out, and so is the wait for it.
    """

    lag: int
    values: Pairs = ()
    calls: Pairs = ()
    handles: Pairs = ()

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of the values that are there at the end of a call."""
        return tuple(end for end, _ in self.values)

    def __str__(self) -> str:
        pairs = (*self.values, *self.calls, *self.handles)
        names = ", ".join(f"{end} as {start}" for end, start in pairs)
        return f"carry {names or 'nothing'}"
