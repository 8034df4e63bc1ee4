"""The public classes: the values of `ir` with methods of the layers above them.

`search` and `plan` return them. Values inside of the package are those of `ir`. `search_with` is
here because commands call it, and importing `api` takes longer than many searches.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from html import escape

from shardwright.ir import frontier as ir_frontier
from shardwright.ir import plan as ir_plan
from shardwright.ir.graph import Graph
from shardwright.ir.op_memory import OpTracer
from shardwright.ir.options.plan_options import DEFAULTS, PlanOptions
from shardwright.machine import model
from shardwright.machine.files.loading import load_machine, with_figures
from shardwright.machine.files.toml import to_toml
from shardwright.machine.presets import preset
from shardwright.plan_io.files import load_plan, save_plan
from shardwright.plan_io.plan_text import plan_from_json, plan_to_json
from shardwright.planner import planner
from shardwright.planner.meshes.mesh_turns import Progress
from shardwright.planner.plans.searched_frontier import SearchedFrontier
from shardwright.report.frontier.frontier_svg import frontier_html
from shardwright.report.text.explain import explain


@dataclass(frozen=True, eq=False)
class Plan(ir_plan.Plan):
    """One way to train one graph in parallel, with its predicted cost.

    `str(plan)` is one line; in a notebook it shows itself. Values of plans are not changed by hand:
    `search`, `plan` and `load` make them.

    Attributes:
        fingerprint: hash of the graph that the plan is for.
        machine: name of the machine that it was priced on.
        mesh: named axes of the devices, outermost first; a pipeline has its groups as axis `pp`.
        optimizer: name of the optimizer that was priced.
        step_seconds: predicted seconds of one optimizer step.
        peak_bytes: predicted peak bytes of tensors per rank, on the worst rank.
        lower_bound_seconds: a time that no plan of the same cost model within the same memory
            beats.
        inputs: key, shape and dtype of each tensor of the global batch.
        constants: arguments of the call that are no tensors, by path.
        parameters: layout, bytes and update seconds of each parameter.
        ops: tiling, layout, seconds and saved bytes of each operator.
        transfers: redistributions of a step with their collectives, bytes and seconds.
        name: `"searched"`, or the baseline that it is.
        stages: number of pipeline stages.
        schedule: name of the pipeline schedule, `"none"` without stages.
        cuts: the operators that later stages begin with.
        receive_seconds: seconds that a micro-batch's values take into each later stage, or their
            gradients back.
        micro_batches: number of micro-batches of a step; their gradients add up.
        gradient_sync: the micro-batches after which gradients are reduced over devices, `"every"`
            or `"last"`; None: after every one where they are stored sharded, else after the last.
        async_tp: whether messages of tensor parallelism are priced beside matrix products, as in
            `Strategy`; the program sends them as it does without.
        ep_overlap: the same of messages of experts, beside operators of another micro-batch.
        compiled: whether layers run through `torch.compile`.
        ahead: how many buckets of parameters are gathered before the one that operators read.
        separates_gathers: whether gathers of parameters have a communicator of their own where
            reductions of gradients are in flight beside them. Plans are made without; set it by
            `dataclasses.replace(plan, separates_gathers=True)`. Its memory is no part of `memory`.
        offload: what is kept in the memory of the host, as in `Strategy`.
        on_device: the recomputed segments whose inputs stay on the device nevertheless.
        update_group_bytes: the optimizer updates parameters in groups of at most so many bytes of a
            rank's tiles; 0 or None: all at once.
        overlap: part of gradient reductions that the machine hides behind computing.
        gather_overlap: that of gathers of sharded parameters; None: the same.
        useful_seconds: seconds of a step's useful operations, if one device computed them at its
            peak; 0 where that is not known.
        dtype: that of matrix products, `"tf32"` for those of float32 that round their operands;
            empty where parameters have several.
        contention: part of a message by which it delays one along another axis.
        expert_skew: rows of the busiest device over the mean where devices hold different experts,
            else 0.
        host_devices: devices of a host where tokens go to hosts first, and from there to the
            devices of their experts, else 0.
        notes: sentences about the plan, such as broken constraints.
        remarks: operators whose rule was found by experiment, and modules that were decomposed.
        numerics: how far the graph departs from one device (`ir/options/numerics.py`).
        chosen_precision: a sentence on the precision and where it is from, in plans of commands
            that choose it; else empty.
        rivals: time and memory of other plans of the same search and of the baselines.
        memory: what `peak_bytes` is made of; None where the memory was not simulated.
        timeline: start and seconds of everything in a step, as its step program was simulated;
            None where it was not. Of an asynchronous pipeline it has several steps.
    """

    @classmethod
    def of(cls, plan: ir_plan.Plan) -> Plan:
        """The same plan with the public methods."""
        if isinstance(plan, cls):
            return plan
        return cls(**{field.name: getattr(plan, field.name) for field in fields(plan)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file.

        Args:
            path: the file that `save` or a command wrote.

        Raises:
            PlanError: the file is not a whole, valid plan.
        """
        return cls.of(load_plan(path))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote.

        Args:
            text: JSON.

        Raises:
            PlanError: the text is not a whole, valid plan.
        """
        return cls.of(plan_from_json(text))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, atomically.

        Args:
            path: the file, which is replaced if it is there.

        Raises:
            PlanError: it cannot be written.
        """
        save_plan(self, path)

    def to_json(self) -> str:
        """The plan as readable JSON text."""
        return plan_to_json(self)

    def explain(self) -> str:
        """The sharding and cost of every module, in the module's own names."""
        return explain(self)

    def _repr_html_(self) -> str:
        """The plan in a notebook: its line, and `explain` to open."""
        words = f"<summary>{escape(str(self))}</summary><pre>{escape(self.explain())}</pre>"
        return f"<details>{words}</details>"

    def __eq__(self, other: object) -> bool:
        """Equal to every plan of equal fields, public or not."""
        if not isinstance(other, ir_plan.Plan):
            return NotImplemented
        return all(getattr(self, f.name) == getattr(other, f.name) for f in fields(ir_plan.Plan))

    def __hash__(self) -> int:
        return hash((self.fingerprint, self.machine, self.step_seconds, self.peak_bytes))


@dataclass(frozen=True)
class Frontier(SearchedFrontier):
    """Plans that no other plan found beats in both step time and memory per rank, fastest first.

    A sequence of plans: `len(frontier)`, `frontier[0]`, iteration. In a notebook it shows itself.

    Attributes:
        plans: the plans, each written when it is first looked at.
        baselines: well-known plans priced by the same model.
        search_seconds: wall seconds that the search took.
        constraints: the constraints that all `plans` meet.
        broken: for each baseline that breaks constraints, which.
        simulation: simulates time and memory of plans; None where no search made the frontier.
        least: for each plan, a lower bound in bytes on its memory; None as above.
        least_of_baseline: the same for each baseline; None as above.
        off_frontier: finds faster plans off the frontier within a limit; None as above.
        pipelines: a few plans with stages, compared with the plan that is chosen of the others.
        least_within: bytes -> a lower bound of the seconds of all plans within that memory.
        foresight: simulates plans in several processes before they are compared; None as above.
        is_cut: whether the time limit has ended the search.
        deadline: when plans are no more compared; never, if `search` made the frontier.
        chooses_baselines: whether a baseline may be chosen; a method that makes one plan only shows
            them.
        chosen: the fastest plans found so far, by memory limit.
        device_bytes: memory of a device for tensors, the limit where none is given.
        hints: sentences about what was not searched, and why.
    """

    plans: Sequence[Plan]
    baselines: Sequence[Plan] = ()

    @classmethod
    def of(cls, found: ir_frontier.Frontier) -> Frontier:
        """The same frontier, whose plans have the public methods."""
        values = {field.name: getattr(found, field.name) for field in fields(found)}
        for name in ("plans", "baselines"):
            values[name] = ir_frontier.Plans.mapped(values[name], Plan.of)
        return cls(**values)

    def fastest(self, memory_limit: str | int | None = None) -> Plan:
        """Choose the fastest plan whose peak memory per rank is within the limit.

        Args:
            memory_limit: bytes per rank, or a text such as `"40GiB"`; None: the memory of a device;
                `"unlimited"`: the plan may exceed that and then has a note that says so.

        Returns:
            The plan, its memory simulated. It need not be one of `plans`, as within a limit others
                are
            tried, too.

        Raises:
            InfeasibleError: no plan fits; `smallest_bytes` is the least memory that would do.
        """
        return Plan.of(super().fastest(memory_limit))

    def smallest(self, memory_limit: str | int | None = None) -> Plan:
        """Choose the plan with the least peak memory per rank.

        Args:
            memory_limit: as in `fastest`.

        Raises:
            InfeasibleError: no plan fits.
        """
        return Plan.of(super().smallest(memory_limit))

    def __getitem__(self, index: int) -> Plan:
        return Plan.of(self.plans[index])

    def __iter__(self) -> Iterator[Plan]:
        return (Plan.of(plan) for plan in self.plans)

    def _repr_html_(self) -> str:
        """The frontier in a notebook: time against memory as a picture, plans as a list to open."""
        return frontier_html(self)


@dataclass(frozen=True, slots=True)
class Machine(model.Machine):
    """The hardware a plan is made for: equal devices under levels of links, innermost level first.

    Rank r is device r; neighbouring ranks are joined by the innermost level. Bandwidth, at every
    level, is what one device sends in one direction while all send.

    Attributes:
        name: what plans call it.
        device: memory, compute and efficiency of one device.
        levels: the levels of links; their sizes multiply to the number of devices.
        provenance: where the figures come from.
        backend: `"nccl"` or `"gloo"`, which runs the collectives.
        collective_launch_seconds: seconds that any collective costs before its first hop.
        overlap: part, 0 to 1, of a gradient reduction that is hidden behind computing.
        gather_overlap: part of what is waited for sooner, as gathers of sharded parameters; None:
            as `overlap`.
        contention: part of a collective by which it delays one along another axis: 1 where they
            share all links.
        measured: when and how well the figures were measured; None: they were not.
        expert_skew: rows of the busiest device over the mean where devices hold different experts,
            at least 1; or a tuple of the rows of each expert.
        arrival_skew_seconds: straggler time: mean wait for the last rank after 10 ms of computing.
        charges_hidden: whether tables charge the hidden part of messages, too; set by a search.
        arrival_skew_power: power of the computing time by which that grows, above 0, at most 1.
        charged_skew_seconds: of every launch, seconds of waiting; set by the cost model.
    """

    @classmethod
    def of(cls, found: model.Machine) -> Machine:
        """The same machine with the public methods."""
        return cls(**{field.name: getattr(found, field.name) for field in fields(found)})

    @classmethod
    def preset(cls, text: str) -> Machine:
        """Look up known hardware.

        Args:
            text: `[HOSTSx]DEVICESxKIND`, as `"8xH100"`, `"2x8xA100"` or `"2xcpu"`.

        Raises:
            MachineError: malformed text, or a kind without a preset.
        """
        return cls.of(preset(text))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Machine:
        """Read a machine file as `to_toml` writes it.

        Args:
            path: a TOML file; docs/reference/machines.md has all keys and units.

        Raises:
            MachineError: the file cannot be read, or what a key holds is wrong.
        """
        return cls.of(load_machine(path))

    @classmethod
    def measure(cls, devices: int | None = None, *, tune_host: bool = False) -> Machine:
        """Measure the devices at hand.

        Under torchrun every rank calls it, and the ranks of the process group are measured
        together. Without one, processes are started on this host, and the result is kept in a cache
        of this host.

        Args:
            devices: processes to start; None: one per GPU, or per core where there is none.
            tune_host: measure for runs that tune the host, as `parallelize` says; under torchrun
                that changes the processes which measure, until they end.
        """
        from shardwright.profile.measure import measure_here

        return cls.of(measure_here(devices, tune_host=tune_host))

    def with_(self, **figures: object) -> Machine:
        """The same machine with other figures, named and written as in machine files.

        Args:
            figures: by name. Names with a dot, as `compute.bfloat16` or `nvlink.bandwidth`, are
                given as `with_(**{"nvlink.bandwidth": "400GB/s"})`.

        Raises:
            MachineError: another name, or a figure that cannot be.

        Examples:
            >>> Machine.preset("8xH100").with_(memory="72GB", overlap=0.6).device.memory_bytes
            72000000000
        """
        return Machine.of(with_figures(self, **figures))

    def with_devices(self, devices: int) -> Machine:
        """The same machine with fewer devices.

        Args:
            devices: how many of its devices to plan for.

        Raises:
            MachineError: the machine does not have so many, or its levels cannot be cut so.
        """
        return Machine.of(model.Machine.with_devices(self, devices))

    def to_toml(self) -> str:
        """The machine as readable TOML; `load` reads it back to an equal machine."""
        return to_toml(self)


def search_with(
    graph: Graph,
    machine: model.Machine,
    options: PlanOptions = DEFAULTS,
    progress: Progress | None = None,
    tracer: OpTracer | None = None,
) -> Frontier:
    """`search` with its options as one value, and a tracer of its own, as the commands call it."""
    if tracer is None:
        from shardwright.tracing.op_memory.footprints import Footprints

        tracer = Footprints(on_cpu=machine.backend_spec.device == "cpu")
    return Frontier.of(planner.search(graph, machine, options, tracer, progress))
