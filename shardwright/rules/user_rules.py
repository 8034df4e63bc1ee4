"""Rules that users state for their own operators.

A statement holds for the process. It travels with the captured graph, so a
plan and the ranks that run it need not state it again.
"""

from __future__ import annotations

_STATED: dict[str, str] = {}


class RuleError(ValueError):
    """A statement of a rule that cannot be read."""


def rule(operator: str, notation: str) -> None:
    """State the rule of an operator in index notation, for all models captured from here on.

    `operator` is its name as in `torch.ops`, with or without its overload:
    `"mylib::scaled_matmul"`. Operands are those that are tensors, in order.
    Raises `RuleError` if either text is malformed.

    >>> rule("mylib::scaled_matmul", "... k, k n -> ... n")
    """
    for text in (operator, notation):
        if not isinstance(text, str):
            raise RuleError(f"rule is given a {type(text).__name__}; give two texts")
    name, _, overload = operator.replace("::", ".").partition(".")[2].partition(".")
    namespace = operator.replace("::", ".").partition(".")[0]
    if not namespace or not name:
        raise RuleError(
            f"{operator!r} names no operator; write namespace::name, as in 'mylib::scaled_matmul'"
        )
    if notation.count("->") != 1:
        raise RuleError(
            f"the rule {notation!r} of {operator} needs one '->' between operands and results"
        )
    _STATED[f"{namespace}.{name}" + (f".{overload}" if overload else "")] = notation


def stated(target: str) -> str | None:
    """What was stated for `namespace.name.overload`."""
    return _STATED.get(target) or _STATED.get(target.rpartition(".")[0])
