"""The Pareto frontier of plans, fastest first, and queries on it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import overload

from shardwright.ir.layout import Bytes, Seconds
from shardwright.ir.plan import Plan, Rival

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}iB"] = 2 ** (10 * _power)
    _UNITS[f"{_letter}B"] = 10 ** (3 * _power)


_UNITLESS = 2**20  # fewer bytes than this as a text without a unit are a forgotten unit
ANY_TIME = Seconds(math.inf)  # as a limit of seconds: there is none
UNLIMITED = "unlimited"  # as a memory limit: plans may exceed the devices' memory

MOST_SETTLED = 16  # plans of a frontier whose memory is settled to show all of it

# Of a step: parameters that are gathered further ahead were never found to save more.
MOST_PREFETCHED = 0.25
ENDED = "the time limit has ended the search; a longer one may find a faster plan"
_AS_GOOD = 1.02  # of the fastest plan's time; slower than this by its limit, a plan has lost much


class InfeasibleError(ValueError):
    """No plan meets the memory limit; `smallest_bytes` is the least that one would need."""

    def __init__(self, message: str, smallest_bytes: Bytes) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class MemoryLimitError(ValueError):
    """A memory limit that is no number of bytes, or an implausible one."""


def parse_bytes(text: str | int | float) -> Bytes:
    """Number of bytes that a text such as "70GiB", "500 MB" or 1024 names.

    >>> parse_bytes("1.5KiB")
    1536
    """
    if isinstance(text, int | float):
        if isinstance(text, bool) or not 0 < text < math.inf:
            raise MemoryLimitError(
                f"memory {text!r} is no size; give more than zero bytes, or a text such as '40GiB'"
            )
        return Bytes(int(text))
    if not isinstance(text, str):
        raise MemoryLimitError(
            f"memory is a {type(text).__name__}; give a number of bytes or a text such as '40GiB'"
        )
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2] not in _UNITS:
        raise MemoryLimitError(
            f"memory {text!r} is not a number with a unit; write it as 40GiB or 500MB"
        )
    figure = float(found[1]) * _UNITS[found[2]]
    if not found[2] and figure < _UNITLESS:
        raise MemoryLimitError(f"memory {text!r} is {figure:g} bytes; did you mean {found[1]}GiB?")
    if not 1 <= figure < math.inf:
        raise MemoryLimitError(f"memory {text!r} is no size; give more, as in 40GiB")
    return Bytes(int(figure))


def parse_limit(text: str | int) -> Bytes | str:
    """A memory limit: a number of bytes, or the word for none."""
    return UNLIMITED if text == UNLIMITED else parse_bytes(text)


def format_bytes(count: float) -> str:
    """Bytes as `parse_bytes` reads them, in the largest unit of which there is one.

    >>> format_bytes(3 * 2**29), format_bytes(700)
    ('1.5 GiB', '700 B')
    """
    unit = next((u for u in ("TiB", "GiB", "MiB", "KiB") if count >= _UNITS[u]), "")
    return f"{count / _UNITS[unit]:.1f} {unit}" if unit else f"{count:.0f} B"


class Plans(Sequence[Plan]):
    """A lazy sequence of plans: their costs are known, a plan is built on first access.

    A plan names every operator of the model, so building one takes longer than finding it. Where
    `names` are given, those of the plans are known, too.
    """

    def __init__(
        self,
        costs: Sequence[tuple[Seconds, Bytes]],
        write: Callable[[int], Plan],
        names: Sequence[str] | None = None,
    ) -> None:
        self.costs = tuple(costs)
        self.names = None if names is None else tuple(names)
        self._write = write
        self._written: dict[int, Plan] = {}

    def __len__(self) -> int:
        return len(self.costs)

    @overload
    def __getitem__(self, index: int) -> Plan: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Plan, ...]: ...
    def __getitem__(self, index: int | slice) -> Plan | tuple[Plan, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(len(self))[index])
        index = range(len(self))[index]
        if index not in self._written:
            self._written[index] = self._write(index)
        return self._written[index]

    @property
    def written(self) -> Sequence[tuple[int, Plan]]:
        """The plans that were built, by index."""
        return tuple(self._written.items())

    @classmethod
    def mapped(cls, plans: Sequence[Plan], convert: Callable[[Plan], Plan]) -> Plans:
        """Every plan converted on first access; those that were built already, at once."""
        names = plans.names if isinstance(plans, Plans) else None
        found = cls(costs_of(plans), lambda index: convert(plans[index]), names)
        built = plans.written if isinstance(plans, Plans) else enumerate(plans)
        found._written.update((index, convert(plan)) for index, plan in built)
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(self.costs)


def costs_of(plans: Sequence[Plan]) -> tuple[tuple[Seconds, Bytes], ...]:
    """Seconds and bytes of every plan; builds none whose costs are known."""
    if isinstance(plans, Plans):
        return plans.costs
    return tuple((plan.step_seconds, plan.peak_bytes) for plan in plans)


def undominated(plans: Iterable[Plan]) -> list[Plan]:
    """The plans of which no other one is both faster and smaller, fastest first."""
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda one: (one.step_seconds, one.peak_bytes)):
        if not kept or plan.peak_bytes < kept[-1].peak_bytes:
            kept.append(plan)
    return kept


def names_of(plans: Sequence[Plan]) -> tuple[str, ...]:
    """The name of every plan; builds none whose names are known."""
    if isinstance(plans, Plans) and plans.names is not None:
        return plans.names
    return tuple(plan.name for plan in plans)


@dataclass(frozen=True)
class Frontier:
    """Plans that no other plan found beats in both time and memory, fastest first.

    Memory strictly falls from plan to plan. A search returns a subclass, whose memory adds up and
    is settled for the plan that is chosen.

    * `baselines`: well-known plans (data parallel, fully sharded, Megatron-style), costed by the
      same model, for comparison;
    * `constraints`: the constraints that all plans keep; `broken`: by the name of a baseline, the
      constraints that it breaks. Such a baseline is shown and never chosen;
    * `device_bytes`: the memory that a device has for tensors, and the default limit;
    * `hints`: advice for the error message of a limit that no plan meets.
    """

    plans: Sequence[Plan]
    baselines: Sequence[Plan] = ()
    search_seconds: float = 0.0
    constraints: tuple[str, ...] = ()
    broken: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    device_bytes: Bytes | None = None
    hints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.plans:
            raise ValueError("a frontier needs at least one plan")
        for i, (a, b) in enumerate(pairwise(self.costs)):
            if not (a[0] < b[0] and a[1] > b[1]):
                one, other = self.plans[i], self.plans[i + 1]
                raise ValueError(f"not a frontier, fastest first: {one} before {other}")

    @property
    def costs(self) -> tuple[tuple[Seconds, Bytes], ...]:
        """Seconds and bytes of every plan."""
        return costs_of(self.plans)

    def fastest(self, memory_limit: str | int | None = None) -> Plan:
        """The fastest plan whose peak memory per rank is within the limit (TensorOpt's mini-time).

        Without a limit it is the memory of a device. With `"unlimited"` the plan may exceed that
        and then has a note that says so.
        Raises `InfeasibleError`, naming the smallest memory that would do, when none is.
        """
        return self.noted(self.settled(self.fastest_compared(memory_limit)))

    def fastest_compared(self, memory_limit: str | int | None = None) -> Plan:
        """The plan of `fastest` before it is settled, as `compared` and `deepened` give it."""
        limit = self.limit(memory_limit)
        if limit is None:
            return self._fastest_of_all()
        if (plan := self._fastest_fitting(limit)) is not None:
            return plan
        raise self._infeasible(limit, memory_limit)

    def fastest_within(self, limit: Bytes | None, most: Seconds) -> Plan | None:
        """The plan of `fastest_compared` if it takes less than `most` seconds, else None.

        Plans that take longer are not compared. `limit` is that of the method `limit`.
        """
        if limit is None:
            found: Plan | None = self._fastest_of_all()
        else:
            found = self._fastest_fitting(limit, most)
        return None if found is None or found.step_seconds >= most else found

    def limit(self, memory_limit: str | int | None = None) -> Bytes | None:
        """`memory_limit` in bytes: of a device where it is None, None where it is unlimited."""
        if memory_limit is None:
            return self.device_bytes
        return None if memory_limit == UNLIMITED else parse_bytes(memory_limit)

    def _infeasible(self, limit: Bytes, given: str | int | None) -> InfeasibleError:
        """The error that no plan fits into `limit`; `given` is the user's text, None for none."""
        least = self._smallest()
        under = " under these constraints" if self.constraints else ""
        whose = "" if given is not None else ", the memory of a device"
        advice = "raise the limit, add devices or shrink the batch"
        if given is None:
            advice = (
                "add devices, shrink the batch, or ask with the memory limit"
                f" {UNLIMITED!r} for a plan that does not fit"
            )
        return InfeasibleError(
            "; ".join(
                (
                    f"no plan for {least.devices} device{'s' * (least.devices > 1)} of"
                    f" {least.machine}{under} fits into"
                    f" {format_bytes(limit)} per rank{whose}; the smallest needs"
                    f" {format_bytes(least.peak_bytes)}: {advice}",
                    *self.hints,
                )
            ),
            least.peak_bytes,
        )

    def noted(self, plan: Plan) -> Plan:
        """`plan`, with notes if it exceeds the memory of a device, or time limited the search."""
        if self.ended_early:
            plan = replace(plan, notes=(*plan.notes, ENDED))
        if self.device_bytes is None or plan.peak_bytes <= self.device_bytes:
            return plan
        note = (
            f"exceeds the device memory: it needs {format_bytes(plan.peak_bytes)} per rank, a"
            f" device of {plan.machine} has {format_bytes(self.device_bytes)}"
        )
        return replace(plan, notes=(note, *plan.notes))

    def _fastest_of_all(self) -> Plan:
        """The fastest plan, whatever memory it needs."""
        return self.plans[0]

    def _fastest_fitting(self, limit: Bytes, most: Seconds = ANY_TIME) -> Plan | None:
        """The fastest plan that is found to fit, or another one, if that takes `most` or longer."""
        fitting = (i for i, (_, peak) in enumerate(self.costs) if peak <= limit)
        return next((self.plans[i] for i in fitting), None)

    @property
    def good(self) -> int:
        """Number of plans that are about as fast as the fastest, within 2 %."""
        return sum(seconds <= _AS_GOOD * self.costs[0][0] for seconds, _ in self.costs)

    def place_of(self, plan: Plan) -> int | None:
        """The index of the listed plan that was settled to `plan`; None if it is not listed."""
        for index, known in self._written():
            if known.ops is plan.ops:
                return index
        own = plan.step_seconds, plan.added_seconds
        for index, (seconds, _) in enumerate(self.costs):
            if any(math.isclose(seconds, one, rel_tol=1e-9) for one in own):
                return index
        return None

    def _written(self) -> Sequence[tuple[int, Plan]]:
        """The plans that were looked at, by index."""
        if isinstance(self.plans, Plans):
            return self.plans.written
        return tuple(enumerate(self.plans))

    def with_rivals(self, plan: Plan, simulated: Mapping[int, Plan] | None = None) -> Plan:
        """`plan`, one of these, with `rivals`: the costs of the others and of the baselines.

        `simulated` are plans of the frontier that were simulated, by index.
        """
        found, own = dict(enumerate(self.costs)), self.place_of(plan)
        known = {i: (p.step_seconds, p.peak_bytes) for i, p in (simulated or {}).items()}
        others = [
            Rival("", plan.devices, *known.get(i, cost), i in known or self.is_settled)
            for i, cost in found.items()
            if i != own
        ]
        baselines = [
            Rival(name, plan.devices, *cost, self.is_settled)
            for name, cost in zip(names_of(self.baselines), costs_of(self.baselines), strict=True)
            if name != plan.name
        ]
        return replace(plan, rivals=(*others, *baselines))

    def smallest(self, memory_limit: str | int | None = None) -> Plan:
        """The plan with the least peak memory per rank (TensorOpt's mini-memory).

        The limit is that of `fastest`: one that exceeds the memory of a device is only given where
        that is `"unlimited"` or more; else `InfeasibleError` is raised.
        """
        limit, best = self.limit(memory_limit), self._smallest()
        if limit is not None and best.peak_bytes > limit:
            raise self._infeasible(limit, memory_limit)
        return self.noted(self.settled(best))

    def _smallest(self) -> Plan:
        """The plan that needs the least memory."""
        return self.plans[-1]

    @property
    def is_settled(self) -> bool:
        """Whether the memory of plans is settled already."""
        return True

    @property
    def is_late(self) -> bool:
        """Whether the time limit of the search is over, so that no more plans are compared."""
        return False

    @property
    def ended_early(self) -> bool:
        """Whether the time limit has ended the search, or ends the comparison of its plans."""
        return False

    def settled(self, plan: Plan) -> Plan:
        """Simulate time and memory of a step of a plan, from the programs of its ranks.

        Args:
            plan: one of these plans, or of the baselines.

        Returns:
            The same plan with the `step_seconds` and `timeline` of its step program, and the
            `peak_bytes` and `memory` that the worst rank needs.
        """
        return plan

    def compared(self, plan: Plan) -> Plan:
        """A plan with the time and peak that `settled` finds; it may have no timeline."""
        return self.settled(plan)

    def expect(self, plans: Sequence[Plan]) -> None:
        """Say that `compared` will be asked of these plans, so that it may find them at once."""

    def expect_deepened(self, plans: Iterable[Plan], limit: Bytes | None) -> None:
        """Say that `deepened` will be asked of the first of these plans, within `limit`."""

    def simulated_peak(self, plan: Plan) -> Bytes:
        """The peak memory that `compared` finds, which may be known before its time."""
        return self.compared(plan).peak_bytes

    def reserved(self, plan: Plan) -> Bytes:
        """Bytes that torch's allocator reserves of a compared plan, without libraries.

        Zero where it caches no memory, or the memory of the plan is not simulated.
        """
        memory = plan.memory
        return Bytes(0 if memory is None else max(0, memory.reserved - memory.libraries))

    def simulated_seconds(self, plan: Plan) -> Seconds:
        """The step time that `compared` finds, which may be known before its memory."""
        return self.compared(plan).step_seconds

    def deepened(self, plan: Plan, limit: Bytes | None) -> Plan:
        """Gather as many buckets of parameters ahead in a plan as make it faster.

        Args:
            plan: a compared plan.
            limit: bytes that it may need per rank; None for no limit.

        Returns:
            A plan with the same layouts and another `ahead`, or the same plan.
        """
        return plan

    def all_settled(self, most: int = MOST_SETTLED) -> Frontier:
        """The frontier of simulated time and memory.

        Simulation takes a quarter of a second to a second for a plan of a large model.

        Args:
            most: plans to simulate at most; of a longer frontier they are taken evenly, with both
                ends.

        Returns:
            Those plans that none of the others beats, and the baselines.
        """
        return self

    def bound(self, peak: int) -> Seconds:
        """A lower bound in seconds on every plan whose added-up memory is at most `peak` bytes.

        The bound of the smallest listed plan that needs as much, or of the fastest where none does.
        """
        roomy = [i for i, (_, needed) in enumerate(self.costs) if needed >= peak]
        return self[roomy[-1] if roomy else 0].lower_bound_seconds

    def __len__(self) -> int:
        return len(self.plans)

    def __getitem__(self, index: int) -> Plan:
        return self.plans[index]

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def __str__(self) -> str:
        return "\n".join(str(plan) for plan in self.plans)
