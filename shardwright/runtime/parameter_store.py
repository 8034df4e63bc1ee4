"""The parameters and buffers of a parallel module, under the model's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardwright.ir import layout as layouts
from shardwright.ir.graph import Graph, LeafKind
from shardwright.ir.layout import is_natural
from shardwright.ir.options.mixed_precision import MASTER, master_weights
from shardwright.ir.plan import PlanError
from shardwright.program.decisions import Decisions
from shardwright.rules.analysis import Analysis
from shardwright.runtime.deferred.ranges import narrowed, ranges_of
from shardwright.runtime.module_options import ModuleOptions
from shardwright.runtime.parameters.host_state import on_host
from shardwright.runtime.parameters.submodules import container
from shardwright.tracing.graph_builder import Captured


@final
class ParameterStore:
    """Registers with `module` the tensors that graphs need, and passes them to their programs.

    Parameters keep their names and shapes; they are DTensors, sharded along dimensions of the
    model, or plain tensors without a device mesh. Those of `ir/options/mixed_precision.py` are
    wider than in the graph.
    """

    def __init__(
        self,
        module: nn.Module,
        captured: Captured,
        analysis: Analysis,
        decisions: Decisions,
        device_mesh: DeviceMesh | None,
        device: torch.device,
    ) -> None:
        self.module = module
        self.captured = captured
        self.analysis = analysis
        self.storage = decisions.storage
        self.mesh = decisions.mesh
        self.device_mesh = device_mesh
        self.device = device
        self.constants: dict[str, torch.Tensor] = {}
        self.master_weights = master_weights(captured.graph)
        self.on_host = decisions.hosts_parameters
        self.places: dict[str, tuple[nn.Module, str]] = {}  # leaf -> its module, its name there

    def take(self, graph: Graph, options: ModuleOptions) -> None:
        """Register the parameters and buffers of `graph` that are not registered yet."""
        weights, buffers, persistent = options.weights, options.buffers, options.persistent
        for leaf in graph.leaves:
            first = leaf.keys[0]
            if leaf.name in self.places or leaf.name in self.constants:
                continue
            if leaf.kind in (LeafKind.PARAMETER, LeafKind.BUFFER):
                known = weights if leaf.kind is LeafKind.PARAMETER else buffers
                if first not in known and not graph.consumers[leaf.name]:
                    self._unread(graph, leaf.name, options)
                    continue
                if first not in known:
                    raise PlanError(
                        f"the model reads {first} in another stage of the pipeline in evaluation"
                        " than in training; plan without --stages"
                    )
            if leaf.kind is LeafKind.PARAMETER:
                trained = graph.tensor[leaf.name].requires_grad
                parameter = self._parameter(leaf.name, first, weights[first], options, trained)
                parameter = on_host(parameter) if self.on_host else parameter
                for key in leaf.keys:
                    holder, name = container(self.module, key)
                    holder.register_parameter(name, parameter)
            elif leaf.kind is LeafKind.BUFFER:
                value = options.valued(first, buffers[first]).detach().to(self.device).clone()
                for key in leaf.keys:
                    holder, name = container(self.module, key)
                    holder.register_buffer(name, value, persistent=key in persistent)
            elif leaf.kind is LeafKind.CONSTANT:
                what = f"{leaf.name}, a tensor that is no parameter and no buffer,"
                constant = options.valued(what, self.captured.constants[leaf.name])
                self.constants[leaf.name] = constant.to(self.device)
            if leaf.kind in (LeafKind.PARAMETER, LeafKind.BUFFER):
                self.places[leaf.name] = container(self.module, first)

    def adopt(self, other: ParameterStore) -> None:
        """Use the tensors of `other`, in its module, instead of own copies."""
        self.places.update(other.places)

    def keep(self, buffers: Mapping[str, torch.Tensor], persistent: frozenset[str]) -> None:
        """Register buffers that no graph has read yet: another mode may, and state dicts do."""
        for name, buffer in buffers.items():
            holder, last = container(self.module, name)
            value = buffer.detach().to(self.device, copy=True)
            holder.register_buffer(last, value, persistent=name in persistent)
            self.places[name] = holder, last

    def tensor(self, leaf: str) -> torch.Tensor:
        """The parameter or buffer of that leaf."""
        holder, name = self.places[leaf]
        parameter = holder._parameters.get(name)
        found: torch.Tensor = getattr(holder, name) if parameter is None else parameter
        return found

    def elsewhere(self) -> set[str]:
        """Names of parameters and buffers of the model that are not here but in other stages."""
        leaves = self.captured.graph.leaves_of(LeafKind.PARAMETER, LeafKind.BUFFER)
        return {key for leaf in leaves if leaf.name not in self.places for key in leaf.keys}

    def leaves(
        self,
        graph: Graph,
        inputs: Mapping[str, torch.Tensor],
        given: Mapping[str, torch.Tensor] | None = None,
        *,
        copies: bool = True,
    ) -> list[torch.Tensor]:
        """The tensors of all leaves of `graph`, in order: `inputs` by path, `given` by name.

        With `copies`, buffers that are updated are copied: autograd may keep what it read of them.
        Of parameters that are updated it keeps nothing, or the module would raise itself.
        """
        updated = {buffer for buffer, _ in graph.updates} if copies else ()
        known, found = given or {}, []
        for leaf in graph.leaves:
            name = leaf.name
            if name in known:
                found.append(known[name])
            elif name in self.places:
                tensor = self.tensor(name)
                copied = name in updated and leaf.kind is LeafKind.BUFFER
                found.append(tensor.clone() if copied else tensor)
            elif leaf.kind is LeafKind.INPUT:
                found.append(inputs[leaf.keys[0]])
            else:
                found.append(self.constants[name])
        return found

    def update(self, graph: Graph, values: Sequence[torch.Tensor]) -> None:
        """Write the new contents of the buffers and parameters that `graph` updates."""
        for (name, _), value in zip(graph.updates, values, strict=True):
            self.write(name, value)

    def write(self, leaf: str, value: torch.Tensor) -> None:
        """Write `value`, the new content of a whole buffer or parameter."""
        tensor = self.tensor(leaf)
        if not isinstance(tensor, DTensor):
            tensor.copy_(value)
            return
        atoms, layout = self.analysis.atoms[leaf], self.storage[leaf]
        at = self.mesh.coordinate(place_in(self.device_mesh))
        ranges = ranges_of(tensor.shape, atoms, layout, at)
        tensor.to_local().copy_(narrowed(value.view(tensor.shape), ranges))

    def _unread(self, graph: Graph, name: str, options: ModuleOptions) -> None:
        """Register a placeholder for a parameter of another stage, which nothing reads."""
        tensor = graph.tensor[name]
        empty = torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))
        holder = nn.Module()
        holder.register_parameter("unread", self._parameter(name, "unread", empty, options, False))
        self.places[name] = holder, "unread"

    def _parameter(
        self, leaf: str, name: str, weight: torch.Tensor, options: ModuleOptions, trained: bool
    ) -> nn.Parameter:
        """This rank's tile of the parameter `name`, which is `weight` in the model."""
        atoms, layout = self.analysis.atoms[leaf], self.storage[leaf]
        assert is_natural(atoms, layout), f"{name} cannot be stored {layout}"
        at = self.mesh.coordinate(place_in(self.device_mesh))
        ranges = ranges_of(weight.shape, atoms, layout, at)
        tile = options.tile(name, weight.detach(), ranges)
        dtype = getattr(torch, MASTER) if leaf in self.master_weights else tile.dtype
        # What a source has computed is not copied again.
        copied = not weight.is_meta
        local = tile.to(self.device, dtype, copy=copied).contiguous()
        if self.device_mesh is None:
            return nn.Parameter(local, requires_grad=trained)
        placements: list[Placement] = [
            Shard(p.dim) if isinstance(p, layouts.Shard) else Replicate() for p in layout.placements
        ]
        tensor = DTensor.from_local(
            local,
            self.device_mesh,
            placements,
            run_check=False,
            shape=weight.shape,
            stride=torch.empty(weight.shape, device="meta").stride(),
        )
        return nn.Parameter(tensor, requires_grad=trained)


def place_in(device_mesh: DeviceMesh | None) -> int:
    """The number of this rank within the mesh, which may be a part of all ranks."""
    if device_mesh is None:
        return 0
    place = 0
    coordinate = device_mesh.get_coordinate()
    if coordinate is None:
        raise PlanError(f"rank {dist.get_rank()} is not in the device mesh {device_mesh}")
    for at, size in zip(coordinate, device_mesh.shape, strict=True):
        place = place * size + at
    return place
