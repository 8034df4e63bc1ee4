"""Notes on operators of a plan: rules found by experiment, joint splits, opaque modules.

One remark covers the operators of one kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class RemarkKind(Enum):
    """The reasons for a remark."""

    DISCOVERED = "discovered"  # their rule was found by experiment
    STATED = "stated"  # the user stated their rule
    REPLICATED = "replicated"  # they cannot be split: every device computes all of them
    OPAQUE = "opaque"  # sub-modules that are kept whole
    EXPLICIT = "explicit"  # the parts of a decomposed operator


@dataclass(frozen=True, slots=True)
class Remark:
    """Operators that share a remark.

    `what` is their target, or for parts the operator they replace; `text` the rule
    or the reason; `ops` their names; `count` how often `what` occurs.
    """

    kind: RemarkKind
    what: str
    text: str
    ops: tuple[str, ...]
    count: int
