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
    """One step of `rank`; of an asynchronous pipeline one call.

    Its initial values are `leaves`, `inputs` and `seeds`; it returns `outputs`, `gradients` and
    `updates`. Everything else says what passes may do.

    Attributes:
        mesh: the mesh of the devices that a pipeline stage shares, or of all.
        rank: the rank in that mesh.
        regions: what `Forward` and `Backward` run, by number.
        leaves: the names of parameters, buffers and constants.
        loads: the shapes in which this rank has its tiles of parameters.
        inputs: this rank's parts of the inputs, as (leaf, micro-batch, value).
        seeds: where backward passes begin, as (output, its gradient); empty where a `Seed` takes
            the gradients from the caller, as for a whole batch.
        instructions: what the rank does, in order.
        outputs: the values that the step returns.
        gradients: the gradients that it returns, as (parameter or input, gradient).
        updates: the new contents of buffers, as (buffer, value).
        fixed_offsets: whether regions for tiles at different offsets are different regions;
            otherwise they are variants of one.
        alone_bytes: from this size on a gathered copy, or a scattered gradient, has a transfer of
            its own; None is never (`BackendSpec`).
        sum_bytes: the size of a full bucket of summed gradients.
        ahead: how many buckets before they are read copies of parameters are gathered.
        passes: the names of the passes that were applied.
        carried: what a call of an asynchronous pipeline leaves to the next one.
        on_host: leaves in the memory of the host, each with the dtype that it is stored in; they
            are copied from there to be read.
        separates_gathers: whether gathers have channels of their own where reductions of gradients
            are in flight beside them.
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
