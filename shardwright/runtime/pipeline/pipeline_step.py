"""One stage of a synchronous pipeline on one rank, as `torch.distributed.pipelining` calls it.

Called with a message from the stage before and the number of a micro-batch, it
returns the message for the stage behind, or its term of the loss. Gradients
gather in parameters of its own, which share memory with the tiles that the
pipeline holds: as in a step in micro-batches, they are reduced once at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

from shardwright.ir.graph import LeafKind
from shardwright.program.lower.pipeline import Crossing, StagedGraph
from shardwright.program.lower.stages import splits_backward
from shardwright.program.passes import stage_program
from shardwright.runtime.batch import stage_inputs
from shardwright.runtime.comm.message import Form
from shardwright.runtime.fx import Special, to_module
from shardwright.runtime.parameter_store import ParameterStore
from shardwright.runtime.parameters.unshard import local


@final
class StagePart(nn.Module):
    """Stage `index` of `staged` on the device at place `rank` of its group.

    Micro-batches whose programs are the same share one module.
    """

    def __init__(
        self,
        staged: StagedGraph,
        index: int,
        rank: int,
        holds: ParameterStore,
        make: Callable[[Special], nn.Module],
        device: torch.device,
    ) -> None:
        super().__init__()
        self.index = index
        self.last = index == len(staged.parts) - 1
        self.graph = staged.parts[index].graph
        self.received, self.sent = staged.parts[index].received, staged.parts[index].sent
        self.splits = splits_backward(staged.parts[index])
        self.holds = holds
        self.device = device
        lowered = staged.programs(index, rank)
        self.programs = nn.ModuleList()
        self.turns: list[int] = []  # micro-batch -> its program
        known: dict[object, int] = {}
        for program in lowered.programs:
            form = program.instructions, program.outputs, program.updates
            if form not in known:
                known[form] = len(self.programs)
                self.programs.append(to_module(stage_program(program, self.graph), device, make))
            self.turns.append(known[form])
        self.reductions = {one.value: make(one) for one in lowered.reductions}
        self.inputs = stage_inputs(staged, index, rank)
        numbers = range(len(self.turns))
        before = [staged.crossing(index - 1, i, rank) if index else () for i in numbers]
        behind = [() if self.last else staged.crossing(index, i, rank) for i in numbers]
        self.forms_in = _forms(before)
        self.forms_out = _forms(behind)
        self.tiles = nn.ParameterDict()
        self._names: list[str] = []
        self._seen: set[int] = set()
        for leaf in self.graph.leaves_of(LeafKind.PARAMETER):
            if self.graph.tensor[leaf.name].requires_grad:
                tile = nn.Parameter(local(holds.held(leaf.name)).detach())
                tile.register_hook(self._own)
                self.tiles[str(len(self._names))] = tile
                self._names.append(leaf.name)
        self.batch: Mapping[str, torch.Tensor] = {}
        self.state = torch.empty(0)
        self.loss: torch.Tensor | None = None  # what the micro-batches so far add up to
        self.updates: list[torch.Tensor] = []

    def begin(self, batch: Mapping[str, torch.Tensor], state: torch.Tensor) -> None:
        """Get ready for a step on this rank's part of the batch."""
        self.batch, self.state = batch, state
        self.updates, self.loss = [], None
        self._seen.clear()
        for name, tile in zip(self._names, self.tiles.values(), strict=True):
            tile.data = local(self.holds.held(name)).detach()
            tile.grad = None

    def forward(self, message: torch.Tensor, *, number: torch.Tensor) -> torch.Tensor:
        """One micro-batch."""
        i = int(number)
        values = self.forms_in[i].unpack(message) if self.index else ()
        given = dict(zip(self._names, self.tiles.values(), strict=True))
        given.update(zip(self.received, values, strict=True))
        mine = {key: self.inputs[key].micro_batch(self.batch[key], i) for key in self.inputs}
        leaves = (local(leaf) for leaf in self.holds.leaves(self.graph, mine, given))
        results = self.programs[self.turns[i]](*leaves, self.state)
        count = len(self.graph.outputs)
        self._add([update.detach() for update in results[count:]])
        if not self.last:
            return self.forms_out[i].pack(results[:count], self.device)
        term: torch.Tensor = results[0].clone()  # whose history may be dropped in place
        self.loss = term.detach() if self.loss is None else self.loss + term.detach()
        return term

    def finish(self) -> None:
        """After a step in training: write the new contents of buffers."""
        with torch.no_grad():
            self.holds.update(self.graph, self.updates)

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """The gradient of each trained parameter of the stage, where this rank's tile lies."""
        found = {}
        for name, tile in zip(self._names, self.tiles.values(), strict=True):
            gradient, tile.grad = tile.grad, None
            if gradient is not None and name in self.reductions:
                gradient = self.reductions[name](gradient)
            found[name] = gradient
        return found

    def torch_stage(self, device_mesh: DeviceMesh, stages: int) -> PipelineStage:
        """What torch's schedules take; the ranks of `device_mesh` have the stages in turns."""
        group: dist.ProcessGroup = device_mesh.get_group()

        def example(forms: Sequence[Form]) -> torch.Tensor:
            message = torch.empty(forms[0].words, dtype=torch.float32, device=self.device)
            return message.requires_grad_()

        first = torch.zeros(1, dtype=torch.int64)
        given = example(self.forms_in) if self.index else first
        returned = self._loss_like() if self.last else example(self.forms_out)
        return PipelineStage(
            self,
            self.index,
            stages,
            self.device,
            input_args=given,
            output_args=returned,
            group=group,
            dw_builder=None if self.splits else _nothing_left,
        )

    def _loss_like(self) -> torch.Tensor:
        dtype = getattr(torch, self.graph.tensor[self.graph.outputs[0]].dtype)
        return torch.zeros((), dtype=dtype, device=self.device, requires_grad=True)

    def _add(self, updates: list[torch.Tensor]) -> None:
        pairs = zip(self.updates, updates, strict=True) if self.updates else ()
        self.updates = [a + b for a, b in pairs] if self.updates else updates

    def _own(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient in memory of its own, as more may be added to it in place."""
        storage = gradient.untyped_storage()
        whole = storage.nbytes() == gradient.numel() * gradient.element_size()
        if whole and storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            return gradient
        return gradient.clone()


def _nothing_left() -> Callable[..., None]:
    """What is left of a backward pass that computed all gradients at once."""
    return lambda: None


def _forms(values: Sequence[Sequence[Crossing]]) -> list[Form]:
    """The forms of all micro-batches' messages, which are equally long."""
    words = max(Form.of(one).words for one in values)
    return [Form.of(one, words) for one in values]
