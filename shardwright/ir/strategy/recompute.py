"""`Recompute`: which activations a strategy recomputes in the backward pass.

Its words are those that the frameworks' settings reduce to:

* `none`, and `full`: every layer keeps its inputs alone;
* `every(n)`: each n-th layer is recomputed (torchtitan's `selective_ac_option = "2"`);
* `first(n)`: the first n layers of each stage are (Megatron-LM's method `block`);
* `groups(n)`: groups of n layers keep one input (Megatron-LM's method `uniform`);
* `ops(NAME,...)`: everything but the results of these operators is (torchtitan's `SelectiveAC`);
* `modules(GLOB,...)`: these modules alone are (Megatron-LM's `recompute-modules`);
* `children`: each child of a layer is, by itself (accelerate's FSDP2);
* `budget(x)`: as much as leaves x of the activations, 0 < x < 1 (`MemoryBudgetAC`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PLAIN = ("none", "full", "children")
COUNTED = ("every", "first", "groups")
NAMED = ("ops", "modules")
# Operators that users name differently from their kind, e.g. in torchtitan's list.
_PRODUCTS = frozenset({"mm", "linear", "addmm", "matmul"})
_CALL = re.compile(r"(\w+)\(([^()]*)\)")
_EXAMPLES = (
    "none, full, children, every(2), first(4), groups(2), ops(mm,attention), modules(layers.*.mlp)"
    " or budget(0.5)"
)


class StrategyError(ValueError):
    """A strategy that cannot be read, contradicts itself, or does not fit model or machine."""


@dataclass(frozen=True, slots=True)
class Recompute:
    """A choice of what is recomputed: a word of this module, with its count, names or fraction.

    Attributes:
        kind: the word.
        count: of `every`, `first` and `groups`: a number of layers, at least 1.
        names: of `ops`, names of operators; of `modules`, globs of module paths.
        fraction: of `budget`: the part of the activations that is kept.

    Raises `StrategyError` for any other word or value.
    """

    kind: str = "none"
    count: int = 0
    names: tuple[str, ...] = ()
    fraction: float = 0.0

    def __post_init__(self) -> None:
        counted, named = self.kind in COUNTED, self.kind in NAMED
        fits = (
            self.kind in (*PLAIN, *COUNTED, *NAMED, "budget")
            and isinstance(self.count, int)
            and (self.count >= 1 if counted else self.count == 0)
            and (bool(self.names) and all(map(_is_name, self.names)) if named else not self.names)
            and (0 < self.fraction < 1 if self.kind == "budget" else self.fraction == 0)
        )
        if not fits:
            raise StrategyError(f"recomputation {str(self)!r} is not known; write {_EXAMPLES}")

    @classmethod
    def parse(cls, text: str) -> Recompute:
        """The value of a text such as `every(2)`.

        >>> Recompute.parse("every(2)").count
        2
        """
        call = _CALL.fullmatch(text)
        kind, inside = (call[1], call[2]) if call else (text, "")
        if kind in COUNTED and inside.isdecimal():
            return cls(kind, int(inside))
        if kind in NAMED and call:
            return cls(kind, names=tuple(inside.split(",")))
        if kind == "budget" and re.fullmatch(r"0?\.\d+(e-\d+)?", inside):
            return cls(kind, fraction=float(inside))
        if kind in PLAIN and not call:
            return cls(kind)
        raise StrategyError(f"recomputation {text!r} is not known; write {_EXAMPLES}")

    def __str__(self) -> str:
        if self.kind in COUNTED:
            return f"{self.kind}({self.count})"
        if self.kind in NAMED:
            return f"{self.kind}({','.join(self.names)})"
        return f"budget({self.fraction:f})" if self.kind == "budget" else str(self.kind)


def _is_name(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[^\s,()]+", name) is not None


def op_word(kind: str) -> str:
    """The name in `ops` of operators of a kind.

    >>> op_word("linear"), op_word("scaled_dot_product_attention"), op_word("gelu")
    ('mm', 'attention', 'gelu')
    """
    if kind in _PRODUCTS:
        return "mm"
    return "attention" if "attention" in kind else kind


NONE = Recompute()
FULL = Recompute("full")
