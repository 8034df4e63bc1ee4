"""The plan for each setting of the page, and the lines shown of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwright.cli.commands.plan_files.report import page_of
from shardwright.cli.explore.background import Values
from shardwright.cli.planning import capturing, choosing, searching
from shardwright.ir.layout import Bytes
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.ir.plan import Plan
from shardwright.machine.model import Machine
from shardwright.report.accuracy import may_fit
from shardwright.report.answer import answer_lines, speed_of
from shardwright.report.choice import fit
from shardwright.report.headline import headline
from shardwright.report.other_plans import other_plans
from shardwright.report.page import Shown
from shardwright.train.targets.target_text import Target

_GRAPHS = 4  # captured graphs that are kept


@dataclass(frozen=True, slots=True)
class Explored:
    """A plan with the other plans of its search, its limit in bytes, and lines for the page."""

    plan: Plan
    limit: int | None
    content: Mapping[str, Any]

    def report(self, title: str) -> str:
        """The whole report of the plan, as `shardwright report` writes it."""
        return page_of([Shown("plan", self.plan)], title, self.limit)


class Explorer:
    """Finds the plan of one target on parts of one machine, for sizes that are given each time."""

    def __init__(
        self,
        target: Target,
        machine: Machine,
        options: PlanOptions,
        optimizer: str | None,
        numerics: Mapping[str, str],
    ) -> None:
        self._target, self._machine, self._options = target, machine, options
        self._optimizer, self._numerics = optimizer, numerics
        self._graphs: OrderedDict[Target, capturing.CapturedTarget] = OrderedDict()

    def capture(self) -> None:
        """Capture the target as it was given; raises the errors of a target without a model."""
        self._captured(self._target)

    def find(self, values: Values) -> Explored:
        """The plan for these devices, bytes of memory a device, and sizes of the batch."""
        machine = self._machine.with_devices(values["devices"])
        target = replace(self._target, batch=values.get("batch"), seq=values.get("seq"))
        options = replace(self._options, memory_limit=Bytes(values["memory"]))
        searching.check([machine], options, target.batch)
        captured = self._captured(target)
        found = choosing.choose(captured, machine, "time", options)
        plan = found.plan
        others = other_plans(plan, found.frontier, values["memory"])
        rate, word = speed_of(plan)
        content = {
            "verdict": fit(plan, values["memory"]),
            "may_fit": may_fit(plan, values["memory"]),
            "strategy": headline(plan),
            "notes": [note for note in (str(found.preferred or ""), captured.precision) if note],
            "answer": list(answer_lines(plan, others.costs, values["memory"])),
            "seconds": plan.step_seconds,
            "bytes": plan.peak_bytes,
            "rate": rate,
            "unit": f"{word}/s",
        }
        shown = captured.named(found.frontier.with_rivals(plan, others.simulated))
        return Explored(shown, values["memory"], content)

    def _captured(self, target: Target) -> capturing.CapturedTarget:
        if target not in self._graphs:
            device = self._machine.device
            self._graphs[target] = capturing.capture(
                target,
                self._optimizer,
                numerics=self._numerics,
                fast_halves=device.fast_halves,
            )
        self._graphs.move_to_end(target)
        while len(self._graphs) > _GRAPHS:
            self._graphs.popitem(last=False)
        return self._graphs[target]
