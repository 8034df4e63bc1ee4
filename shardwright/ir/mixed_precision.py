"""Parameters kept in float32 and used in bfloat16: `precision="bf16"`.

The recipe is that of Micikevicius et al. (Mixed Precision Training, ICLR 2018), with
bfloat16 in the place of float16, so without a scale of the loss. In the graph such a
parameter has the dtype that operators take it in; here is what it is stored in.
"""

from __future__ import annotations

from shardwright.ir.graph import ITEM_BYTES, Graph, LeafKind

MASTER, NARROW = "float32", "bfloat16"


def masters(graph: Graph) -> frozenset[str]:
    """The parameters of `graph` that are stored in float32 and cast before operators take them."""
    if graph.habits.precision != "bf16":
        return frozenset()
    leaves = graph.leaves_of(LeafKind.PARAMETER)
    return frozenset(leaf.name for leaf in leaves if graph.tensor[leaf.name].dtype == NARROW)


def stored_item_bytes(graph: Graph, parameter: str) -> int:
    """Bytes of an element of a parameter as it is stored, and of its gradient."""
    dtype = graph.tensor[parameter].dtype
    narrow = graph.habits.precision == "bf16" and dtype == NARROW
    return ITEM_BYTES[MASTER if narrow else dtype]


def stored_bytes(graph: Graph, parameter: str) -> int:
    """Bytes of a whole parameter as it is stored, and of its gradient."""
    return graph.tensor[parameter].num_elements * stored_item_bytes(graph, parameter)
