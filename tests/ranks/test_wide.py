"""One dimension of a model split wherever it occurs, on ranks: exact in float64.

Loss, every gradient and every parameter after an optimizer step. Tilings at random, of these
dimensions too, are in `test_random_tilings`.
"""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import Layout, Mesh, Shard, is_natural
from shardwright.rules.placements import feasible, layouts_under
from shardwright.rules.rule import FactorKind, JointSplit, Route, Split
from tests.harness import models
from tests.harness.ranks import run_ranks, whole
from tests.ranks.test_random_tilings import TOLERANCE, Widened, error

MESHES = {
    2: ("a=2", ("smoothed", "long llama", "ring llama", "qwen3 moe", "routed mixtral")),
    3: ("a=3", ("gpt2", "long gpt2", "ring gpt2", "halves llama", "inside mixtral")),
    4: (
        "a=2 b=2",
        (
            "smoothed",
            "padded llama",
            "ring packed llama",
            "ring llama",
            "mixtral",
            "tokens of mixtral",
        ),
    ),
}
WORDS = 53  # a prime number, like 50,257


class Smoothed(nn.Module):
    """A tied table, label smoothing, weights of classes, and labels that do not count."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WORDS, 6, padding_idx=5)
        self.register_buffer("weight", torch.linspace(0.5, 2.0, WORDS))

    def forward(self, words, labels):
        logits = nn.functional.linear(self.table(words).tanh(), self.table.weight)
        flat, labels = logits.flatten(0, 1), labels.flatten()
        plain = nn.functional.cross_entropy(flat, labels, ignore_index=3)
        return plain + nn.functional.cross_entropy(
            flat, labels, self.weight, ignore_index=3, label_smoothing=0.1
        )


def smoothed():
    words = torch.randint(WORDS, (4, 5), generator=torch.Generator().manual_seed(2))
    labels = words.roll(1, 1)
    labels[:, 0] = 3
    return Smoothed(), {"words": words, "labels": labels}


def padded():
    """Llama with queries in groups, and samples of several lengths."""
    model, batch = models.llama()
    mask = torch.ones_like(batch["input_ids"])
    mask[1, 4:], mask[3, 5:] = 0, 0
    return model, {**batch, "attention_mask": mask}


def packed():
    """Llama with two documents to a sample: positions start again, and none sees the other."""
    model, batch = models.llama(length=9)
    document = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])
    places = torch.arange(9)
    sees = (document[:, None] == document) & (places <= places[:, None])
    mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
    count = len(batch["input_ids"])
    positions = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4]).expand(count, -1).contiguous()
    mask = mask.expand(count, 1, -1, -1).contiguous()
    return model, {**batch, "position_ids": positions, "attention_mask": mask}


def mixtral():
    """Two of five experts a token: one gets nothing, and one or the other most of it."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=19,
        hidden_size=16,
        intermediate_size=10,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=5,
        num_experts_per_tok=2,
    )
    model = MixtralForCausalLM(config)
    gate = model.model.layers[0].mlp.gate.weight
    with torch.no_grad():
        gate.copy_(torch.tensor([4.0, -4.0, 0.4, 0.2, 0.0])[:, None] * gate[0])
    return model, _tokens(19)


def qwen3_moe():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=19,
        hidden_size=16,
        intermediate_size=10,
        moe_intermediate_size=6,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        num_experts=7,
        num_experts_per_tok=3,
        norm_topk_prob=True,
    )
    return Qwen3MoeForCausalLM(config), _tokens(19)


def _tokens(words):
    ids = torch.randint(words, (3, 5), generator=torch.Generator().manual_seed(4))
    return {"input_ids": ids, "labels": ids}


VOCABULARY, SEQUENCE = (
    {"embedding", "cross_entropy_loss"},
    {"linear", "scaled_dot_product_attention"},
)
ROUTED = "routed"
WEIGHTS = "model.layers.0.mlp.experts.gate_up_proj"
# A model, a value and the dimension of it that is split, operators that must be among the split,
# and along the last axis how attention is.
CASES = {
    "smoothed": (smoothed, "table.weight", 0, VOCABULARY),
    "gpt2": (models.gpt2, "transformer.wte.weight", 0, VOCABULARY),
    "long gpt2": (models.gpt2, "kwargs.input_ids", 1, {"linear", "softmax", "dropout"}),
    "long llama": (models.llama, "kwargs.input_ids", 1, SEQUENCE),
    "ring llama": (models.llama, "kwargs.input_ids", 1, SEQUENCE, "l~s~z"),
    "halves llama": (models.llama, "kwargs.input_ids", 1, SEQUENCE, "l~z"),
    "ring gpt2": (lambda: models.gpt2(dropout=0.0), "kwargs.input_ids", 1, SEQUENCE, "l~s~z"),
    "ring packed llama": (packed, "kwargs.input_ids", 1, SEQUENCE, "l~s"),
    "mixtral": (mixtral, WEIGHTS, 0, {"experts"}),
    "inside mixtral": (mixtral, WEIGHTS, 1, {"experts"}),
    "tokens of mixtral": (mixtral, "kwargs.input_ids", 1, {"experts", "topk"}),
    "routed mixtral": (mixtral, "lm_head.weight", 0, {"cross_entropy_loss", "experts"}, ROUTED),
    "qwen3 moe": (qwen3_moe, WEIGHTS, 0, {"experts"}),
    "padded llama": (padded, "kwargs.input_ids", 1, SEQUENCE),
}


@pytest.mark.ranks
@pytest.mark.hf
@pytest.mark.parametrize("world", MESHES)
def test_a_dimension_split_everywhere_equals_one_device(world):
    text, names = MESHES[world]
    run_ranks(world, _compare, text, {name: _subject(name) for name in names})


def _subject(name):
    torch.manual_seed(1)
    return Widened(*models.double(*CASES[name][0]()))


def _compare(text, subjects):
    mesh = Mesh.parse(text)
    device_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names)
    for name, one in subjects.items():
        _, value, dim, kinds, *how = CASES[name]
        atom = one.analysis.dims[value][dim][-1]
        chosen, split = along(one, mesh, atom, *how)
        storage = {
            leaf.name: stored(one, leaf.name, mesh, atom)
            for leaf in one.graph.leaves_of(LeafKind.PARAMETER)
        }
        serial = stepped(one, one.one_device())
        module = one.module(mesh, chosen, storage, device_mesh)
        parallel = stepped(one, module)
        assert serial.keys() == parallel.keys()
        errors = {key: error(serial[key], parallel[key]) for key in serial}
        worst = max(errors, key=errors.get)
        assert errors[worst] <= TOLERANCE, f"{name} on {text}: {worst} is {errors[worst]:.1e} off"
        assert kinds <= split, f"{name}: only {split} are split"
        if how and mesh.size == 2:
            again = one.module(mesh, chosen, storage, device_mesh)
            compiled = one.run(torch.compile(again, backend="aot_eager"))
            for key, value in compiled.items():
                assert error(serial[key.replace("_orig_mod.", "")], value) <= TOLERANCE


def along(one, mesh, atom, how=""):
    """Every operator split along `atom` over all axes, if it may be; kinds of those that are.

    Attention is split as `how` says along the last axis, unless that is that experts are `ROUTED`
    to along all.
    """
    chosen, split = {}, set()
    for op in one.graph.ops:
        rule = one.analysis.rules[op.name]
        chosen[op.name] = (None,) * len(mesh.axes)
        if how == ROUTED and rule.routes:
            chosen[op.name] = (Route(*rule.routes[0]),) * len(mesh.axes)
            split.add(op.kind)
            continue
        for factor in rule.factors:
            if factor.atom == atom and factor.kind is FactorKind.PARALLEL:
                tiling = (Split(factor.name),) * len(mesh.axes)
                if how not in ("", ROUTED) and rule.joint_splits:
                    (last,) = (names for names in rule.joint_splits if "~".join(names) == how)
                    tiling = (*tiling[:-1], JointSplit(last))
                if feasible(rule, layouts_under(rule, tiling, mesh)):
                    chosen[op.name] = tiling
                    split.add(op.kind)
                    break
    return chosen, split


def stored(one, name, mesh, atom):
    """A parameter lies as its operators read it, where its own dimensions can be sharded so."""
    for d, atoms in enumerate(one.analysis.dims[name]):
        if atom in atoms:
            layout = Layout(mesh, (Shard(d, atoms.index(atom)),) * len(mesh.axes))
            if is_natural(one.analysis.atoms[name], layout):
                return layout
    return Layout.replicated(mesh)


def stepped(one, module):
    """Loss, gradients, buffers, and the parameters after a step."""
    found = one.run(module)
    torch.optim.AdamW(module.parameters(), lr=0.01).step()
    for key, parameter in module.named_parameters():
        found[f"{key} after a step"] = whole(parameter)
    return found
