"""Rules that users state for their own operators.

A rule is valid in the process in which it is stated. A captured graph stores it, so it need not be
stated again to plan or on ranks.
"""

from __future__ import annotations

_USER_RULES: dict[str, str] = {}


class RuleError(ValueError):
    """A stated rule that cannot be read."""


def rule(operator: str, notation: str) -> None:
    """State the rule of an operator in index notation, for all models that are captured afterwards.

    The rule is checked by running the operator when its first call is captured.

    Args:
        operator: its name as in `torch.ops`, with or without its overload:
            `"mylib::scaled_matmul"`.
        notation: the indices of each tensor operand, in order, then those of each result; `...`
            stands for any further leading dimensions.

    Raises:
        RuleError: either text is malformed.

    Examples:
        >>> rule("mylib::scaled_matmul", "... k, k n -> ... n")
    """
    for text in (operator, notation):
        if not isinstance(text, str):
            raise RuleError(
                f"rule got a {type(text).__name__}; give two texts, the operator and its notation"
            )
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
    _USER_RULES[f"{namespace}.{name}" + (f".{overload}" if overload else "")] = notation


def user_rule(target: str) -> str | None:
    """The rule stated for `namespace.name.overload`, or None."""
    return _USER_RULES.get(target) or _USER_RULES.get(target.rpartition(".")[0])
