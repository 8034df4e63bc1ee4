"""Prices redistributions of values to the layouts of their readers, and gradient reductions.

Of messages of parameters and their gradients only the part counts that operators do not hide.

All pairs of a source and a wanted layout are priced at once, as codes (`tables/layout_codes.py`).
"""

from __future__ import annotations

from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.gradient_sync import EVERY, LAST
from shardwright.ir.graph import ITEM_BYTES, Graph, LeafKind, Op
from shardwright.ir.layout import Atoms, Mesh
from shardwright.ir.options.mixed_precision import read_dtype, reduced_dtype, stored_item_bytes
from shardwright.planner.communication.bucketing import Bucketing, BucketSavings, Sizes
from shardwright.planner.communication.matrices import Matrices
from shardwright.planner.tables.layout_codes import (
    WHOLE,
    Ints,
    digits,
    duals,
    local_elements,
    summed_gradients,
)
from shardwright.planner.tables.memory import BucketSizes
from shardwright.planner.tables.objective import Objective
from shardwright.rules.analysis import Analysis

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

NO_GRADIENT, EACH_TIME, SUMMED_FIRST = range(3)  # how gradients are reduced over an edge


class Table(NamedTuple):
    """Costs of choices: `[K]` for a node, `[Ks, Kt]` for an edge (source choice, target choice)."""

    seconds: Floats
    bytes: Ints

    def frozen(self) -> Table:
        """The same table, read-only, because it is shared."""
        self.seconds.flags.writeable = False
        self.bytes.flags.writeable = False
        return self


class Read(NamedTuple):
    """The cost of a read from every source layout to every wanted one, each (Ks, Kt).

    Attributes:
        seconds: of the redistribution of the value and of its gradient.
        again: extra seconds where the copy is made again for the backward pass.
        bytes: of the copy that is kept for the backward pass.
    """

    seconds: Floats
    again: Floats
    bytes: Ints

    def table(self, twice: Bools | None = None) -> Table:
        """The table in which sources that are read `twice` keep nothing for the backward pass."""
        if twice is None:
            return Table(self.seconds, self.bytes)
        seconds = self.seconds + np.where(twice[:, None], self.again, 0.0)
        return Table(seconds, np.where(twice[:, None], 0, self.bytes))


class Want(NamedTuple):
    """The layouts in which a value is read and in which its gradient is computed.

    Without a gradient `grad` is the replicated layout, which costs nothing.
    """

    layout: Ints
    grad: Ints


class Terms(NamedTuple):
    """The conditions of one read that its price depends on.

    Attributes:
        weight: whether it reads a parameter, whose messages operators may hide.
        back: how its gradient is reduced: `NO_GRADIENT`, `EACH_TIME` or `SUMMED_FIRST`.
        pays: whether the reader pays for the memory of the value, moved or not.
        copies: whether it pays for a moved copy only.
        bucketed: whether the all-reduce of the gradient may share a bucket.
        ahead: whether the all-gather of the value may share a bucket.
        recomputed: whether the reader is recomputed; its all-gathers share none if made again.
        converted: whether the redistribution is counted twice (SoyBean's objective).
        kept: whether all micro-batches read one copy of a parameter.
        deferrable_scalars: whether the value is a scalar whose reduction may be deferred
            (`rules/deferrable_scalars.py`), if its gradient is replicated.
    """

    weight: bool
    back: int
    pays: bool
    copies: bool
    bucketed: bool = False
    ahead: bool = False
    recomputed: bool = False
    converted: bool = False
    kept: bool = False
    deferrable_scalars: bool = False


class Passes(NamedTuple):
    """The micro-batches of a step, the sizes of buckets, and when gradients are reduced."""

    micro_batches: int
    buckets: BucketSizes
    gradient_sync: str | None = None


@final
class Reads:
    """Prices reads of the values of `graph` on `mesh`, summed over all micro-batches of a step.

    `like` prices those of another form of the graph, and shares what it has priced.
    """

    def __init__(
        self,
        graph: Graph,
        analysis: Analysis,
        mesh: Mesh,
        measure: Objective,
        passes: Passes,
        like: Reads | None = None,
    ) -> None:
        self._graph = graph
        self._analysis = analysis
        self._mesh = mesh
        self._measure = measure
        self._micro_batches = passes.micro_batches
        self._sync = passes.gradient_sync
        weights = measure.of_parameters
        self._exposed = Bucketing(weights, passes.buckets, len(mesh.axes))
        self._whole = Bucketing(measure, passes.buckets, len(mesh.axes))
        self._parameters = {leaf.name for leaf in graph.leaves_of(LeafKind.PARAMETER)}
        self._activations, self._weights = Matrices(measure, mesh), Matrices(weights, mesh)
        self._local: dict[tuple[Atoms, int, bytes], Ints] = {}
        self._known: dict[object, Read] = {}
        if like is not None:
            self._activations, self._weights = like._activations, like._weights
            self._local, self._known = like._local, like._known

    def has_gradient(self, value: str, op: Op) -> bool:
        """Whether a gradient flows back over this edge."""
        tensor = self._graph.tensor
        return tensor[value].requires_grad and any(tensor[r].requires_grad for r in op.outputs)

    def gradient_reduction(self, value: str, op: Op) -> int:
        """The reduction of gradients over this edge: none, one per micro-batch, or accumulated."""
        if not self.has_gradient(value, op):
            return NO_GRADIENT
        split = self._micro_batches > 1 and value in self._parameters
        return SUMMED_FIRST if split else EACH_TIME

    def bucketed(self, value: str, op: Op) -> bool:
        """Whether the all-reduce of a gradient over this edge may share a bucket.

        A gradient in flight cannot be added to another gradient of the same parameter.
        """
        alone = len(self._graph.consumers[value]) == 1 and op.operands.count(value) == 1
        known = EACH_TIME, SUMMED_FIRST
        return alone and value in self._parameters and self.gradient_reduction(value, op) in known

    def is_parameter(self, value: str) -> bool:
        """Whether `value` is a parameter."""
        return value in self._parameters

    def kept(self, value: str) -> bool:
        """Whether all micro-batches read one copy of `value`."""
        return self._micro_batches > 1 and value in self._parameters

    def item_bytes(self, value: str) -> int:
        """Bytes of one element as it is moved and read."""
        return ITEM_BYTES[read_dtype(self._graph, value)]

    def gradient_bytes(self, value: str) -> int:
        """Bytes of one element of the gradient; of a parameter, in its stored dtype."""
        if value in self._parameters:
            return stored_item_bytes(self._graph, value)
        return self.item_bytes(value)

    def sent_gradient_bytes(self, value: str) -> int:
        """Bytes of one element of the gradient as devices send it to each other."""
        if value in self._parameters:
            return ITEM_BYTES[reduced_dtype(self._graph, value)]
        return self.item_bytes(value)

    def local_bytes(self, value: str, codes: Ints) -> Ints:
        """Bytes of the largest tile of `value` in each of these layouts: (N,) -> (N,)."""
        atoms, item = self._analysis.atoms[value], self.item_bytes(value)
        key = atoms, item, codes.tobytes()
        if key not in self._local:
            by_axis = digits(codes, len(self._mesh.axes))
            self._local[key] = local_elements(by_axis, atoms, self._mesh) * item
        return self._local[key]

    def returned(self, value: str, sources: Ints) -> Floats:
        """Seconds to replicate an output of the step from each of `sources`: (N,) -> (N,)."""
        atoms, item = self._analysis.atoms[value], self.item_bytes(value)
        whole = np.full_like(sources, WHOLE)
        return self._measure.redistributions(atoms, item, sources, whole) * self._micro_batches

    def read(self, value: str, sources: Ints, want: Want, terms: Terms) -> Read:
        """Costs from every source layout to every wanted one: (Ks,), (Kt,) -> (Ks, Kt)."""
        key = (
            self._analysis.atoms[value],
            self.item_bytes(value),
            self.gradient_bytes(value),
            terms,
            sources.tobytes(),
            want.layout.tobytes(),
            want.grad.tobytes(),
        )
        if key not in self._known:
            self._known[key] = self._read(value, sources, want, terms)
        return self._known[key]

    def _read(self, value: str, sources: Ints, want: Want, terms: Terms) -> Read:
        atoms, item = self._analysis.atoms[value], self.item_bytes(value)
        matrices = self._weights if terms.weight else self._activations
        one = matrices.between(atoms, item, sources, want.layout)
        if terms.deferrable_scalars:
            one = np.where(want.grad == WHOLE, 0.0, one)
        times = 1 if terms.kept else self._micro_batches
        more = 2 * self._micro_batches - times  # forward and again backward, for each micro-batch
        seconds = one * (2 * times if terms.converted else times)
        axes = len(self._mesh.axes)
        if terms.back == EACH_TIME:
            sums = self.sent_gradient_bytes(value)
            backward = matrices.between(atoms, sums, want.grad, duals(sources, axes)).T
            seconds = seconds + backward * self._micro_batches
        again = one * more
        saved = self._saved(value, sources, want, terms, self._exposed)
        if saved is not None:
            less = self._less(saved, times)
            again = (one - saved.forward) * more
            if terms.ahead and terms.recomputed:
                unshared = terms._replace(ahead=False)
                alone = self._saved(value, sources, want, unshared, self._exposed)
                assert alone is not None
                again = (one - alone.forward) * more + less - self._less(alone, times)
            seconds = seconds - less
        if terms.back == SUMMED_FIRST:
            seconds = seconds + self._summed(value, sources, want.grad)
        memory = np.zeros(seconds.shape, np.int64)
        if terms.pays or terms.copies:
            moved = sources[:, None] != want.layout
            memory = np.where(moved | terms.pays, self.local_bytes(value, want.layout), 0)
        if terms.back == SUMMED_FIRST and self._sync == LAST:
            memory = memory + self._terms_bytes(value, sources, want.grad)
        return Read(seconds, again, memory)

    def _less(self, saved: BucketSavings, times: int) -> Floats:
        """The seconds that buckets save of a read that is made so many times a step."""
        scatters = 1 if self._sync == LAST else self._micro_batches
        sums = self._micro_batches if self._sync == EVERY else 1
        less: Floats = saved.forward * times + saved.summed * sums + saved.scattered * scatters
        return less

    def saved(self, value: str, sources: Ints, want: Want, terms: Terms) -> BucketSavings | None:
        """The savings of a read that shares buckets with others; None where it shares none.

        They are parts of whole messages, whether or not operators hide them.
        """
        return self._saved(value, sources, want, terms, self._whole)

    def _saved(
        self, value: str, sources: Ints, want: Want, terms: Terms, bucketing: Bucketing
    ) -> BucketSavings | None:
        if not terms.bucketed:
            return None
        gradient_ratio = self.sent_gradient_bytes(value) // self.item_bytes(value)
        stored, read = (self.local_bytes(value, codes) for codes in (sources, want.layout))
        given = sources, want.layout, want.grad, Sizes(stored, read, gradient_ratio)
        sums = bucketing.sums(*given)
        if not terms.ahead:
            return sums
        copies = bucketing.gathers(*given)
        return BucketSavings(copies.forward, copies.scattered, sums.summed + copies.summed)

    def _summed(self, value: str, sources: Ints, grads: Ints) -> Floats:
        """Seconds to accumulate a parameter's gradient in micro-batches and reduce it once."""
        atoms, item = self._analysis.atoms[value], self.sent_gradient_bytes(value)
        axes = len(self._mesh.axes)
        grad, to_grad = self._weights.distinct(grads)
        summed = summed_gradients(sources, grad, axes, self._sync)
        each = self._weights.pairs(atoms, item, np.tile(grad, len(sources)), summed.ravel())
        dual_codes = np.repeat(duals(sources, axes), len(grad))
        once = self._weights.pairs(atoms, item, summed.ravel(), dual_codes)
        return (each * self._micro_batches + once).reshape(summed.shape)[:, to_grad]

    def _terms_bytes(self, value: str, sources: Ints, grads: Ints) -> Ints:
        """Bytes by which accumulated partial gradients exceed their reduced layout: (S, T)."""
        axes, atoms = len(self._mesh.axes), self._analysis.atoms[value]
        summed = summed_gradients(sources, grads, axes, self._sync)
        whole = local_elements(digits(summed, axes), atoms, self._mesh)
        own = local_elements(digits(duals(sources, axes), axes), atoms, self._mesh)
        return (whole - own[:, None]) * self.gradient_bytes(value)
