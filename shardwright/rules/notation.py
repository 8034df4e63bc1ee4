"""Index notation of one operator call, before dimensions are refined into atoms.

A `Notation` names the index of every dimension of every operand and result.
`parse` writes one from text, in the manner of einops: `... k, n k, +n -> ... n`.

* a word is an index; equal words are the same index, and dimensions of size one have none;
* `k!` is an index that every device needs whole;
* `(g c)` is a dimension that is the product of two indices, major first;
* `...` stands for any number of leading dimensions, aligned at their right end, where
  size one broadcasts;
* a leading `+` marks an operand that is added to the result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from shardwright.rules.rule import Dims

Shape = tuple[int, ...]
_DIM = re.compile(r"\([^)]*\)|\.\.\.|\S+")


class NotationError(Exception):
    """A notation that does not fit the shapes: a bug in the table of rules."""


@dataclass(frozen=True)
class Notation:
    """The indices of each operand and result; the other fields are those of `Rule`.

    `reason` says why the `whole` indices cannot be split.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    additive: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    work: tuple[str, ...] = ()
    work_repeats: int = 1
    internal_reductions: tuple[Dims, ...] = ()
    routes: tuple[tuple[str, str], ...] = ()
    joint_splits: tuple[tuple[str, ...], ...] = ()
    reason: str = ""


def parse(
    text: str,
    operands: Sequence[Shape],
    results: Sequence[Shape],
    *,
    sizes: Mapping[str, int] | None = None,
    linear: Sequence[Sequence[int]] = (),
    work: str = "",
    reason: str = "",
) -> Notation:
    """The notation `text` for operands and results of these shapes.

    Operands of the text beyond those passed are optional and ignored. `sizes` has the sizes of
    indices inside parentheses; one index per group may be missing. `work` lists the indices over
    which the multiply-adds of a contraction run.

    >>> parse("m k, k n -> m n", [(4, 6), (6, 1)], [(4, 1)]).results
    ((('m',), ()),)
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise NotationError(f"{text!r} has no '->'")
    reader = _Reader(text, dict(sizes or {}))
    given = [part.strip() for part in left.split(",")][: len(operands)]
    additive = frozenset(i for i, part in enumerate(given) if part.startswith("+"))
    operand_dims = tuple(
        reader.read(part.lstrip("+"), shape) for part, shape in zip(given, operands, strict=True)
    )
    result_dims = tuple(
        reader.read(part.strip(), shape)
        for part, shape in zip(right.split(","), results, strict=True)
    )
    known = {name: size for name, size in reader.sizes.items() if size > 1}
    return Notation(
        operands=_without_ones(operand_dims, known),
        results=_without_ones(result_dims, known),
        sizes=known,
        whole=frozenset(reader.whole & set(known)),
        additive=additive,
        linear=tuple(frozenset(s) for s in linear),
        work=tuple(
            name
            for word in work.split()
            for name in (reader.ellipsis_names() if word == "..." else [word])
            if name in known
        ),
        reason=reason,
    )


class _Reader:
    """Reads operands in order and collects the sizes of indices."""

    def __init__(self, text: str, sizes: dict[str, int]) -> None:
        self.text = text
        self.sizes = sizes
        self.whole: set[str] = set()

    def read(self, part: str, shape: Shape) -> Dims:
        words = _DIM.findall(part)
        if "..." in words:
            at = words.index("...")
            count = len(shape) - len(words) + 1
            # Numbered from the right, so that fewer leading dimensions broadcast.
            words[at : at + 1] = [f"b{count - 1 - i}" for i in range(count)]
        if len(words) != len(shape):
            raise NotationError(f"{self.text!r}: {part!r} has not the dimensions of {shape}")
        return tuple(self._dim(word, size) for word, size in zip(words, shape, strict=True))

    def _dim(self, word: str, size: int) -> tuple[str, ...]:
        """The indices of one dimension of this size, and the size of the one not known yet."""
        if word == "1" or (size == 1 and not word.startswith("(")):
            return ()
        names = []
        for name in word.strip("()").split():
            if name.endswith("!"):
                name = name[:-1]
                self.whole.add(name)
            names.append(name)
        open_names = [name for name in names if name not in self.sizes]
        known = prod(self.sizes[name] for name in names if name in self.sizes)
        if len(open_names) > 1 or (open_names and size % known):
            raise NotationError(f"{self.text!r}: sizes of {word!r} are not known, of {size}")
        if open_names:
            self.sizes[open_names[0]] = size // known
        elif known != size:
            raise NotationError(f"{self.text!r}: {word!r} is {known} and {size}")
        return tuple(names)

    def ellipsis_names(self) -> list[str]:
        return sorted(name for name in self.sizes if re.fullmatch(r"b\d+", name))


def _without_ones(dims: tuple[Dims, ...], known: Mapping[str, int]) -> tuple[Dims, ...]:
    return tuple(tuple(tuple(n for n in names if n in known) for names in one) for one in dims)


def elementwise(
    operands: Sequence[Shape],
    result: Shape,
    *,
    whole: Sequence[int] = (),
    linear: Sequence[Sequence[int]] = (),
    reason: str = "",
) -> Notation:
    """Broadcasting operands, one index per dimension of `result`; `whole` dims are not split."""

    def dims(shape: Shape) -> Dims:
        offset = len(result) - len(shape)
        return tuple((f"d{offset + i}",) if n > 1 else () for i, n in enumerate(shape))

    return Notation(
        operands=tuple(dims(shape) for shape in operands),
        results=(dims(result),),
        sizes={f"d{i}": n for i, n in enumerate(result) if n > 1},
        whole=frozenset(f"d{i}" for i in whole if result[i] > 1),
        linear=tuple(frozenset(s) for s in linear),
        reason=reason,
    )


def reshape(before: Shape, after: Shape) -> Notation:
    """The notation of a view: the common factors of both shapes are its indices.

    Both shapes are cut into as many groups of equal product as possible. A group
    whose boundaries do not form a chain of divisors stays whole.

    >>> str(reshape((4, 6), (8, 3)).operands)
    "((('x0',), ('x1', 'x2')),)"
    """
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    left: list[tuple[str, ...]] = [()] * len(before)
    right: list[tuple[str, ...]] = [()] * len(after)
    for group in _groups(before, after):
        cuts = _cuts(tuple(before[i] for i in group[0]), tuple(after[i] for i in group[1]))
        if cuts is None:
            for side, dims, shape in ((left, group[0], before), (right, group[1], after)):
                for dim in dims:
                    if shape[dim] > 1:
                        name = f"x{len(sizes)}"
                        sizes[name] = shape[dim]
                        whole.add(name)
                        side[dim] = (name,)
            continue
        names = [f"x{len(sizes) + i}" for i in range(len(cuts))]
        sizes.update(zip(names, cuts, strict=True))
        _assign_indices(left, group[0], before, list(zip(names, cuts, strict=True)))
        _assign_indices(right, group[1], after, list(zip(names, cuts, strict=True)))
    return Notation(
        operands=(tuple(left),),
        results=(tuple(right),),
        sizes=sizes,
        whole=frozenset(whole),
        linear=(frozenset({0}),),
        reason="no tile of one shape is a tile of the other",
    )


def _groups(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]]:
    """Runs of dimensions of both shapes with equal product, as short as possible."""
    groups, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        mine: list[int] = []
        theirs: list[int] = []
        a = b = 1
        while a != b or not (mine or theirs):
            if (a <= b and i < len(before)) or j >= len(after):
                mine.append(i)
                a *= before[i]
                i += 1
            else:
                theirs.append(j)
                b *= after[j]
                j += 1
        groups.append((mine, theirs))
    return groups


def _cuts(before: Shape, after: Shape) -> list[int] | None:
    """Common refinement of two factorisations, major first; None when there is none."""
    bounds = sorted({*_boundaries(before), *_boundaries(after)})
    if any(large % small for small, large in pairwise(bounds)):
        return None
    pairs = pairwise(bounds)
    return [large // small for small, large in pairs][::-1]


def _boundaries(shape: Shape) -> list[int]:
    found = [1]
    for size in reversed(shape):
        found.append(found[-1] * size)
    return found


def _assign_indices(
    side: list[tuple[str, ...]], dims: list[int], shape: Shape, indices: list[tuple[str, int]]
) -> None:
    for dim in dims:
        names, size = [], 1
        while size < shape[dim]:
            name, length = indices.pop(0)
            names.append(name)
            size *= length
        side[dim] = tuple(names)
