"""The public classes: the values of `ir` with methods of the layers above them.

`search` and `plan` return them. Values inside of the package are those of `ir`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from html import escape

from shardwright.ir import frontier as ir_frontier
from shardwright.ir import plan as ir_plan
from shardwright.machine import model
from shardwright.machine.files import load_machine, with_figures
from shardwright.machine.presets import preset
from shardwright.machine.toml import to_toml
from shardwright.plan_io.files import load_plan, save_plan
from shardwright.plan_io.plan_text import plan_from_json, plan_to_json
from shardwright.report.frontier_svg import frontier_html
from shardwright.report.text.explain import explain


@dataclass(frozen=True, eq=False)
class Plan(ir_plan.Plan):
    """One way to train one graph in parallel, with its predicted cost; see `ir/plan.py`.

    `step_seconds` is one optimizer step, `peak_bytes` the memory per rank of the worst rank,
    `lower_bound_seconds` a time that no plan of the same cost model within the same memory beats.
    """

    @classmethod
    def of(cls, plan: ir_plan.Plan) -> Plan:
        """The same plan with the public methods."""
        if isinstance(plan, cls):
            return plan
        return cls(**{field.name: getattr(plan, field.name) for field in fields(plan)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file; raises `PlanError` for anything that is not a whole, valid plan."""
        return cls.of(load_plan(path))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote; raises `PlanError` for anything else."""
        return cls.of(plan_from_json(text))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, atomically; raises `PlanError` where that is not possible."""
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
class Frontier(ir_frontier.Frontier):
    """Plans that no other plan found beats in both time and memory; see `ir/frontier.py`.

    Fastest first, so memory strictly falls: `frontier[0]`, `frontier.fastest(memory_limit)`,
    `frontier.smallest()`. `baselines` are well-known plans priced by the same model.
    """

    plans: Sequence[Plan]
    baselines: Sequence[Plan] = ()

    @classmethod
    def of(cls, found: ir_frontier.Frontier) -> Frontier:
        """The same frontier, whose plans have the public methods."""
        values = {field.name: getattr(found, field.name) for field in fields(found)}
        values["plans"] = ir_frontier.Plans(found.costs, lambda i: Plan.of(found.plans[i]))
        values["baselines"] = tuple(Plan.of(plan) for plan in found.baselines)
        return cls(**values)

    def fastest(self, memory_limit: str | int | None = None) -> Plan:
        """The fastest plan whose peak memory per rank is within the limit.

        The limit is the memory of a device unless `memory_limit` says otherwise; with "unlimited" a
        plan may exceed it and then has a note that says so. Raises `InfeasibleError`, naming the
        smallest memory that would do, when no plan fits.
        """
        return Plan.of(super().fastest(memory_limit))

    def smallest(self, memory_limit: str | int | None = None) -> Plan:
        """The plan with the least peak memory per rank; the limit is that of `fastest`."""
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
    """The hardware a plan is made for; see `machine/model.py`."""

    @classmethod
    def of(cls, found: model.Machine) -> Machine:
        """The same machine with the public methods."""
        return cls(**{field.name: getattr(found, field.name) for field in fields(found)})

    @classmethod
    def preset(cls, text: str) -> Machine:
        """Known hardware by `[HOSTSx]DEVICESxKIND`, as `8xH100`, `2x8xA100` or `2xcpu`.

        Raises `MachineError` for malformed text and for kinds without a preset.
        """
        return cls.of(preset(text))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Machine:
        """Read a machine file as `to_toml` writes it; raises `MachineError` for anything else."""
        return cls.of(load_machine(path))

    @classmethod
    def measure(cls, devices: int | None = None) -> Machine:
        """What the devices at hand reach, measured.

        Under torchrun every rank calls it, and the ranks of the process group
        are measured together. Without one, `devices` processes are started on
        this host (by default one per GPU, or per core where there is none);
        that result is kept in a cache of this host.
        """
        from shardwright.profile.measure import measure_here

        return cls.of(measure_here(devices))

    def with_(self, **figures: object) -> Machine:
        """The same machine with other figures, named and written as in machine files.

        Names with a dot, as `compute.bfloat16` or `nvlink.bandwidth`, are given as
        `with_(**{"nvlink.bandwidth": "400GB/s"})`. Raises `MachineError` for other names and for
        figures that cannot be.

        >>> Machine.preset("8xH100").with_(memory="72GB", overlap=0.6).device.memory_bytes
        72000000000
        """
        return Machine.of(with_figures(self, **figures))

    def with_devices(self, devices: int) -> Machine:
        """The same machine with only `devices` of its devices, for planning on fewer."""
        return Machine.of(model.Machine.with_devices(self, devices))

    def to_toml(self) -> str:
        """The machine as readable TOML; `load` reads it back to an equal machine."""
        return to_toml(self)
