"""Attributes the bytes that training keeps on a device to nodes and edges, so that they add up.

The node of a parameter has the bytes of weight, gradient and optimizer state. `Retention`
attributes each activation that autograd saves for the backward pass to a node or an edge. Transient
memory is a maximum, not a sum, and so not part of the tables: `workspace_bytes` of the largest
operator is added afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardwright.ir.buckets import gather_limit, sum_bucket_bytes
from shardwright.ir.graph import Graph, LeafKind
from shardwright.ir.layout import Bytes
from shardwright.ir.options.mixed_precision import (
    read_bytes,
    reduced_bytes,
    stored_bytes,
    stored_item_bytes,
)
from shardwright.ir.options.optimizers import optimizer_spec
from shardwright.simulate.costs.chunked.loss import loss_chunk_bytes
from shardwright.simulate.costs.chunked.mlp import mlp_chunk_bytes
from shardwright.simulate.costs.workload import (
    Ints,
    OperatorClass,
    Port,
    Workload,
    expert_share,
    routed_bytes,
)


@dataclass(frozen=True)
class Retention:
    """The values kept until the backward pass, and the nodes and edges that pay for their memory.

    A view has no memory of its own: if it is saved, the value at the root of its `alias_of` chain
    is kept. Edges are pairs (value, operator that reads it).

    * `at_producer`: roots for which the operator that produces them pays, in its layout;
    * `at_edge`: edges that pay for the value in the layout that their operator reads,
      redistributed or not. Such an operator is the only one that saves the value or a view of it,
      so that a redistributed copy is kept *instead* of the original;
    * `copies`: edges that pay only if they redistribute the value: the operator saves the copy, or
      returns a view of it that is saved later, while other operators keep the original;
    * `savers`: for every root that is kept, the operators that save it or a view of it.
    """

    at_producer: frozenset[str]
    at_edge: frozenset[tuple[str, str]]
    copies: frozenset[tuple[str, str]]
    savers: Mapping[str, frozenset[str]]


def retention(graph: Graph) -> Retention:
    """Attribute the saved values of `graph` to operators and edges."""
    root: dict[str, str] = {leaf.name: leaf.name for leaf in graph.leaves}
    for op in graph.ops:
        for name in op.outputs:
            source = graph.tensor[name].alias_of
            root[name] = root[source] if source else name
    savers: dict[str, list[tuple[str, str]]] = {}  # per root: (saved value, operator)
    for op in graph.ops:
        for name in dict.fromkeys(op.saves):
            savers.setdefault(root[name], []).append((name, op.name))

    leaves = {leaf.name for leaf in graph.leaves}
    at_producer: set[str] = set()
    at_edge: set[tuple[str, str]] = set()
    settled: set[str] = set()  # roots whose only saver pays
    for owner, found in savers.items():
        saved, saver = found[0]
        whole = graph.tensor[saved].num_elements == graph.tensor[owner].num_elements
        reads = any(op.name == saver for op in graph.consumers[saved])
        if owner in leaves:
            continue
        if len(found) == 1 and whole and reads:
            at_edge.add((saved, saver))
            settled.add(owner)
        else:
            at_producer.add(owner)

    kept = {name for found in savers.values() for name, _ in found}  # saved, or seen by a view
    copies: set[tuple[str, str]] = set()
    for op in reversed(graph.ops):
        viewed = {graph.tensor[name].alias_of for name in op.outputs if name in kept} - {""}
        kept |= viewed
        for name in dict.fromkeys(op.operands):
            if (name in op.saves or name in viewed) and root[name] not in settled:
                copies.add((name, op.name))
    return Retention(
        frozenset(at_producer),
        frozenset(at_edge),
        frozenset(copies),
        {owner: frozenset(op for _, op in found) for owner, found in savers.items()},
    )


def kept_bytes(
    work: Workload, stays: tuple[bool, ...], extra_saved: int, sizes: Ints, extra_rows: int = 0
) -> Ints:
    """Bytes that an operator pays for: the results marked by `stays`, and `extra_saved`: (K,).

    `extra_saved` bytes scale with the local fraction of `work.extra`, except `extra_rows` of them,
    which scale with the rows of experts. `sizes` are the local sizes of the factors, (factors, K).
    """
    own = [port.local_bytes(sizes) for port in work.results]
    kept = np.zeros(sizes.shape[1], np.int64)
    for num_bytes, stay in zip(own, stays, strict=True):
        kept += num_bytes * stay
    by_rows = Port(work.rows, 1, requires_grad=False, saved=False)
    for extra, scale in ((extra_saved - extra_rows, work.extra), (extra_rows, by_rows)):
        if extra:
            kept += _scaled(work, extra, scale, sizes)
    return kept


def _scaled(work: Workload, extra: int, scale: Port, sizes: Ints) -> Ints:
    """`extra` bytes times the local fraction of `scale`: (K,)."""
    (whole,) = scale.local_bytes(np.array(work.sizes)[:, None]).tolist()
    if not whole:
        return np.full(sizes.shape[1], extra, np.int64)
    local = scale.local_bytes(sizes)
    if work.experts:
        local = np.ceil(local * expert_share(work, sizes)).astype(np.int64)
    return np.array([-(-extra * part // whole) for part in local.tolist()], np.int64)


def workspace_bytes(work: Workload, sizes: Ints) -> Ints:
    """Bytes in use while an operator runs: operands, results and their gradients: (K,).

    Experts that receive rows from several devices also hold these rows and their results, and a
    loss or an MLP in chunks what one of them takes.
    """
    total = np.zeros(sizes.shape[1], np.int64)
    for port in (*work.operands, *work.results):
        total += port.local_bytes(sizes) * (1 + port.requires_grad)
    if work.routed:
        there, back = routed_bytes(work, sizes)
        total += np.where(sizes[work.routed[-1]] > 1, 2 * (there + back), 0)
    if work.kind is OperatorClass.CHUNKED_LOSS:
        total += loss_chunk_bytes(work, sizes)
    if work.kind is OperatorClass.CHUNKED_MLP:
        total += mlp_chunk_bytes(work, sizes)
    return total


def fixed_bytes(graph: Graph) -> Bytes:
    """Bytes of inputs, buffers and constants, which every rank holds whole under every plan.

    Gradients of inputs are included where the step computes them.
    """
    leaves = graph.leaves_of(LeafKind.INPUT, LeafKind.BUFFER, LeafKind.CONSTANT)
    tensors = [graph.tensor[leaf.name] for leaf in leaves]
    return Bytes(sum(tensor.bytes * (1 + tensor.requires_grad) for tensor in tensors))


class BucketSizes(NamedTuple):
    """Bytes of a full bucket: of gradients (`sums`), and of gathered parameters (`gathers`)."""

    sums: Bytes
    gathers: Bytes


def bucket_sizes(graph: Graph) -> BucketSizes:
    """The sizes of full buckets, at most the size of all trained parameters."""
    gradients = sum(reduced_bytes(graph, name) for name in graph.trained)
    copies = [read_bytes(graph, name) for name in graph.trained]
    limit = gather_limit(max(copies, default=0))
    sums = min(sum_bucket_bytes(graph), gradients)
    return BucketSizes(Bytes(max(1, sums)), Bytes(max(1, min(limit, sum(copies)))))


def state_parts(graph: Graph, name: str, num_bytes: int, optimizer: str) -> dict[str, int]:
    """Split `num_bytes` of a parameter into parts of `ir.memory.PARTS`, which add up to it.

    >>> from shardwright.ir.graph import Graph, Leaf, Tensor
    >>> w = Tensor("w", (8,), "float32", requires_grad=True)
    >>> graph = Graph((Leaf("w", LeafKind.PARAMETER, ("w",)),), (), ("w",), (w,))
    >>> state_parts(graph, "w", 128, "adamw")
    {'parameters': 32, 'gradients': 32, 'optimizer_state': 64}
    """
    trained = name in graph.trained
    shape, spec = graph.tensor[name].shape, optimizer_spec(optimizer)
    if spec.by_host:
        return {"saved": num_bytes}  # the cast
    kept = spec.kept_of(shape) * stored_item_bytes(graph, name) if trained else 0
    states = spec.resident_of(shape)
    wide, narrow = stored_bytes(graph, name), read_bytes(graph, name)
    cast = narrow if wide > narrow else 0
    whole = wide * (2 + states if trained else 1) + cast
    tile = max(0, num_bytes - kept) * wide // max(1, whole)
    found = {"parameters": tile}
    if trained:
        found |= {"gradients": tile, "optimizer_state": states * tile + min(kept, num_bytes)}
    if rest := num_bytes - sum(found.values()):
        found["saved"] = rest  # the cast, which the backward pass needs
    return found


def state_bytes(graph: Graph, optimizer: str) -> Bytes:
    """Bytes of weights, gradients and optimizer state, which all devices together must hold once.

    A parameter that no loss depends on has neither gradient nor state.
    """
    total, spec = 0, optimizer_spec(optimizer)
    for leaf in graph.leaves_of(LeafKind.PARAMETER):
        tensor = graph.tensor[leaf.name]
        stored = stored_bytes(graph, leaf.name)
        trained = leaf.name in graph.trained
        if not spec.by_host:
            total += stored * (2 + spec.resident_of(tensor.shape) if trained else 1)
        total += spec.kept_of(tensor.shape) * stored_item_bytes(graph, leaf.name) * trained
        read = read_bytes(graph, leaf.name)
        total += read if graph.consumers[leaf.name] and stored > read else 0
    return Bytes(total)
