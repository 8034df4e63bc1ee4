"""Constraints of the user on a plan, by module path: pins, prohibitions, meshes and limits.

A constraint is plain data. Its text has one form everywhere: `pin GLOB=AXIS:WORD`,
`forbid GLOB=AXIS:WORD`, `mesh dp=4 tp=2`, `mesh 4x2`, `cap tp=4`. A WORD is what `explain` prints:

* of what an operator splits, `batch`, `heads`, `features (sum)`, `whole` for nothing and
  `partial sums` for sums that pass through; or the name of a factor of its rule, as `n`;
* of how a parameter is stored, `R` or `S(dim)`.

What the words mean for one graph on one mesh is the search's matter (`planner/space/constrain.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from shardwright.ir.layout import LayoutError, Mesh, Placement, parse_placement

EVERY_AXIS = "*"
MOST_AXES = 4  # of a mesh that is given by its shape
_EXAMPLES = "'pin layers.*.mlp=tp:features', 'forbid *=dp:sequence', 'mesh dp=4 tp=2' or 'cap tp=4'"
_START = re.compile(r"(?:^|[,\s])\s*(\*|[A-Za-z_]\w*):")
_PLACEMENT = re.compile(r"[RP]|S\(.*\)")


class ConstraintError(ValueError):
    """A constraint that cannot be read, that matches nothing, or that no plan can meet."""


@dataclass(frozen=True, slots=True)
class Along:
    """Alternatives along one mesh axis, or along every axis (`*`): any of `words`."""

    axis: str
    words: tuple[str, ...]

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The words as placements of a stored parameter; none if they are about operators."""
        stored = [word for word in self.words if _PLACEMENT.fullmatch(word)]
        return tuple(parse_placement(word) for word in stored)

    def __str__(self) -> str:
        return f"{self.axis}:{'|'.join(self.words)}"


@dataclass(frozen=True, slots=True)
class Pin:
    """Every operator or parameter in the modules that `glob` matches does what `along` says."""

    glob: str
    along: tuple[Along, ...]

    def __str__(self) -> str:
        return f"pin {self.glob}={' '.join(map(str, self.along))}"


@dataclass(frozen=True, slots=True)
class Forbid:
    """No operator or parameter that `glob` matches does what any of `along` says."""

    glob: str
    along: tuple[Along, ...]

    def __str__(self) -> str:
        return f"forbid {self.glob}={' '.join(map(str, self.along))}"


@dataclass(frozen=True, slots=True)
class OnMesh:
    """The plan's mesh is this one; several such constraints are alternatives.

    Axes with the name of a role have it (`planner/axes/axis_roles.py`).
    """

    mesh: Mesh

    def __str__(self) -> str:
        return f"mesh {self.mesh}"


@dataclass(frozen=True, slots=True)
class OnShape:
    """The plan's mesh has axes of these sizes, outermost first, whatever they do."""

    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"mesh {'x'.join(map(str, self.shape))}"


@dataclass(frozen=True, slots=True)
class Cap:
    """The mesh axis is at most `size` wide."""

    axis: str
    size: int

    def __str__(self) -> str:
        return f"cap {self.axis}={self.size}"


Constraint = Pin | Forbid | OnMesh | OnShape | Cap


def parse_constraints(texts: Iterable[str | Constraint]) -> tuple[Constraint, ...]:
    """Read constraints, each once; raises `ConstraintError` for text that is none.

    >>> [str(c) for c in parse_constraints(["mesh dp=4,tp=2", "pin h.*.attn=tp:heads"])]
    ['mesh dp=4 tp=2', 'pin h.*.attn=tp:heads']
    """
    if isinstance(texts, str):
        raise ConstraintError(f"constraints are a list of texts, not the text {texts!r}")
    if not isinstance(texts, Iterable):
        raise ConstraintError(f"constraints is {texts!r}; give a list of texts such as {_EXAMPLES}")
    read: list[Constraint] = []
    for text in texts:
        if not isinstance(text, str | Constraint):
            raise ConstraintError(f"{text!r} is no constraint; write it as {_EXAMPLES}")
        read.append(_parse(text) if isinstance(text, str) else text)
    return tuple(dict.fromkeys(read))


def named_axes(constraints: Iterable[Constraint]) -> frozenset[str]:
    """The mesh axes that constraints name.

    >>> sorted(named_axes(parse_constraints(["mesh dp=4,tp=2", "pin h.*.attn=sp:heads"])))
    ['dp', 'sp', 'tp']
    """
    found: set[str] = set()
    for one in constraints:
        if isinstance(one, OnMesh):
            found.update(one.mesh.names)
        elif isinstance(one, Cap):
            found.add(one.axis)
        elif isinstance(one, Pin | Forbid):
            found.update(along.axis for along in one.along)
    return frozenset(found - {EVERY_AXIS})


def matches(glob: str, path: str) -> bool:
    """Whether `glob` matches a module's path or that of an enclosing module; `*` crosses dots.

    >>> matches("layers.*.mlp", "layers.0.mlp.up"), matches("layers.1", "layers.12")
    (True, False)
    """
    return any(fnmatchcase(outer, glob) for outer in _enclosing_modules(path))


def _enclosing_modules(path: str) -> Iterator[str]:
    yield path
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def _parse(text: str) -> Constraint:
    kind, _, rest = text.strip().partition(" ")
    rest = rest.strip()
    if kind in ("pin", "forbid") and rest:
        glob, along = _glob_and_words(text, rest)
        return Pin(glob, along) if kind == "pin" else Forbid(glob, along)
    if kind == "mesh" and re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", rest):
        shape = tuple(map(int, rest.split("x")))
        if len(shape) > MOST_AXES:
            raise ConstraintError(
                f"{text!r} has {len(shape)} axes; give at most {MOST_AXES}, or name them"
            )
        return OnShape(shape)
    if kind == "mesh" and rest:
        try:
            return OnMesh(Mesh.parse(rest.replace(",", " ")))
        except LayoutError as e:
            raise ConstraintError(f"{text!r}: {e}") from e
    if kind == "cap" and rest:
        found = re.fullmatch(r"([A-Za-z_]\w*)\s*=\s*([1-9]\d*)", rest)
        if found is None:
            raise ConstraintError(f"{text!r} is no cap; write it as 'cap tp=4'")
        return Cap(found[1], int(found[2]))
    raise ConstraintError(f"{text!r} is no constraint; write it as {_EXAMPLES}")


def _glob_and_words(text: str, rest: str) -> tuple[str, tuple[Along, ...]]:
    glob, equals, words = rest.partition("=")
    first, *found = _START.split(words.strip())
    if not (glob.strip() and equals and found and not first.strip()):
        raise ConstraintError(
            f"{text!r} is not GLOB=AXIS:WORD; write it as 'layers.*.mlp=tp:features' for what"
            " modules split, or 'layers.*.weight=dp:S(0)' for how parameters are stored"
        )
    pairs = zip(found[::2], found[1::2], strict=True)
    return glob.strip(), tuple(_along(text, axis, word) for axis, word in pairs)


def _along(text: str, axis: str, word: str) -> Along:
    words = tuple(" ".join(w.split()) for w in word.rstrip(", ").split("|"))
    if not all(words):
        raise ConstraintError(f"{text!r} has no word after {axis!r}; write it as {axis}:batch")
    along = Along(axis, words)
    stored = [w for w in words if _PLACEMENT.fullmatch(w)]
    try:
        along.placements  # noqa: B018 - reading them checks them
    except LayoutError as e:
        raise ConstraintError(f"{text!r}: {e}") from e
    if "P" in stored:
        raise ConstraintError(f"{text!r}: a parameter is stored as R or S(dim), never as P")
    if stored and len(stored) < len(words):
        raise ConstraintError(
            f"{text!r} mixes how parameters are stored ({stored[0]}) with what operators split;"
            " write two constraints"
        )
    return along
