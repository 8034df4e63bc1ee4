"""Memory of a whole step on a rank: persistent tensors, the program, the optimizer's update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from shardwright.ir.graph import ITEM_BYTES, Graph, Leaf, LeafKind
from shardwright.ir.layout import Bytes, Layout, Replicate, Shard, chunk, local_atoms, shape_of
from shardwright.ir.memory import Memory, Share
from shardwright.ir.op_memory import OpTracer, contiguous_strides
from shardwright.ir.options.mixed_precision import MASTER, master_weights
from shardwright.program.decisions import Decisions
from shardwright.program.instructions import Dropout, Instruction, Uniform
from shardwright.program.lower.inplace import in_place
from shardwright.program.lower.micro_batches import flattened, micro_inputs
from shardwright.program.lower.rank_program import input_layouts
from shardwright.program.step.instructions import StepProgram
from shardwright.program.step.lower.lowering import lower_step
from shardwright.program.step.lower.micro_batches import micro_batched_step
from shardwright.program.step.lower.whole_batch import whole_step
from shardwright.program.step.optimize import STEP_PASSES, optimized
from shardwright.rules.analysis import Analysis
from shardwright.rules.micro_batches import MicroBatches, batch_size, micro_batches
from shardwright.simulate.memory.allocator import Allocator, Block, Use
from shardwright.simulate.memory.step_program import Host, StepMemory
from shardwright.simulate.memory.values import RankModel, View

_KEY = 4  # bytes of the number that a row, or a column, of random numbers has
_PARTS = {
    Use.GRADIENT: "gradients",
    Use.SAVED: "saved",
    Use.COMMUNICATION: "communication",
    Use.WORKSPACE: "workspace",
}


def _owner(leaf: Leaf) -> str:
    """The module that a leaf belongs to: what is given to the model, to the model itself."""
    if leaf.kind in (LeafKind.PARAMETER, LeafKind.BUFFER):
        return leaf.name.rpartition(".")[0]
    return ""


@dataclass(frozen=True)
class Trainer:
    """What memory needs to know of the optimizer and of the rank.

    `states` are the tensors of its size that the optimizer keeps for a parameter, `update` the
    bytes that it takes beside to update tiles of so many bytes.
    """

    states: int
    update: Callable[[Sequence[int]], int]
    rank: RankModel


def step_memory(
    graph: Graph,
    analysis: Analysis,
    decisions: Decisions,
    rank: int,
    trainer: Trainer,
    book: OpTracer,
) -> Memory:
    """What `rank` holds when it holds most, in a step after the first."""
    return StepSimulation(graph, analysis, decisions, rank, trainer, book).memory()


class StepSimulation:
    """A step of a rank while it is simulated."""

    def __init__(
        self,
        graph: Graph,
        analysis: Analysis,
        decisions: Decisions,
        rank: int,
        trainer: Trainer,
        book: OpTracer,
    ) -> None:
        self.graph, self.analysis, self.decisions = graph, analysis, decisions
        self.rank, self.trainer, self.book = rank, trainer, book
        self.heap = Allocator(trainer.rank.backend.allocation_bytes)
        self.coordinate = decisions.mesh.coordinate(rank)
        self.updated = {buffer for buffer, _ in graph.updates}
        self.master_weights = master_weights(graph)
        self.keys = 0  # bytes of the positions of random numbers

    def memory(self) -> Memory:
        """What the rank holds when it holds most."""
        tiles = self.played(self.program())
        self.heap.where, self.heap.module = "the optimizer's update", None
        self.heap.briefly(self.trainer.update(list(tiles.values())))
        assert self.heap.total >= 0, "more memory was released than taken"
        found: Counter[tuple[str | None, str]] = Counter()
        for leaf in self.graph.leaves_of(LeafKind.PARAMETER):
            module = _owner(leaf)
            found[module, "parameters"] += self.stored(leaf.name).bytes
            found[module, "optimizer_state"] += tiles.get(leaf.name, 0) * self.trainer.states
        for (held_by, use), size in self.heap.at_peak().items():
            found[held_by, _PARTS[use]] += size
        found[None, "batch"] = self.lasting()
        granularity = self.heap.granularity
        odd = sum(-size % granularity for size in tiles.values()) * (1 + self.trainer.states)
        found[None, "rounding"] = self.heap.peak_rounded + odd
        shares = [Share(module, part, Bytes(size)) for (module, part), size in found.items()]
        return Memory.of(shares, rank=self.rank, at=self.heap.peak_at)

    def lasting(self) -> int:
        """Inputs, whole, buffers and constants, and what random numbers depend on."""
        kinds = (LeafKind.INPUT, LeafKind.BUFFER, LeafKind.CONSTANT)
        leaves = self.graph.leaves_of(*kinds)
        return sum(self.graph.tensor[leaf.name].bytes for leaf in leaves) + self.keys

    def stored(self, name: str) -> View:
        """A parameter as this rank stores it: its tile."""
        tile = local_atoms(self.analysis.atoms[name], self.decisions.storage[name], self.coordinate)
        tensor = self.graph.tensor[name]
        shape, dtype = shape_of(tile), MASTER if name in self.master_weights else tensor.dtype
        self.heap.module = name.rpartition(".")[0]
        block = self.heap.new(prod(shape) * ITEM_BYTES[dtype], Use.HELD)
        return View(block, shape, contiguous_strides(shape), dtype, tensor.requires_grad)

    def leaves(self, layouts: Mapping[str, Layout], at: tuple[int, ...]) -> dict[str, View]:
        """All leaves as the program at `at` is given them."""
        found: dict[str, View] = {}
        for leaf in self.graph.leaves:
            tensor = self.graph.tensor[leaf.name]
            if leaf.kind is LeafKind.PARAMETER:
                found[leaf.name] = self.stored(leaf.name)
                continue
            shape, use, size = tensor.shape, Use.HELD, int(tensor.bytes)
            if leaf.kind is LeafKind.INPUT:
                atoms = local_atoms(self.analysis.atoms[leaf.name], layouts[leaf.name], at)
                shape = shape_of(atoms)
                size = prod(shape) * ITEM_BYTES[tensor.dtype]
                use = Use.HELD if self.is_cut_first(leaf.name, shape) else Use.WORKSPACE
            elif leaf.name in self.updated:
                use = Use.WORKSPACE  # a copy, as the original is written to
            strides = contiguous_strides(shape)
            self.heap.module = _owner(leaf)
            block, grad = self.heap.new(size, use), tensor.requires_grad
            found[leaf.name] = View(block, shape, strides, tensor.dtype, grad)
        return found

    def is_cut_first(self, name: str, tile: tuple[int, ...]) -> bool:
        """Whether a tile of an input is one piece of its memory, so that it need not be copied."""
        whole = self.graph.tensor[name].shape
        cut = [d for d, (a, b) in enumerate(zip(tile, whole, strict=True)) if a != b]
        return not cut or prod(whole[: cut[-1]]) == 1

    def program(self) -> StepProgram:
        """The program that tells what the step needs: of micro-batches that are alike a few."""
        d, graph, analysis = self.decisions, self.graph, self.analysis
        alone_bytes = self.trainer.rank.backend.alone_bytes
        if d.micro_batches == 1:
            step = replace(
                whole_step(graph, analysis, d, self.rank, in_place), alone_bytes=alone_bytes
            )
            return optimized(lower_step(step), STEP_PASSES)
        like = self.alike
        firsts = sorted(set(like))
        step = micro_batched_step(graph, analysis, self.micro, d, self.rank, in_place, firsts)
        by_number = dict(zip(firsts, step.programs, strict=True))
        programs = [by_number[like[number]] for number in self.numbers]
        return optimized(lower_step(replace(step, programs=programs, alone_bytes=alone_bytes)))

    def played(
        self, program: StepProgram, watch: Callable[[], None] | None = None
    ) -> dict[str, int]:
        """Play the program; bytes of the tiles to update, by parameter.

        Before it and after each instruction `watch` is called. In the end only gradients are alive.
        """
        cut = self.cut_inputs()
        given = self.given(program)
        self.draws([one for region in program.regions for one in region.variants])
        for load in program.loads:
            strides = contiguous_strides(load.shape)
            given[load.leaf] = replace(given[load.leaf], shape=load.shape, strides=strides)
        self.heap.module = ""
        host = Host(self.graph, self.heap, self.book, self.trainer.rank)
        kept = StepMemory(program, given, host).play(watch)
        self.forget(given)
        for block in cut:
            self.heap.drop(block)
        return {name: given[name].bytes for name in kept if name in self.decisions.storage}

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """Layouts of the inputs, of micro-batches on the mesh that they extend."""
        d, graph, analysis = self.decisions, self.graph, self.analysis
        if d.micro_batches == 1:
            return input_layouts(graph, analysis, d.mesh, d.tilings)
        return micro_inputs(graph, analysis, self.micro, d.mesh, d.tilings)

    @cached_property
    def micro(self) -> MicroBatches:
        return micro_batches(self.graph, self.analysis, self.decisions.micro_batches)

    def given(self, program: StepProgram) -> dict[str, View]:
        """What the program is given, by name."""
        if self.decisions.micro_batches == 1:
            return self.leaves(self.layouts, self.coordinate)
        graph, numbers = self.graph, self.numbers
        inputs = {leaf.name for leaf in graph.leaves_of(LeafKind.INPUT)}
        loss = graph.tensor[graph.outputs[0]]
        given: dict[str, View] = {}
        for place, number in enumerate(numbers):
            tag = f"@{place}" if len(numbers) > 1 else ""
            for name, view in self.leaves(self.layouts, (number, *self.coordinate)).items():
                if name in inputs:
                    given[f"{name}{tag}"] = view
                elif name in given:
                    self.forget({name: view})
                else:
                    given[name] = view
        self.heap.module = ""
        for _, seed in program.seeds:
            given[seed] = View(self.heap.new(ITEM_BYTES[loss.dtype]), (), (), loss.dtype)
        return given

    def cut_inputs(self) -> list[Block]:
        """The parts of the batch that are cut out of it for all micro-batches at once.

        Gradients of inputs, which micro-batches' parts add up in, are made here too, and stay.
        """
        if self.decisions.micro_batches == 1:
            return []
        graph, layouts = self.graph, self.layouts
        self.heap.module = ""
        cut = [leaf for leaf in graph.leaves_of(LeafKind.INPUT) if self._is_cut(leaf.name)]
        parts = [
            self.heap.new(graph.tensor[leaf.name].bytes // self.decisions.mesh.size)
            for leaf in cut
            if not all(isinstance(p, Replicate) for p in layouts[leaf.name].placements[1:])
        ]
        for leaf in cut:
            if graph.tensor[leaf.name].requires_grad:
                self.heap.module = _owner(leaf)
                self.heap.new(graph.tensor[leaf.name].bytes, Use.GRADIENT)
        return parts

    def _is_cut(self, name: str) -> bool:
        """Whether each micro-batch takes a part of an input."""
        return isinstance(self.layouts[name].placements[0], Shard)

    @cached_property
    def numbers(self) -> list[int]:
        """The micro-batches that are simulated: of each kind the first, the second and the last.

        Of those in between the second of a size tells for all that follow it.
        """
        count, firsts = self.micro.count, set(self.alike)
        return sorted({*firsts, *(n + 1 for n in firsts if n + 1 < count), count - 1})

    @cached_property
    def alike(self) -> list[int]:
        """For each micro-batch the first that needs as much memory."""
        count, size = self.micro.count, batch_size(self.graph, self.analysis)
        # Compiled pieces that draw are each micro-batch's own, and terms are kept by the first.
        apart = self.graph.numerics.rng == "fast"
        first: dict[tuple[int, bool], int] = {}
        forms = ((chunk(size, count, n)[1], apart and n == 0) for n in range(count))
        return [first.setdefault(form, n) for n, form in enumerate(forms)]

    def forget(self, given: Mapping[str, View]) -> None:
        """What was made for the call alone is given back when it ends."""
        for view in given.values():
            if view.block.use is not Use.HELD:
                self.heap.drop(view.block)

    def draws(self, programs: Sequence[Sequence[Instruction]]) -> None:
        """Count the positions that random numbers depend on, which the module holds."""
        for one in (one for instructions in programs for one in flattened(instructions)):
            if isinstance(one, Dropout | Uniform):
                self.keys += random_key_bytes(one)


def random_key_bytes(one: Dropout | Uniform) -> int:
    """Bytes of the positions that an operator's random numbers depend on."""
    lengths = [prod(length for _, length, _ in dim) for dim in one.positions]
    return _KEY * (prod(lengths[:-1]) + lengths[-1]) if lengths else 0
