"""Memory of a whole step on a rank: persistent tensors, the program, the optimizer's update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from shardwright.ir.graph import ITEM_BYTES, Graph, Leaf, LeafKind
from shardwright.ir.layout import Bytes, Layout, Replicate, Shard, local_atoms, shape_of
from shardwright.ir.memory import NOTHING, Memory, Share
from shardwright.ir.op_memory import OpTracer, contiguous_strides
from shardwright.ir.options.fp8 import recipe_of
from shardwright.ir.options.mixed_precision import (
    reduced_dtype,
    stored_dtypes,
    stored_item_bytes,
)
from shardwright.ir.options.optimizer_spec import Implementation, OptimizerSpec
from shardwright.ir.redistribution import Collective
from shardwright.program.instructions import (
    DRAWS_BY_INDEX,
    Dropout,
    DroppedMlp,
    Instruction,
    Uniform,
)
from shardwright.program.lower.micro_batches import flattened, micro_inputs
from shardwright.program.lower.rank_program import input_layouts
from shardwright.program.lower.stages import RECEIVED
from shardwright.program.step.instructions import TOTAL, Transfer
from shardwright.program.step.lower.pipelines.stage_builder import stage_prefix
from shardwright.program.step.lower.plan_lowering import PlanLowering
from shardwright.program.step.step_program import StepProgram
from shardwright.rules.operators.fp8_layers import fp8_layers
from shardwright.simulate.costs.fusion import fusions
from shardwright.simulate.costs.update import UpdatedTile, group_bytes_within, update_bytes
from shardwright.simulate.memory.allocator import Allocator, Block, Use
from shardwright.simulate.memory.caching_allocator import reserved_bytes
from shardwright.simulate.memory.step.curve import MemoryCurve
from shardwright.simulate.memory.step.program_memory import Host, Observer, StepMemory
from shardwright.simulate.memory.tape import NO_FP8, Fp8Memory
from shardwright.simulate.memory.values import RankModel, View

_KEY = 4  # bytes of the number that a row, or a column, of random numbers has
_PARTS = {
    Use.GRADIENT: "gradients",
    Use.SAVED: "saved",
    Use.COMMUNICATION: "communication",
    Use.WORKSPACE: "workspace",
}


def _owner(leaf: Leaf) -> str:
    """The module of a parameter or buffer; other leaves belong to the model itself ("")."""
    return _owner_of(leaf.name) if leaf.kind in (LeafKind.PARAMETER, LeafKind.BUFFER) else ""


def _owner_of(name: str) -> str:
    return name.rpartition(".")[0]


@dataclass(frozen=True)
class Trainer:
    """Facts of the optimizer and of the rank that memory depends on.

    `implementation` is that of the optimizer's update.
    """

    optimizer: OptimizerSpec
    rank: RankModel
    implementation: Implementation = Implementation.LOOP

    def update(self, tiles: Iterable[UpdatedTile], group_bytes: int) -> int:
        """The bytes that an update of the tiles needs besides parameters, gradients and state.

        The tiles are updated in groups of at most `group_bytes` bytes, with 0 all at once.
        """
        return update_bytes(self.optimizer, list(tiles), self.implementation, group_bytes)

    def group_bytes(self, tiles: Iterable[UpdatedTile], room: int) -> int:
        """Bytes of the groups of an update that needs at most `room` bytes, if it can."""
        return group_bytes_within(self.optimizer, list(tiles), self.implementation, room)

    def host_bytes(self, tiles: Iterable[UpdatedTile]) -> int:
        """The bytes of state that are kept in the memory of the host."""
        spec = self.optimizer
        return sum(tile.state_bytes(spec) - tile.resident_bytes(spec) for tile in tiles)

    def rounding(self, tiles: Iterable[UpdatedTile], granularity: int) -> int:
        """The bytes by which gradients and state are rounded up by an allocator."""
        if self.optimizer.by_host:
            return 0
        return sum(
            -(tile.bytes) % granularity * (1 + self.optimizer.resident_of(tile.shape))
            for tile in tiles
        )


class StepSimulation:
    """A step of a rank, after the first, while its memory is simulated.

    All micro-batches are lowered (`folded_step.py` for pipelines that leave some out).
    `group_bytes` are those of parameters that are updated at once, 0 for all: what the plan says,
    or where it does not, what keeps temporaries of the update below the peak before it.
    """

    def __init__(self, lowering: PlanLowering, rank: int, trainer: Trainer, book: OpTracer) -> None:
        self.lowering, self.rank, self.trainer, self.book = lowering, rank, trainer, book
        self.graph, self.analysis = lowering.graph, lowering.analysis
        self.decisions = lowering.decisions
        self.allocator = Allocator(trainer.rank.backend.allocation_bytes)
        self.group, self.position = self.decisions.stage_ranks.position(rank)
        self.coordinate = self.decisions.mesh.coordinate(self.position)
        self.updated = {buffer for buffer, _ in self.graph.updates}
        self.stored_dtypes = stored_dtypes(self.graph)
        self.keys = 0  # bytes of the positions of random numbers
        self.temporaries = True  # whether those of the update are allocated
        self.group_bytes = 0
        self.host_bytes = 0  # that offloaded values and state take of the memory of the host

    def memory(self) -> Memory:
        """The peak memory of the rank, by module and purpose."""
        program = self.lowering.program(self.rank)
        self.record()
        curve = MemoryCurve(program, self.allocator)
        found = self.of_peak(program, self.played(program, curve.observe))
        return replace(found, curve=curve.moments())

    def record(self) -> None:
        """Record requests of memory while a step is played, where the allocator caches blocks."""
        if self.trainer.rank.backend.device == "cuda":
            self.allocator.requests = []

    def of_peak(self, program: StepProgram, tiles: Mapping[str, UpdatedTile]) -> Memory:
        """The memory after `record` and `played`, which gives the `tiles`."""
        assert self.allocator.total >= 0, "more memory was released than taken"
        found: Counter[tuple[str | None, str]] = Counter()
        present = [leaf for leaf in self.graph.leaves if leaf.name in set(program.leaves)]
        for leaf in present:
            if leaf.kind is not LeafKind.PARAMETER:
                continue
            module = _owner(leaf)
            found[module, "parameters"] += self.resident(leaf.name)
            if (tile := tiles.get(leaf.name)) is not None:
                state = tile.resident_bytes(self.trainer.optimizer)
                found[module, "optimizer_state"] += state
        for (path, use), size in self.allocator.at_peak().items():
            found[path, _PARTS[use]] += size
        found[None, "batch"] = self.lasting(present)
        odd = self.trainer.rounding(tiles.values(), self.allocator.granularity)
        found[None, "rounding"] = self.allocator.peak_rounded + odd
        shares = [Share(module, part, Bytes(size)) for (module, part), size in found.items()]
        memory = Memory.of(shares, rank=self.rank, at=self.allocator.peak_at)
        reserved = self.reserved(present, tiles)
        return replace(memory, reserved=reserved, host=Bytes(self.host_bytes))

    def reserved(self, present: Sequence[Leaf], tiles: Mapping[str, UpdatedTile]) -> Bytes:
        """Bytes that torch's allocator reserves for the requests of the step; 0 without a cache."""
        if self.allocator.requests is None:
            return NOTHING
        kept = [leaf for leaf in present if leaf.kind is LeafKind.PARAMETER]
        before = [self.lasting(present), *(self.resident(leaf.name) for leaf in kept)]
        spec = self.trainer.optimizer
        state = [tile.bytes for tile in tiles.values() for _ in range(spec.resident_of(tile.shape))]
        return Bytes(reserved_bytes(before, self.allocator.requests, state))

    def lasting(self, present: Iterable[Leaf]) -> int:
        """Allocate inputs, buffers, constants, and the positions of random numbers."""
        leaves = [*self.graph.leaves_of(LeafKind.INPUT)]
        leaves += [leaf for leaf in present if leaf.kind is not LeafKind.PARAMETER]
        return sum(self.graph.tensor[leaf.name].bytes for leaf in leaves) + self.keys

    def stored(self, name: str) -> View:
        """The tile of a parameter that this rank stores."""
        tile = local_atoms(self.analysis.atoms[name], self.decisions.storage[name], self.coordinate)
        tensor = self.graph.tensor[name]
        shape, dtype = shape_of(tile), self.stored_dtypes.get(name, tensor.dtype)
        self.allocator.module = name.rpartition(".")[0]
        block = self.allocator.new(prod(shape) * ITEM_BYTES[dtype], Use.LASTING)
        return View(block, shape, contiguous_strides(shape), dtype, tensor.requires_grad)

    def resident(self, name: str) -> int:
        """The bytes of a parameter's tile that are always on the device."""
        return 0 if self.decisions.hosts_parameters else self.stored(name).bytes

    def leaves(self, names: Iterable[str]) -> dict[str, View]:
        """Parameters, buffers and constants, as inputs of the program."""
        found: dict[str, View] = {}
        known = {leaf.name: leaf for leaf in self.graph.leaves}
        for name in names:
            leaf, tensor = known[name], self.graph.tensor[name]
            if leaf.kind is LeafKind.PARAMETER:
                found[name] = self.stored(name)
                continue
            # Pipeline stages write to buffers at the end of the step; other programs write a copy.
            copied = name in self.updated and self.decisions.pipeline is None
            self.allocator.module = _owner(leaf)
            block = self.allocator.new(int(tensor.bytes), Use.WORKSPACE if copied else Use.LASTING)
            strides = contiguous_strides(tensor.shape)
            found[name] = View(block, tensor.shape, strides, tensor.dtype, tensor.requires_grad)
        return found

    def inputs(self, program: StepProgram) -> tuple[dict[str, View], list[Block]]:
        """The batch as inputs of the program, and the parts of it that micro-batches read."""
        found: dict[str, View] = {}
        layout_of: dict[str, tuple[Leaf, Layout]] = {}
        parts: list[Block] = []
        for prefix, graph in self.graphs():
            layouts = self.input_layouts(graph)
            for leaf in graph.leaves_of(LeafKind.INPUT):
                layout_of[f"{prefix}{leaf.name}"] = leaf, layouts[leaf.name]
                if leaf.keys[0].startswith(RECEIVED) or not self.in_parts:
                    continue
                first, *others = layouts[leaf.name].placements
                size = int(graph.tensor[leaf.name].bytes)
                if not isinstance(first, Shard):
                    continue
                self.allocator.module = ""
                if not all(isinstance(one, Replicate) for one in others):
                    parts.append(self.allocator.new(size // self.decisions.mesh.size))
                if graph.tensor[leaf.name].requires_grad:  # what its micro-batches' add up in
                    self.allocator.module = _owner(leaf)
                    self.allocator.new(size, Use.GRADIENT)
        last = max((position for _, position, _ in program.inputs), default=0)
        more = [
            (key, position, f"{value}~{n}")
            for key, position, value in program.inputs
            if position == last
            for n in range(self.lowering.left_out)
        ]
        for key, position, value in (*program.inputs, *more):
            leaf, layout = layout_of[key]
            number = self.lowering.numbers[position]
            at = (number, *self.coordinate) if self.in_parts else self.coordinate
            tensor = self.graph.tensor[leaf.name]
            shape = shape_of(local_atoms(self.analysis.atoms[leaf.name], layout, at))
            use = Use.LASTING if self.is_cut_first(leaf.name, shape) else Use.WORKSPACE
            self.allocator.module = _owner(leaf)
            block = self.allocator.new(prod(shape) * ITEM_BYTES[tensor.dtype], use)
            strides = contiguous_strides(shape)
            found[value] = View(block, shape, strides, tensor.dtype, tensor.requires_grad)
        return found, parts

    @property
    def in_parts(self) -> bool:
        """Whether layouts of inputs begin with the axis of micro-batches."""
        return self.decisions.micro_batches > 1 or self.decisions.pipeline is not None

    def graphs(self) -> list[tuple[str, Graph]]:
        """The graphs that the rank runs, each with the prefix of its inputs' names."""
        if self.decisions.pipeline is None:
            return [("", self.graph)]
        staged = self.lowering.staged
        homes = enumerate(staged.pipeline.homes)
        mine = [stage for stage, home in homes if home == self.group]
        return [(stage_prefix(staged, stage), staged.parts[stage].graph) for stage in mine]

    def input_layouts(self, graph: Graph) -> dict[str, Layout]:
        """The layouts of a graph's inputs."""
        d = self.decisions
        if not self.in_parts:
            return input_layouts(graph, self.analysis, d.mesh, d.tilings)
        staged = d.pipeline is not None
        micro = self.lowering.staged.micro if staged else self.lowering.micro
        return micro_inputs(graph, self.analysis, micro, d.mesh, d.tilings)

    def is_cut_first(self, name: str, tile: tuple[int, ...]) -> bool:
        """Whether a tile of an input is contiguous in its memory, so that it is not copied."""
        whole = self.graph.tensor[name].shape
        cut = [d for d, (a, b) in enumerate(zip(tile, whole, strict=True)) if a != b]
        return not cut or prod(whole[: cut[-1]]) == 1

    def played(
        self, program: StepProgram, observe: Observer | None = None
    ) -> dict[str, UpdatedTile]:
        """Run the program; the tiles that are updated, by parameter.

        Before it and after each instruction `observe` is called with the values that are there.
        """
        given = self.leaves(program.leaves)
        batch, parts = self.inputs(program)
        given |= batch
        loss = self.graph.tensor[self.graph.outputs[0]]
        self.allocator.module = ""
        seeds = [seed for _, seed in program.seeds]
        seeds += [f"{seed}~{n}" for seed in seeds[-1:] for n in range(self.lowering.left_out)]
        for seed in seeds:
            given[seed] = View(self.allocator.new(ITEM_BYTES[loss.dtype]), (), (), loss.dtype)
        self.draws([one for region in program.regions for one in region.variants])
        for load in program.loads:
            strides = contiguous_strides(load.shape)
            given[load.leaf] = replace(given[load.leaf], shape=load.shape, strides=strides)
        tiles: dict[str, UpdatedTile] = {}

        def update(parameters: Sequence[str]) -> None:
            """Free the tensors of the call, and record the updated parameters."""
            self.forget(given, parts)
            tiles.update((name, self.updated_tile(name, given[name].bytes)) for name in parameters)
            self.allocator.where, self.allocator.module = "the optimizer's update", None
            if self.temporaries:
                room = self.allocator.peak - self.allocator.total
                self.decide_groups(tiles.values(), room)
                self.allocator.briefly(self.trainer.update(tiles.values(), self.group_bytes))

        compiled = fusions(self.graph, self.analysis.rules) if self.decisions.compiled else {}
        given_host = self.graph, self.allocator, self.book, self.trainer.rank, update, compiled
        host = Host(*given_host, self.in_8_bit())
        memory = StepMemory(program, given, host)
        if self.trainer.optimizer.keeps_gradients:
            observe = self.with_buffers(program, given, observe)
        memory.play(observe)
        self.host_bytes = memory.host_memory.peak + self.trainer.host_bytes(tiles.values())
        self.host_bytes += sum(given[leaf].bytes for leaf, _ in program.on_host)
        if not tiles:
            self.forget(given, parts)
        return tiles

    def decide_groups(self, tiles: Iterable[UpdatedTile], room: int) -> None:
        """Set `group_bytes` so that the update needs at most `room`, unless the plan decides it."""
        given = self.decisions.update_group_bytes
        self.group_bytes = self.trainer.group_bytes(tiles, room) if given is None else given

    def in_8_bit(self) -> Fp8Memory:
        """The layers in 8 bits."""
        recipe = recipe_of(self.graph.numerics.fp8)
        if recipe is None:
            return NO_FP8
        given = fp8_layers(self.graph), 1 + recipe.scale_bytes, recipe.saves_8_bit
        return Fp8Memory(*given, turns_weights=recipe.gathers and recipe.casts_weights_once)

    def with_buffers(
        self, program: StepProgram, given: Mapping[str, View], observe: Observer | None
    ) -> Observer:
        """Allocate the buffers of gradients that are kept between steps.

        An observer is returned, which frees a buffer when the program makes that gradient itself.
        """
        sizes = self.summed_bytes(program, given)
        values = {f"{TOTAL}{leaf}": leaf for leaf in sizes}
        values.update((value, leaf) for leaf, value in program.gradients)
        left: dict[str, Block] = {}
        for leaf, size in sizes.items():
            self.allocator.module = _owner_of(leaf)
            left[leaf] = self.allocator.new(size, Use.GRADIENT)

        def made(found: dict[str, View]) -> None:
            for value, leaf in values.items():
                if leaf in left and value in found and found[value].bytes >= sizes[leaf]:
                    self.allocator.drop(left.pop(leaf))
            if observe is not None:
                observe(found)

        return made

    def summed_bytes(self, program: StepProgram, given: Mapping[str, View]) -> dict[str, int]:
        """Bytes of the gradient of each parameter as the rank computes it, before it is cut."""
        trained = {leaf for leaf, _ in program.gradients}
        elements = {leaf: prod(given[leaf].shape) for leaf in trained}
        leaf_of = {load.result: load.leaf for load in program.loads} | {one: one for one in trained}
        for one in program.instructions:
            if isinstance(one, Transfer) and one.collective is Collective.ALL_GATHER:
                for part in one.parts:
                    leaf = leaf_of.get(part.value, "")
                    if leaf in trained:
                        elements[leaf] = max(elements[leaf], prod(part.shape))
        return {
            leaf: count * ITEM_BYTES[reduced_dtype(self.graph, leaf)]
            for leaf, count in elements.items()
        }

    def updated_tile(self, name: str, size: int) -> UpdatedTile:
        """A parameter's tile of `size` bytes, when it is updated."""
        return UpdatedTile(self.graph.tensor[name].shape, size, stored_item_bytes(self.graph, name))

    def forget(self, given: Mapping[str, View], parts: Sequence[Block]) -> None:
        """Free the inputs made for the call, and `parts` of the batch."""
        for view in given.values():
            if view.block.use is not Use.LASTING:
                self.allocator.drop(view.block)
        for block in parts:
            self.allocator.drop(block)

    def draws(self, programs: Sequence[Sequence[Instruction]]) -> None:
        """Allocate the positions that random numbers depend on, which the module keeps."""
        for one in (one for instructions in programs for one in flattened(instructions)):
            if isinstance(one, DRAWS_BY_INDEX):
                self.keys += random_key_bytes(one)


def random_key_bytes(one: Dropout | Uniform | DroppedMlp) -> int:
    """Bytes of the positions that an operator's random numbers depend on."""
    lengths = [prod(length for _, length, _ in dim) for dim in one.positions]
    return _KEY * (prod(lengths[:-1]) + lengths[-1]) if lengths else 0
