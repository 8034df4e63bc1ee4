"""The choices of operators and parameters that are permitted along a mesh axis of a given role.

They restrict the axes that the user names by roles: along `dp` only the batch is split; along `tp`
any dimension except batch and experts; along `cp` and `sp` the sequence, or the heads in attention;
along `ep` the experts, and batch or sequence in the other operators.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.ir.graph import Op
from shardwright.ir.layout import REPLICATE, Layout
from shardwright.planner.strategies.dimensions import ModelDimensions, is_attention
from shardwright.planner.tables.model import CostModel
from shardwright.rules.rule import Choice, JointSplit, PassPartial, Route, Rule, Tiling

DATA = ("dp", "dp_replicate", "dp_shard")
ROLES = (*DATA, "cp", "sp", "tp", "ep")  # axis names that stand for a role
_TRUE_OF = {"dp": ("dp_replicate", "dp_shard"), "sp": ("cp",)}  # further roles of a name


def is_true(name: str, role: str) -> bool:
    """Whether an axis of this role may have this name; names that are not roles are always allowed.

    >>> is_true("dp", "dp_shard"), is_true("tp", "dp_shard"), is_true("inner", "tp")
    (True, False, True)
    """
    return name not in ROLES or name == role or role in _TRUE_OF.get(name, ())


def means(word: str, name: str) -> bool:
    """Whether `word` in a constraint refers to the axis of this name.

    >>> means("dp", "dp_shard"), means("sp", "cp"), means("dp", "tp")
    (True, True, False)
    """
    return word == name or name in _TRUE_OF.get(word, ())


def suitable(op: Op, rule: Rule, role: str, dimensions: ModelDimensions) -> frozenset[int]:
    """Indices into `rule.choices()` of the choices permitted along an axis of this role."""
    attention = is_attention(op, rule)
    return frozenset(
        number
        for number, choice in enumerate(rule.choices())
        if role not in ROLES
        or choice is None
        or isinstance(choice, PassPartial)
        or _suits(choice, rule, role, dimensions, attention=attention)
    )


def _suits(
    choice: Choice, rule: Rule, role: str, dimensions: ModelDimensions, *, attention: bool
) -> bool:
    cut = {rule.factor[name].atom for name in rule.cuts(choice)}
    if isinstance(choice, Route):
        return role == "ep"
    if isinstance(choice, JointSplit):
        return role in ("cp", "sp")
    if role in DATA:
        return bool(cut & dimensions.batch)
    if role == "tp":
        return not cut & (dimensions.batch | dimensions.experts)
    if role == "ep":
        return bool(cut & (dimensions.batch | dimensions.sequence | dimensions.experts))
    return bool(cut & dimensions.sequence) or (attention and bool(cut & dimensions.heads))


def contradicted(
    model: CostModel, tilings: Mapping[str, Tiling], storage: Mapping[str, Layout]
) -> bool:
    """Whether an operator or parameter makes a choice that the role of an axis does not permit."""
    dimensions = ModelDimensions.of(model.graph, model.analysis)
    for axis, (role, size) in enumerate(model.mesh.axes):
        if size == 1 or role not in ROLES:
            continue
        if role == "dp_replicate" and any(
            layout.placements[axis] != REPLICATE for layout in storage.values()
        ):
            return True
        for op in model.graph.ops:
            rule = model.analysis.rules[op.name]
            chosen = rule.choices().index(tilings[op.name][axis])
            if chosen not in suitable(op, rule, role, dimensions):
                return True
    return False
