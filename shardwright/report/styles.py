"""Expresses a plan in the styles of `torch.distributed.tensor.parallel`, where that is possible.

Those tools split the parameters of single modules along one mesh axis and run all other operators
on local tensors. So the plan's modules become styles, and the layouts of values are followed
through the operators to check that nothing in between needs a redistribution. A split that the
tools cannot express is computed whole, with a note; where a value would be wrong, the plan is not
expressible.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePath

from shardwright.ir.layout import Layout, Shard
from shardwright.ir.plan import Phase, Plan, PlannedOp

_ELEMENTWISE = frozenset(["add", "sub", "mul", "div", "neg", "pow", "exp", "log", "sqrt", "rsqrt"])
_ELEMENTWISE |= frozenset(["relu", "gelu", "silu", "tanh", "sigmoid", "erf", "abs", "clamp"])
_ELEMENTWISE |= frozenset(["where", "dropout", "clone", "_to_copy"])
_LOSSES = ("cross_entropy_loss", "linear_cross_entropy", "_log_softmax", "log_softmax", "nll_loss")
_LAST = "S(-1)"
_PARTS = ("S(1)", "S(2)")  # of the sequence, of the heads: whole dimensions before the last


class NotExpressibleError(ValueError):
    """A plan that the requested format cannot express."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"not expressible, because {reason}")


@dataclass(frozen=True, slots=True)
class Style:
    """The style of one module.

    `kind` is `colwise`, `rowwise` or `sequence`, or `input`, `output` and `both` for a module whose
    activations are only redistributed. `before` and `after` are the placements of the module's
    input and output: `R`, `S(1)`, and `S(-1)` for the last dimension. `sequence` is for norms, also
    of heads: `S(2)`.
    """

    kind: str
    before: str
    after: str
    embedding: bool = False


@dataclass(frozen=True)
class Styles:
    """The styles of a plan by module path, along `axis`; `data` says how others shard parameters.

    `notes` list the plan's decisions that the styles do not express.
    """

    axis: str | None
    data: dict[str, str]
    modules: dict[str, Style]
    notes: tuple[str, ...]


def styles(plan: Plan) -> Styles:
    """The plan as styles; raises `NotExpressibleError` where they cannot express a decision."""
    if plan.ops and not any(op.reads for op in plan.ops):
        raise NotExpressibleError(
            "the plan file is of an earlier version, which did not say what operators read; plan"
            " again"
        )
    data: dict[str, str] = {}
    tensor = []
    for place, (axis, size) in enumerate(plan.layout_mesh.axes):
        if size > 1:
            if all(_batch_only(op, place) for op in plan.ops):
                data[axis] = _data_style(plan, place)
            else:
                tensor.append((place, axis))
    if len(tensor) > 1:
        raise NotExpressibleError(
            f"both {tensor[0][1]} and {tensor[1][1]} split more than the batch, and these styles"
            " are for one mesh axis; --forbid '*=dp:features' and the like give a plan that is"
        )
    if not tensor:
        return Styles(None, data, {}, tuple(_other_decisions(plan)))
    followed = _StyledLayouts(plan, tensor[0][0])
    followed.run()
    notes = (*followed.notes(), *_other_decisions(plan))
    return Styles(tensor[0][1], data, followed.styles, notes)


def _batch_only(op: PlannedOp, place: int) -> bool:
    return op.splits[place].removesuffix(" (sum)") in ("-", "batch", "partial sums")


def _data_style(plan: Plan, place: int) -> str:
    sharded = any(isinstance(p.layout.placements[place], Shard) for p in plan.parameters)
    return "fully_shard" if sharded else "replicate"


def _other_decisions(plan: Plan) -> Iterator[str]:
    """Decisions of a plan other than tilings."""
    if plan.micro_batches > 1:
        yield f"the batch is taken in {plan.micro_batches} micro-batches, whose gradients add up"
    again = {op.source.module for op in plan.ops if op.runs_again}
    if again:
        yield f"activations are recomputed in {', '.join(sorted(set(map(glob, again))))}"


def glob(path: str) -> str:
    """The path with the numbers of repeated modules replaced by a wildcard.

    >>> glob("h.3.attn")
    'h.*.attn'
    """
    return re.sub(r"(?:(?<=\.)|^)\d+(?=\.|$)", "*", path)


@dataclass
class _StyledLayouts:
    """The layouts of values along one axis in the user's code under the styles."""

    plan: Plan
    place: int
    styles: dict[str, Style] = field(default_factory=dict)
    home: dict[str, str] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)  # module -> its split in the plan

    def __post_init__(self) -> None:
        self.axis = self.plan.layout_mesh.names[self.place]
        self.op = {op.name: op for op in self.plan.ops}
        self.stored = {p.name: self._placed(p.layout) for p in self.plan.parameters}
        self.readers: defaultdict[str, list[PlannedOp]] = defaultdict(list)
        self.owners: defaultdict[str, set[str]] = defaultdict(set)
        for op in self.plan.ops:
            for value in op.reads:
                self.readers[value].append(op)
                if value in self.stored:
                    self.owners[value].add(op.source.module)
        self.moved: dict[Phase, set[str]] = {phase: set() for phase in Phase}
        for t in self.plan.transfers:
            if any(c.split()[-1] == self.axis for c in t.collectives):
                self.moved[t.phase].add(t.value)
        self.norms = dict(self._norms())

    def run(self) -> None:
        for op in self.plan.ops:
            self.home[op.name] = self._layer(op) if self._is_layer(op) else self._between(op)
        for name, placement in self.stored.items():
            styled = any(path in self.styles for path in self.owners[name])
            if placement != "R" and not styled:
                raise NotExpressibleError(
                    f"{name} is stored {self.axis}:{placement}, and no module that reads it is"
                    f" split so; plan with --pin '{name}={self.axis}:R'"
                )
        for op in self.plan.ops:
            if not self.readers[op.name] and self.home[op.name] == "P":
                raise NotExpressibleError(f"{self._at(op)} ends in partial sums over {self.axis}")

    def notes(self) -> Iterator[str]:
        whole: dict[tuple[str, str], None] = {}
        for path, word in self.whole.items():
            whole[glob(path), word.removesuffix(" (sum)")] = None
        for path, word in whole:
            yield f"{path or 'the model itself'} is computed whole; the plan splits its {word}"
        if any("S(1)" in (style.before, style.after) for style in self.styles.values()):
            yield (
                "activations between modules are cut along dimension 1; code that takes its size"
                " from them, to make positions or masks, must be given those"
            )

    def _placed(self, layout: Layout) -> str:
        return str(layout.placements[self.place])

    def _planned(self, value: str) -> str:
        return self._placed(self.op[value].layout) if value in self.op else "R"

    def _is_layer(self, op: PlannedOp) -> bool:
        """Whether a module consists of this operator and its own parameters."""
        return op.kind in ("linear", "embedding") and any(v in self.stored for v in op.reads)

    def _norms(self) -> Iterator[tuple[str, str]]:
        """Modules with parameters whose operators all run on one part, as `S(1)` of the sequence.

        Or of the heads that a column-wise layer produced, as norms of queries do.
        """
        by_module: defaultdict[str, list[PlannedOp]] = defaultdict(list)
        for op in self.plan.ops:
            by_module[op.source.module].append(op)
        for path, ops in by_module.items():
            own = any(v in self.stored for op in ops for v in op.reads)
            split = {self._placed(op.layout) for op in ops}
            part = min(split)
            if own and not any(map(self._is_layer, ops)) and len(split) == 1 and part in _PARTS:
                yield path, part

    def _layer(self, op: PlannedOp) -> str:
        """Record the style of a linear layer or embedding; returns the layout of its result."""
        path = op.source.module
        weight = next(v for v in op.reads if v in self.stored)
        name = self._split(op)
        inputs = [v for v in op.reads if v not in self.stored]
        before = self.home.get(inputs[0], "R") if inputs else "R"
        made = {"colwise": _LAST, "rowwise": "P"}.get(name, "R")
        if name and len(self.owners[weight]) > 1:
            raise NotExpressibleError(
                f"{weight} is tied, and a style would give each module a tensor of its own"
            )
        after = self._wanted(op, made)
        if name == "rowwise" and op.kind == "linear" and before == self._planned(inputs[0]):
            before = _LAST if before != "R" else "R"
        if name:
            self._set(path, Style(name, before, after, op.kind == "embedding"), op)
        else:
            if op.splits[self.place] != "-":
                self.whole[path] = op.splits[self.place]
            kinds = {(True, False): "input", (False, True): "output", (True, True): "both"}
            if (before, after) != ("R", "R"):
                self._set(path, Style(kinds[before != "R", after != "R"], before, after), op)
        return self._planned(op.name) if after == _LAST else after

    def _split(self, op: PlannedOp) -> str:
        """`colwise` or `rowwise`; empty where no style expresses the plan's split."""
        factor, _, atom = op.tiling[self.place].partition(".")
        if op.kind == "embedding":
            weight = next(self.stored[v] for v in op.reads if v in self.stored)
            at = {"S(0)": "rowwise", "S(1)": "colwise"}.get(weight, "")
            found = at if not factor.startswith(("i", "-")) else ""
        else:
            found = {"n": "colwise", "k": "rowwise"}.get(factor, "")
        if found and atom not in ("", "0"):
            raise NotExpressibleError(
                f"{self._at(op)} splits {op.splits[self.place]} inside of a fused dimension, and"
                " styles cut a dimension only from its start"
            )
        return found

    def _set(self, path: str, style: Style, op: PlannedOp) -> None:
        if self.styles.setdefault(path, style) != style:
            raise NotExpressibleError(f"{self._at(op)} is called twice and split in two ways")

    def _wanted(self, op: PlannedOp, made: str) -> str:
        """The layout in which readers other than layers read a layer's result."""
        others = [r for r in self.readers[op.name] if not self._is_layer(r)]
        if made == _LAST and self._feeds_split_loss(op):
            return "R"
        if op.name not in self.moved[Phase.FORWARD] and made == _LAST:
            return _LAST
        wants = {self._placed(r.layout) for r in others}
        if not wants:
            return "R"
        odd = [r for r in others if not self._keeps_layout(r)]
        if made == "R" and (len(wants) > 1 or odd):
            return "R"  # its readers are computed whole, or rejected later
        if len(wants) > 1 or wants == {"P"} or odd:
            reader = (odd or others)[0]
            raise NotExpressibleError(
                f"{self._at(reader)} reads {op.source.module} in another layout than others do"
            )
        return wants.pop()

    def _feeds_split_loss(self, op: PlannedOp) -> bool:
        """Whether only views are between this operator and a loss whose classes the plan splits."""
        waiting, seen = [op], {op.name}
        while waiting:
            for reader in self.readers[waiting.pop().name]:
                if self._is_layer(reader) or reader.name in seen:
                    continue
                seen.add(reader.name)
                if reader.splits[self.place].startswith("classes") and reader.kind in _LOSSES:
                    return True
                waiting.append(reader)
        return False

    def _keeps_layout(self, op: PlannedOp) -> bool:
        """Whether its operands of the result's shape have the result's layout."""
        same = op.kind in _ELEMENTWISE or op.source.module in self.norms
        return same or self._placed(op.layout) == "R"

    def _between(self, op: PlannedOp) -> str:
        """The layout of the result of an operator that runs on local tiles."""
        planned = self._placed(op.layout)
        values = [v for v in op.reads if v not in self.stored]
        homes = [self.home.get(v, "R") for v in values]
        if part := self.norms.get(op.source.module):
            if any(h not in (part, "R") for h in homes):
                raise NotExpressibleError(f"{self._at(op)} takes activations in {homes}")
            if len(values) > 0 and homes[0] == part:
                self.styles[op.source.module] = Style("sequence", part, part)
                return planned
        if all(h == "R" for h in homes):
            if planned != "R" and op.splits[self.place] != "-":
                self.whole.setdefault(op.source.module, op.splits[self.place])
            return "R"
        if any(v in self.stored for v in op.reads) and planned != "R":
            raise NotExpressibleError(
                f"{self._at(op)} uses a parameter whole on a part of the"
                f" {op.splits[self.place]}, so that its gradient would lack the other parts"
            )
        stays = [
            h == self._planned(v) and v not in self.moved[Phase.FORWARD]
            for v, h in zip(values, homes, strict=True)
        ]
        fits = op.kind in _ELEMENTWISE and all(
            h == planned or (h == "R" and stay) for h, stay in zip(homes, stays, strict=True)
        )
        if not (all(stays) or fits):
            moved = values[next(i for i, stay in enumerate(stays) if not stay)]
            what = self.op[moved].kind if moved in self.op else moved
            raise NotExpressibleError(
                f"{self._at(op)} has {what} redistributed over {self.axis} in the middle of a"
                " module"
            )
        for v, h in zip(values, homes, strict=True):
            if h == "R" and planned != "R" and v in self.op and v in self.moved[Phase.BACKWARD]:
                raise NotExpressibleError(
                    f"{self._at(op)} needs the gradient of {self.op[v].kind} summed over"
                    f" {self.axis} in the middle of a module"
                )
        return planned

    def _at(self, op: PlannedOp) -> str:
        file = PurePath(op.source.file).name
        where = f" ({file}:{op.source.line})" if file else ""
        return f"{op.kind} of {op.source.module or 'the model'}{where}"
