"""Small graphs with rules written by hand, and a machine whose figures are powers of two."""

import torch

import shardwright as sw
from shardwright.ir.graph import Graph, Leaf, LeafKind, Op, Ref, Tensor
from shardwright.ir.layout import Bytes, Seconds
from shardwright.machine.model import Device, Level, Machine
from shardwright.rules.analysis import Analysis
from shardwright.rules.rule import Factor, FactorKind, Rule


def rule(text, work="", additive=(), linear=(), whole="", **sizes):
    """The rule of `m k, k n -> m n` with factor sizes; dims are single factors or `(a b)`, or 1."""
    left, right = text.split("->")
    return Rule(
        factors=tuple(
            Factor(name, size, FactorKind.WHOLE if name in whole.split() else FactorKind.PARALLEL)
            for name, size in sizes.items()
        ),
        operands=tuple(_dims(part) for part in left.split(",")) if left.strip() else (),
        results=tuple(_dims(part) for part in right.split(",")),
        additive=frozenset(additive),
        linear=tuple(frozenset(term) for term in linear),
        work=tuple(work.split()),
    )


def _dims(text):
    found, inside = [], None
    for word in text.replace("(", " ( ").replace(")", " ) ").split():
        if word == "(":
            inside = []
        elif word == ")":
            found.append(tuple(inside))
            inside = None
        elif inside is not None:
            inside.append(word)
        else:
            found.append(() if word == "1" else (word,))
    return tuple(found)


def op(name, kind, operands, rule, saves=(), outputs=(), extra_saved=0):
    """An operator and its rule; its result has its name."""
    args = tuple(Ref(operand) for operand in operands)
    outputs = outputs or (name,)
    made = Op(name, f"aten.{kind}.default", args, (), outputs, saves=saves, extra_saved=extra_saved)
    return made, rule


def build(leaves, ops, frozen=(), aliases=None, dtype="float32"):
    """Graph and analysis. `leaves`: name -> (kind, atoms); `aliases`: view -> what it views."""
    atoms = {name: found for name, (_, found) in leaves.items()}
    kinds = {name: kind for name, (kind, _) in leaves.items()}
    grads = {
        name: kind is LeafKind.PARAMETER and name not in frozen for name, kind in kinds.items()
    }
    rules = {}
    for made, found in ops:
        rules[made.name] = found
        for name, dims in zip(made.outputs, found.results, strict=True):
            atoms[name] = found.atoms(dims)
            grads[name] = any(grads[operand] for operand in made.operands) and name not in frozen
    values = tuple(
        Tensor(name, shape(sizes), dtype, grads[name], (aliases or {}).get(name, ""))
        for name, sizes in atoms.items()
    )
    graph = Graph(
        leaves=tuple(Leaf(name, kind, (name,)) for name, kind in kinds.items()),
        ops=tuple(made for made, _ in ops),
        outputs=(ops[-1][0].name,),
        values=values,
    )
    return graph, Analysis(atoms, rules)


def shape(atoms):
    total = []
    for sizes in atoms:
        count = 1
        for size in sizes:
            count *= size
        total.append(count)
    return tuple(total)


MM = rule("m k, k n -> m n", work="m k n", linear=[{0}, {1}], m=8, k=16, n=32)
RELU = rule("m n -> m n", m=8, n=32)
SUM = rule("m n ->", linear=[{0}], m=8, n=32)


def linear_layer():
    """x[8, 16] @ w[16, 32], relu, sum: 4,096 multiply-adds, float32."""
    return build(
        {
            "x": (LeafKind.INPUT, ((8,), (16,))),
            "w": (LeafKind.PARAMETER, ((16,), (32,))),
        },
        [
            op("y", "mm", ["x", "w"], MM, saves=("x",)),
            op("z", "relu", ["y"], RELU, saves=("z",)),
            op("loss", "sum", ["z"], SUM),
        ],
    )


def toy_machine(devices=2, backend="nccl", bandwidth=16.0, latency=1.0, hosts=1):
    """1,024 FLOP/s, 4,096 B/s of memory, 1 s a launch; links 16 B/s and 1 s, network 2 B/s."""
    device = Device("toy", Bytes(2**20), (("float32", 1024.0),), 4096.0, Seconds(1.0))
    levels = [Level("link", devices, bandwidth, Seconds(latency))]
    if hosts > 1:
        levels.append(Level("network", hosts, bandwidth / 8, Seconds(10 * latency)))
    return Machine("toy", device, tuple(levels), "made up", backend, Seconds(2.0))


def splittable(rule):
    """Names of the factors of `rule` that may be split."""
    return tuple(f.name for f in rule.factors if f.kind is FactorKind.PARALLEL)


def mixtral(layers):
    """A Mixtral of four experts on 16 sequences of 16 tokens."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64, max_position_embeddings=32, num_hidden_layers=layers, hidden_size=32,
        intermediate_size=48, num_attention_heads=4, num_key_value_heads=4,
        num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        model, ids = MixtralForCausalLM(config), torch.zeros((16, 16), dtype=torch.long)
    return sw.capture(model, (), {"input_ids": ids, "labels": ids})
