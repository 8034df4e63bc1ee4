"""The regions of a step program as modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx, nn

from shardwright.program.step.instructions import Forward
from shardwright.program.step.region import Region
from shardwright.runtime.executor.failures import Failure
from shardwright.runtime.graph_modules.compiled import CompiledRegions
from shardwright.runtime.graph_modules.fx import Special, region_module
from shardwright.runtime.graph_modules.indexed_offsets import chosen_by
from shardwright.runtime.graph_modules.repeats import SharedCode


class Regions(nn.Module):
    """The distinct regions of a program as modules; `make` as in `to_module`.

    `parts` run operators one by one. `executed` are the modules that a step runs: these, or
    compiled ones. `running` is the instruction for which a region runs. After a `failure` nothing
    runs.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        make: Callable[[Special], nn.Module],
        device: torch.device,
    ) -> None:
        super().__init__()
        self.forms = tuple(regions)
        self.make, self.device = make, device
        self.running: Forward | None = None
        self.failure: Failure | None = None  # of a step that communicates
        self.variant = torch.zeros(1, dtype=torch.int64, device=device)
        self.parts = nn.ModuleList(
            region_module(
                region.variants[0],
                region.inputs,
                region.outputs,
                device,
                chosen_by(self.variant, region.variants, make, device),
            )
            for region in regions
        )
        self.executed: Sequence[nn.Module] = tuple(self.parts)
        self.compiled: CompiledRegions | None = None

    def compile_segments(self, device_of_state: torch.device) -> None:
        """From now on run compiled regions; the random state is on `device_of_state`."""
        self.compiled = CompiledRegions(self._segment, device_of_state)
        self.executed = tuple(map(self.compiled.region, self.forms))

    def _segment(self, code: SharedCode) -> fx.GraphModule:
        make = chosen_by(self.variant, code.variants, self.make, self.device)
        given = code.variants[0], code.inputs, code.outputs, self.device
        return region_module(*given, make, numbered=code.draws)
