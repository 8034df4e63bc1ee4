"""Remarks on operators of a plan: discovered rules, unsplittable, opaque and decomposed ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shardwright.ir.graph import Graph, Op
from shardwright.ir.plan import Remark, RemarkKind
from shardwright.rules.analysis import Analysis
from shardwright.rules.user_rules import user_rule

_ATTENTION = "attention with dropout"
_OPAQUE = "shardwright.opaque.default"
_FUNCTION = "shardwright.function.default"  # args: operands, key, class and arguments
_FUSED_INSTEAD = (
    "computed by its formula, since a fused kernel draws numbers of its own; rng='fast' keeps it"
)


def remarks(
    graph: Graph, analysis: Analysis, representative: Callable[[str], str] = lambda name: name
) -> tuple[Remark, ...]:
    """The remarks on `graph`, most frequent first within each kind.

    `analysis` may be of a shorter graph, in which `representative(name)` stands for `name`.
    """
    discovered = set(analysis.discovered)
    ruled = [op for op in graph.ops if representative(op.name) in discovered]
    user_defined = [op for op in ruled if user_rule(op.target) == op.rule]
    by_experiment = [op for op in ruled if user_rule(op.target) != op.rule]
    return (
        *_by_target(RemarkKind.DISCOVERED, by_experiment),
        *_by_target(RemarkKind.STATED, user_defined),
        *_unsplittable(graph, lambda op: analysis.rules[representative(op.name)].why_unsplittable),
        *_opaque_modules(graph),
        *_explicit_attention(graph),
    )


def _by_target(kind: RemarkKind, ops: Iterable[Op]) -> Iterable[Remark]:
    by_target: dict[str, list[Op]] = {}
    for op in ops:
        by_target.setdefault(_name(op), []).append(op)
    for target, own in sorted(by_target.items(), key=lambda item: -len(item[1])):
        rules = list(dict.fromkeys(op.rule for op in own))
        more = f" and {len(rules) - 1} more, by shape" if len(rules) > 1 else ""
        names = tuple(op.name for op in own)
        yield Remark(kind, target, rules[0] + more, names, len(own))


def _name(op: Op) -> str:
    return f"autograd function {op.args[2]}" if op.target == _FUNCTION else op.target


def _unsplittable(graph: Graph, why: Callable[[Op], str]) -> Iterable[Remark]:
    """Operators on tensors that cannot be split, by target and reason."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for op in graph.ops:
        if op.operands and op.target != _OPAQUE and (reason := why(op)):
            by_reason.setdefault((_name(op), reason), []).append(op.name)
    for (target, reason), names in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        yield Remark(RemarkKind.REPLICATED, target, reason, tuple(names), len(names))


def _opaque_modules(graph: Graph) -> Iterable[Remark]:
    by_class: dict[str, list[Op]] = {}
    for op in graph.ops:
        if op.target == _OPAQUE:
            by_class.setdefault(str(op.args[2]), []).append(op)
    for kind, own in by_class.items():
        paths = dict.fromkeys(str(op.args[1]).partition("#")[0] for op in own)
        names = tuple(op.name for op in own)
        yield Remark(RemarkKind.OPAQUE, kind, f"({', '.join(paths)})", names, len(own))


def _explicit_attention(graph: Graph) -> Iterable[Remark]:
    parts = [op for op in graph.ops if op.part_of]
    if parts:
        count = len({op.part_of for op in parts})
        names = tuple(op.name for op in parts)
        yield Remark(RemarkKind.EXPLICIT, _ATTENTION, _FUSED_INSTEAD, names, count)
