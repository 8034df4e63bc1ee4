"""Notes on operators of a plan: rules found by experiment, joint splits, opaque modules.

One remark covers the operators of one kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class RemarkKind(Enum):
    """Why operators are remarked upon."""

    DISCOVERED = "discovered"  # their rule was found by experiment
    STATED = "stated"  # the user stated their rule
    REPLICATED = "replicated"  # they cannot be split: every device computes all of them
    OPAQUE = "opaque"  # sub-modules that are kept whole
    EXPLICIT = "explicit"  # the parts of an operator that was taken apart


@dataclass(frozen=True, slots=True)
class Remark:
    """Operators that share a remark.

    `what` is their target, or of parts the operator they make; `text` the rule
    or the reason; `ops` their names; `count` how often `what` occurs.
    """

    kind: RemarkKind
    what: str
    text: str
    ops: tuple[str, ...]
    count: int
