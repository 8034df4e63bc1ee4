"""Rows sent to their experts, on ranks: exact in float64, whatever else is split how.

Loss, every gradient and every parameter after an optimizer step, where experts are routed to along
one axis or several, where others split them without sending rows, and where a device has none.
"""

import random

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import Mesh
from shardwright.rules.placements import tiling_text, tilings
from shardwright.rules.rule import Route
from shardwright.runtime.sharded_ops.experts import skews
from tests.harness import models
from tests.harness.ranks import run_ranks
from tests.harness.rotation import rotating
from tests.ranks.test_random_tilings import TOLERANCE, Widened, error, some_segments, stored_as
from tests.ranks.test_wide import mixtral, qwen3_moe, stepped

MESHES = {  # by their number of ranks, with the models that are tried on them
    2: {"a=2": ("mixtral", "qwen3 moe", "deepseek", "gpt-oss", "llama-4")},
    3: {"a=3": ("mixtral", "qwen3 moe")},
    4: {
        # Five experts are not cut in four.
        "a=4": ("qwen3 moe", "deepseek", "gpt-oss", "two of llama-4"),
        "a=2 b=2": ("mixtral", "qwen3 moe", "deepseek", "gpt-oss", "two of llama-4"),
        "a=4 on hosts of 2": ("qwen3 moe",),  # whose tokens have three experts each
    },
}
# Every mesh and every model: the pairs of a number of ranks.
EVERY = [
    (world, text, name)
    for world, meshes in MESHES.items()
    for text, names in meshes.items()
    for name in names
]
RUN = rotating(EVERY, 4, kinds=lambda case: case[1:])
TRIED = 2  # assignments of a model on a mesh


def deepseek():
    """Experts in groups, of which a token sees one, and experts that all tokens share."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=19,
        hidden_size=16,
        intermediate_size=12,
        moe_intermediate_size=6,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=0,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
    )
    ids = torch.randint(19, (4, 5), generator=torch.Generator().manual_seed(4))
    return DeepseekV3ForCausalLM(config), {"input_ids": ids, "labels": ids}


def uneven():
    """The last of five experts is never chosen, and on some meshes alone on its device."""
    model, batch = mixtral()
    gate = model.model.layers[0].mlp.gate.weight
    with torch.no_grad():
        gate.copy_(torch.tensor([4.0, -4.0, 3.9, -3.9, 0.0])[:, None] * gate[0] / 4)
    ids = torch.cat([batch["input_ids"], batch["input_ids"][:1].flip(1)])
    return model, {"input_ids": ids, "labels": ids}


def four_samples():
    """Seven experts, and samples that four ranks can share."""
    model, batch = qwen3_moe()
    ids = torch.cat([batch["input_ids"], batch["input_ids"][:1].flip(1)])
    return model, {"input_ids": ids, "labels": ids}


def gpt_oss():
    """Experts with biases, whose gates are every second feature."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=19,
        hidden_size=16,
        intermediate_size=6,
        num_hidden_layers=1,
        layer_types=["full_attention"],
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        pad_token_id=0,
    )
    model = GptOssForCausalLM(config)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if name.endswith("proj_bias"):
                one.normal_(generator=torch.Generator().manual_seed(len(name)))
    ids = torch.randint(19, (4, 5), generator=torch.Generator().manual_seed(4))
    return model, {"input_ids": ids, "labels": ids}


def llama4(k=1):
    """Experts that all compute every token, as their code says; one of them is hardly chosen."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        vocab_size=19,
        hidden_size=16,
        intermediate_size=6,
        intermediate_size_mlp=12,
        num_hidden_layers=1,
        interleave_moe_layer_step=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=k,
    )
    model = Llama4ForCausalLM(config)
    router = model.model.layers[0].feed_forward.router.weight
    with torch.no_grad():
        router.copy_(torch.tensor([4.0, -4.0, 3.9, 0.0])[:, None] * router[0] + router / 8)
    ids = torch.randint(19, (4, 5), generator=torch.Generator().manual_seed(4))
    return model, {"input_ids": ids, "labels": ids}


SUBJECTS = {
    "mixtral": uneven,
    "qwen3 moe": four_samples,
    "deepseek": deepseek,
    "gpt-oss": gpt_oss,
    "llama-4": llama4,
    "two of llama-4": lambda: llama4(2),
}
DENSE = ("llama-4", "two of llama-4")  # whose code computes all experts for every token


@pytest.fixture(scope="module")
def subjects():
    torch.manual_seed(1)
    found = {}
    for name, make in SUBJECTS.items():
        one = Widened(*models.double(*make()))
        found[name] = one, stepped(one, one.one_device())
    return found


@pytest.mark.ranks
@pytest.mark.hf
@pytest.mark.parametrize("world, dense", sorted({(case[0], case[2] in DENSE) for case in RUN}))
def test_routed_experts_equal_one_device(world, dense, subjects):
    cases = [case[1:] for case in RUN if (case[0], case[2] in DENSE) == (world, dense)]
    # A process takes at most 256 file descriptors, of which each tensor is one.
    used = {name: subjects[name] for _, name in cases}
    for seen in run_ranks(world, _compare, cases, used):
        assert seen, "no rank has sent any row"


def _compare(cases, subjects):
    """What mixtures saw of skew; all is compared on every rank."""
    seen, meshes = [], {}
    for text, name in cases:
        axes, _, host = text.partition(" on hosts of ")
        mesh = Mesh.parse(axes)
        if text not in meshes:
            meshes[text] = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names)
        one, serial = subjects[name]
        draw = random.Random(f"{name} {text}")
        found = _routes(one, mesh, draw)
        assert found, f"no tiling of {name} sends rows on {text}"
        for how in found:
            chosen = {
                op.name: draw.choice([t for t, _ in tilings(one.analysis.rules[op.name], mesh)])
                for op in one.graph.ops
            }
            chosen.update((op.name, how) for op in one.graph.ops if op.kind == "experts")
            storage = {
                leaf.name: draw.choice(stored_as(one.analysis.atoms[leaf.name], mesh))
                for leaf in one.graph.leaves_of(LeafKind.PARAMETER)
            }
            again = frozenset(key for key in storage if draw.random() < 0.5)
            segments = some_segments(one.graph, draw) if draw.random() < 0.5 else {}
            given = mesh, chosen, storage, meshes[text], again, segments
            module = one.module(*given, host_devices=int(host or 0))
            parallel = stepped(one, module)
            errors = {key: error(serial[key], parallel[key]) for key in serial}
            worst = max(errors, key=errors.get)
            assert errors[worst] <= TOLERANCE, (
                f"{name} on {text}, {' '.join(tiling_text(how))}: {worst} is"
                f" {errors[worst]:.1e} off under {segments}, {again}"
            )
            seen += skews([module])
    assert all(1.0 <= skew.total / skew.calls <= skew.most for skew in seen)
    return [skew.most for skew in seen]


def _routes(one, mesh, draw):
    """Tilings of the mixture that send rows, some of them, and along every axis if they can."""
    op = next(op for op in one.graph.ops if op.kind == "experts")
    found = [
        tiling
        for tiling, _ in tilings(one.analysis.rules[op.name], mesh)
        if any(isinstance(choice, Route) for choice in tiling)
    ]
    everywhere = [t for t in found if all(isinstance(choice, Route) for choice in t)]
    some = draw.sample(found, min(TRIED - 1, len(found)))
    return [*draw.sample(everywhere, min(1, len(everywhere))), *some]
