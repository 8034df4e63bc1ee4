"""Cases of large matrices of equal proofs: each commit runs a part of them, all commits run all.

The part is drawn by the commit's hash and holds every kind of case; what rotates is the repetition
over seeds, models and numbers of ranks. `TEST_CASES=whole` runs all cases, `TEST_CASES=` and a
commit's full hash those of that commit. Without git it is always the same part.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable, Hashable, Iterable
from functools import cache
from pathlib import Path
from typing import TypeVar

WHOLE = "whole"
Case = TypeVar("Case")


def rotating(
    cases: Iterable[Case], of: int, kinds: Callable[[Case], Iterable[Hashable]] = lambda case: ()
) -> list[Case]:
    """One in `of` of the cases, in their order, and more where a kind would have none.

    Args:
        cases: all of a matrix, each a proof of the same.
        of: out of how many cases one is run.
        kinds: what a case is one of, and what each commit has to run at least once.
    """
    cases, chosen = list(cases), set()
    if commit() == WHOLE:
        return cases
    order = list(range(len(cases)))
    random.Random(f"{commit()} {len(cases)}").shuffle(order)
    seen: set[Hashable] = set()
    for number in order:
        if new := set(kinds(cases[number])) - seen:
            chosen.add(number)
            seen |= new
    for number in order:
        if len(chosen) * of >= len(cases):
            break
        chosen.add(number)
    return [cases[number] for number in sorted(chosen)]


@cache
def commit() -> str:
    """What draws the parts: the hash of the commit, or `WHOLE`. Workers and ranks have the same."""
    if "TEST_CASES" not in os.environ:
        command = ["git", "rev-parse", "HEAD"]
        try:
            found = subprocess.run(
                command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
            ).stdout.strip()
        except OSError:  # there is no git
            found = ""
        os.environ["TEST_CASES"] = found or "no commit"
    return os.environ["TEST_CASES"]
