"""The step program: everything that one rank does in one training step, in order.

It is an immutable value, prints as text with one line per instruction (`instructions.py`), and does
not depend on torch. `runtime/executor` runs it; `simulate` simulates it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from shardwright.ir.layout import Mesh
from shardwright.program.instructions import Load
from shardwright.program.step.async_pipeline.versions import Carried
from shardwright.program.step.host_copies import HostCopy
from shardwright.program.step.instructions import (
    Recv,
    Send,
    StepInstruction,
    Transfer,
    Update,
    names_text,
)
from shardwright.program.step.region import Region


class UpdateParts(NamedTuple):
    """Names of parameters that are updated together, and whether their state is `on_host`.

    As in `Update`, and so is `by_host`.
    """

    groups: tuple[tuple[str, ...], ...]
    on_host: bool
    by_host: bool = False


@dataclass(frozen=True)
class StepProgram:
    """One step of `rank`.

    Its initial values are the `leaves` (parameters in the shapes of `loads`, buffers and
    constants), this rank's part of the `inputs`: (leaf, micro-batch, value), and the `seeds`:
    (value, gradient of it); with a whole batch, a `Seed` takes the gradients instead. It returns
    `outputs`, `gradients`: (leaf or input, gradient), and `updates`: (buffer, new content). With
    `fixed_offsets` no region has several variants. A gathered copy or scattered gradient of at
    least `alone_bytes` has a transfer of its own; a bucket of summed gradients holds up to
    `sum_bytes`. Copies of parameters are gathered `ahead` buckets before they are read, with
    `separates_gathers` on channels of their own where reductions are in flight beside them.
    `passes` names the passes that were applied. In an asynchronous pipeline a program is one call,
    which goes on with what the call before has `carried`. Leaves in `on_host`, each with the dtype
    that it is stored in, are in the memory of the host, from which they are copied to be read.
    """

    mesh: Mesh
    rank: int
    regions: tuple[Region, ...]
    leaves: tuple[str, ...]
    loads: tuple[Load, ...]
    inputs: tuple[tuple[str, int, str], ...]
    seeds: tuple[tuple[str, str], ...]
    instructions: tuple[StepInstruction, ...]
    outputs: tuple[str, ...]
    gradients: tuple[tuple[str, str], ...]
    updates: tuple[tuple[str, str], ...]
    fixed_offsets: bool = False
    alone_bytes: int | None = None
    sum_bytes: int = 0
    ahead: int = 1
    passes: tuple[str, ...] = ()
    carried: Carried | None = None
    on_host: tuple[tuple[str, str], ...] = ()
    separates_gathers: bool = False

    @property
    def given(self) -> tuple[str, ...]:
        """The names of all values that are there when the program begins."""
        inputs, seeds = (v for _, _, v in self.inputs), (g for _, g in self.seeds)
        return (*self.leaves, *inputs, *seeds)

    @property
    def returned(self) -> tuple[str, ...]:
        """The names of all values that are wanted at the end, or in the next call."""
        gradients, updates = (v for _, v in self.gradients), (v for _, v in self.updates)
        carried = self.carried.kept if self.carried is not None else ()
        return (*self.outputs, *gradients, *updates, *carried)

    @property
    def update_parts(self) -> UpdateParts:
        """The parameters that are updated together; none in a program without update."""
        found = [one for one in self.instructions if isinstance(one, Update)]
        groups = tuple(chain(*(one.parts for one in found)))
        on_host = any(one.on_host for one in found)
        return UpdateParts(groups, on_host, any(one.by_host for one in found))

    def transfers(self) -> Iterator[Transfer]:
        """All collectives, in the order in which they are started."""
        return (one for one in self.instructions if isinstance(one, Transfer))

    def messages(self) -> Iterator[Send | Recv]:
        """All messages, in the order in which they are started."""
        return (one for one in self.instructions if isinstance(one, Send | Recv))

    def host_copies(self) -> Iterator[HostCopy]:
        """All copies to and from the host, in the order in which they are started."""
        return (one for one in self.instructions if isinstance(one, HostCopy))

    def __str__(self) -> str:
        lines = [f"rank {self.rank} of {self.mesh}"]
        lines += [f"region {number}{region}" for number, region in enumerate(self.regions)]
        lines += [str(one) for one in self.instructions]
        lines += [f"gradient of %{leaf} is %{value}" for leaf, value in self.gradients]
        lines += [f"update %{buffer} <- %{value}" for buffer, value in self.updates]
        if self.carried is not None:
            lines.append(str(self.carried))
        lines.append(f"return {names_text(self.outputs)}")
        return "\n".join(lines)
