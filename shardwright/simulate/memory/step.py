"""Memory of a whole step on a rank: persistent tensors, the program, the optimizer's update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from shardwright.ir.graph import ITEM_BYTES, Graph, Leaf, LeafKind
from shardwright.ir.layout import Bytes, Layout, Replicate, Shard, chunk, local_atoms, shape_of
from shardwright.ir.memory import Memory, Share
from shardwright.ir.mixed_precision import MASTER, masters
from shardwright.program.decisions import Decisions
from shardwright.program.instructions import Dropout, Program, Uniform
from shardwright.program.lower.micro_batches import flattened, lower_micro, micro_inputs
from shardwright.program.lower.rank_program import input_layouts
from shardwright.program.passes import micro_program, rank_program
from shardwright.rules.analysis import Analysis
from shardwright.rules.micro_batches import batch_size, micro_batches
from shardwright.simulate.memory.allocator import Allocator, Use
from shardwright.simulate.memory.footprints import Footprints
from shardwright.simulate.memory.memory_simulator import MemorySimulator
from shardwright.simulate.memory.values import View, contiguous_strides

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
    """What memory needs to know of the optimizer and of the allocator.

    `states` are the tensors of its size that the optimizer keeps for a parameter, `update` the
    bytes that it takes beside to update tiles of so many bytes. The
    allocator hands out multiples of `granularity`. With `on_cpu` sums that are scattered are
    made on a copy, as Gloo does. `skew` as in `Machine.expert_skew`.
    """

    states: int
    update: Callable[[Sequence[int]], int]
    granularity: int = 1
    on_cpu: bool = False
    skew: float = 1.0


def step_memory(
    graph: Graph,
    analysis: Analysis,
    decisions: Decisions,
    rank: int,
    trainer: Trainer,
    book: Footprints,
) -> Memory:
    """What `rank` holds when it holds most, in a step after the first."""
    step = _Step(graph, analysis, decisions, rank, trainer, book)
    return step.memory()


class _Step:
    """A step while it is walked through."""

    def __init__(
        self,
        graph: Graph,
        analysis: Analysis,
        decisions: Decisions,
        rank: int,
        trainer: Trainer,
        book: Footprints,
    ) -> None:
        self.graph, self.analysis, self.decisions = graph, analysis, decisions
        self.rank, self.trainer, self.book = rank, trainer, book
        self.heap = Allocator(trainer.granularity)
        self.coordinate = decisions.mesh.coordinate(rank)
        self.plain = decisions.mesh.size == 1
        self.updated = {buffer for buffer, _ in graph.updates}
        self.masters = masters(graph)
        self.keys = 0  # bytes of the positions of random numbers

    def memory(self) -> Memory:
        whole = self.decisions.micro_batches == 1
        tiles = self.one_program() if whole else self.micro_batched()
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
        granularity = self.trainer.granularity
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
        shape, dtype = shape_of(tile), MASTER if name in self.masters else tensor.dtype
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

    def one_program(self) -> dict[str, int]:
        """The batch at once; the bytes of the tiles to be updated, by parameter."""
        d = self.decisions
        program = rank_program(self.graph, self.analysis, d, self.rank)
        layouts = input_layouts(self.graph, self.analysis, d.mesh, d.tilings)
        given = self.leaves(layouts, self.coordinate)
        self.draws([program])
        walk = self.walk(program, given)
        walk.forward()
        self.forget(given)
        walk.backward()
        return self.updated_tiles(walk.kept, given)

    def walk(self, program: Program, given: Mapping[str, View]) -> MemorySimulator:
        return MemorySimulator(
            self.graph,
            program,
            given,
            self.heap,
            self.book,
            self.trainer.on_cpu,
            self.plain,
            self.trainer.skew,
        )

    def micro_batched(self) -> dict[str, int]:
        """One micro-batch after the other, then what is left to reduce; as `one_program`."""
        d, graph = self.decisions, self.graph
        micro = micro_batches(graph, self.analysis, d.micro_batches)
        like = self.alike(micro.count)
        firsts = list(dict.fromkeys(like))
        lowered = lower_micro(graph, self.analysis, micro, d, self.rank, firsts)
        by_number = dict(zip(firsts, lowered.programs, strict=True))
        programs = {number: micro_program(one, graph) for number, one in by_number.items()}
        self.draws([by_number[number] for number in like])
        layouts = micro_inputs(graph, self.analysis, micro, d.mesh, d.tilings)
        self.heap.module = ""
        parts = {  # of the batch, cut out of it for all micro-batches at once
            leaf.name: self.heap.new(graph.tensor[leaf.name].bytes // d.mesh.size)
            for leaf in graph.leaves_of(LeafKind.INPUT)
            if isinstance(layouts[leaf.name].placements[0], Shard)
            and not all(isinstance(p, Replicate) for p in layouts[leaf.name].placements[1:])
        }
        for leaf in graph.leaves_of(LeafKind.INPUT):  # what its micro-batches' gradients add up in
            cut = isinstance(layouts[leaf.name].placements[0], Shard)
            if graph.tensor[leaf.name].requires_grad and cut:
                self.heap.module = _owner(leaf)
                self.heap.new(graph.tensor[leaf.name].bytes, Use.GRADIENT)
        kept: dict[str, View] = {}
        given: dict[str, View] = {}
        for number in range(micro.count):
            if number > 1 and like[number] == like[number - 1]:
                continue  # the gradients are there, and it adds to them as the one before it did
            given = self.leaves(layouts, (number, *self.coordinate))
            walk = MemorySimulator(
                graph,
                programs[like[number]],
                given,
                self.heap,
                self.book,
                self.trainer.on_cpu,
                plain=True,
                skew=self.trainer.skew,
            )
            walk.kept = kept
            walk.forward()
            walk.backward()
            walk.end()
            self.forget(given)
            if number == 0:
                self.separate(kept)
        for one in lowered.reductions:
            if one.value in kept:
                old = kept[one.value]
                self.heap.where = f"gradient of {one.value}"
                new = walk.moved(old, one.forward, one.atoms_before, one.after)
                self.heap.becomes(new.block, Use.GRADIENT)
                self.heap.assign(new.block, given[one.value].block.module, new.bytes)
                kept[one.value] = new
                self.heap.drop(old.block)
        for block in parts.values():
            self.heap.drop(block)
        return self.updated_tiles(kept, given)

    def alike(self, count: int) -> list[int]:
        """For each of `count` micro-batches the first that needs as much memory."""
        size = batch_size(self.graph, self.analysis)
        # Compiled pieces that draw are each micro-batch's own, and terms are kept by the first.
        apart = self.graph.habits.rng == "fast"
        first: dict[tuple[int, bool], int] = {}
        forms = ((chunk(size, count, n)[1], apart and n == 0) for n in range(count))
        return [first.setdefault(form, n) for n, form in enumerate(forms)]

    def separate(self, kept: dict[str, View]) -> None:
        """Give gradients that share memory their own, as more is added to them in place."""
        seen: set[int] = set()
        for name, view in kept.items():
            if id(view.block) in seen:
                self.heap.drop(view.block)
                own = self.heap.new(view.bytes, Use.GRADIENT, like=self.stored(name).block)
                kept[name] = View(own, view.shape, view.strides, view.dtype)
            seen.add(id(kept[name].block))

    def forget(self, given: Mapping[str, View]) -> None:
        """What was made for the call alone is given back when it ends."""
        for view in given.values():
            if view.block.use is not Use.HELD:
                self.heap.drop(view.block)

    def updated_tiles(self, kept: Iterable[str], given: Mapping[str, View]) -> dict[str, int]:
        """Bytes of the tiles of parameters that have a gradient, by parameter."""
        return {name: given[name].bytes for name in kept if name in self.decisions.storage}

    def draws(self, programs: Sequence[Program]) -> None:
        """Count the positions that random numbers depend on, which the module holds."""
        for one in (one for p in programs for one in flattened(p.instructions)):
            if isinstance(one, Dropout | Uniform):
                lengths = [prod(length for _, length, _ in dim) for dim in one.positions]
                self.keys += _KEY * (prod(lengths[:-1]) + lengths[-1]) if lengths else 0
