"""Parameters kept in float32 and used in 16 bits: `precision="bf16"` or `"fp16"`.

The recipe is that of Micikevicius et al. (Mixed Precision Training, ICLR 2018); bfloat16 needs no
loss scaling. In the graph such a parameter has the dtype of computation; this module says in which
dtype it is stored, and in which it is read, which for weights that are cast before they are
gathered has 8 bits.
"""

from __future__ import annotations

from shardwright.ir.graph import ITEM_BYTES, Graph, LeafKind
from shardwright.ir.options.numerics import Numerics

MASTER = "float32"
_COMPUTE = {"bf16": "bfloat16", "fp16": "float16"}
HALF_DTYPES = tuple(_COMPUTE.values())  # of 16 bits


def compute_dtype(numerics: Numerics) -> str | None:
    """The dtype of computation in mixed precision; None where it is the model's own."""
    return _COMPUTE.get(numerics.precision)


def master_weights(graph: Graph) -> frozenset[str]:
    """The parameters of `graph` that are stored in float32 and cast before operators take them."""
    compute = compute_dtype(graph.numerics)
    leaves = graph.leaves_of(LeafKind.PARAMETER)
    return frozenset(leaf.name for leaf in leaves if graph.tensor[leaf.name].dtype == compute)


def stored_dtypes(graph: Graph) -> dict[str, str]:
    """The dtype in which parameters are stored that are cast before operators take them."""
    found = dict.fromkeys(master_weights(graph), MASTER)
    for leaf in graph.leaves_of(LeafKind.PARAMETER):
        if (tensor := graph.tensor[leaf.name]).gathered_as:
            found.setdefault(leaf.name, tensor.dtype)
    return found


def read_dtype(graph: Graph, value: str) -> str:
    """The dtype in which a value is moved and read: of a weight that is gathered in it, 8 bits."""
    tensor = graph.tensor[value]
    return tensor.gathered_as or tensor.dtype


def read_bytes(graph: Graph, parameter: str) -> int:
    """Bytes of an unsharded parameter as it is read."""
    return graph.tensor[parameter].num_elements * ITEM_BYTES[read_dtype(graph, parameter)]


def stored_item_bytes(graph: Graph, parameter: str) -> int:
    """Bytes of one element of a stored parameter, and of its gradient."""
    dtype = graph.tensor[parameter].dtype
    return ITEM_BYTES[MASTER if dtype == compute_dtype(graph.numerics) else dtype]


def reduced_dtype(graph: Graph, parameter: str) -> str:
    """The dtype in which gradients of a parameter are sent to other devices and summed there."""
    dtype = graph.tensor[parameter].dtype
    if dtype != compute_dtype(graph.numerics) or graph.numerics.reduce != "stored":
        return dtype
    return MASTER


def reduced_bytes(graph: Graph, parameter: str) -> int:
    """Bytes of an unsharded gradient of a parameter as it is sent to other devices."""
    item = ITEM_BYTES[reduced_dtype(graph, parameter)]
    return graph.tensor[parameter].num_elements * item


def stored_bytes(graph: Graph, parameter: str) -> int:
    """Bytes of an unsharded stored parameter, and of its gradient."""
    return graph.tensor[parameter].num_elements * stored_item_bytes(graph, parameter)


def dtypes_of(graph: Graph) -> tuple[str, str, str, str]:
    """Dtypes of a graph's training, in the order of `ir/strategy/fields.py`'s `DTYPE_FIELDS`.

    Each is empty if parameters have several.
    """
    leaves = graph.leaves_of(LeafKind.PARAMETER)
    used = {graph.tensor[leaf.name].dtype for leaf in leaves}
    used = {dtype for dtype in used if "float" in dtype}
    compute = used.pop() if len(used) == 1 else ""
    if not master_weights(graph):
        in_tf32 = graph.numerics.precision == "tf32" and compute == MASTER
        return "tf32" if in_tf32 else compute, compute, compute, compute
    return compute, MASTER if graph.numerics.reduce == "stored" else compute, MASTER, MASTER
