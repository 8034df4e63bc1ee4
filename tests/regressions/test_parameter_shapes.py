"""Optimizers act by rules over `ndim` and `shape`, and these must be the module's own.

A user trained a GPT with `AdamW` in two groups, weight decay on `[p for p in pm.parameters() if
p.ndim >= 2]`. Parameters were DTensors in the shape of their atoms, a bias of 3*12*64 one of three
dimensions, so attention biases decayed: an error of 0.05 after three steps, without a word. Muon,
Adafactor and norms per parameter saw other matrices in the same way. Parameters now have the
module's shape under every plan; a projection that is computed by heads is stored otherwise and
brought there.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.ir.layout import Layout
from shardwright.ir.plan import PlanError
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.program.plan_decoder import read_plan
from shardwright.rules.analysis import analyze
from tests.harness.ranks import run_ranks, whole

HIDDEN, HEADS, VOCABULARY, LENGTH, BATCH = 8, 2, 12, 6, 4


class Block(nn.Module):
    """GPT-2's: layer norms, a fused projection of queries, keys and values, biases."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.c_attn, self.c_proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        q, k, v = self.c_attn(self.ln_1(x)).split(HIDDEN, dim=-1)
        q, k, v = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (q, k, v))
        scores = torch.softmax(q @ k.transpose(-1, -2) / 2, -1)
        x = x + self.c_proj((scores @ v).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, HIDDEN)
        self.block = Block()
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight  # tied

    def forward(self, ids, labels):
        logits = self.head(self.block(self.wte(ids)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def small():
    torch.manual_seed(0)
    model = Small().double()
    for parameter in model.parameters():  # biases and norms too are no round numbers
        nn.init.normal_(parameter, std=0.3)
    batches = [
        {
            "ids": torch.randint(VOCABULARY, (BATCH, LENGTH)),
            "labels": torch.randint(VOCABULARY, (BATCH, LENGTH)),
        }
        for _ in range(3)
    ]
    return model, batches


def planned():
    """Two baselines, as text. Tensor parallel, the projection is computed by heads."""
    model, batches = small()
    graph = sw.capture(model, (), batches[0])
    plans = {p.name: p for p in sw.search(graph, sw.Machine.preset("2xcpu")).baselines}
    tensor = plans["tensor parallel"]
    (projection,) = (op for op in tensor.ops if op.source.module == "block.c_attn")
    assert str(projection.layout).endswith(":S(2.1)")
    return plan_to_json(tensor), plan_to_json(plans["fully sharded"])


class Lamb(torch.optim.Optimizer):
    """Steps of Adam's kind, as long as the parameter: per-parameter norms, as a user writes them.

    What is one-dimensional is left out of the scaling, as is usual.
    """

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].lerp_(p.grad, 0.1)
                state["v"].lerp_(p.grad * p.grad, 0.1)
                update = state["m"] / (state["v"].sqrt() + 1e-6)
                trust = p.norm() / update.norm() if p.ndim >= 2 else 1.0
                p.sub_(group["lr"] * trust * update)


def adamw(parameters):
    decayed = [p for p in parameters if p.ndim >= 2]
    others = [p for p in parameters if p.ndim < 2]
    assert len(decayed) == 5
    groups = [
        {"params": decayed, "weight_decay": 0.5},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.05)


def muon(parameters):
    """On the matrices of the block, as it is meant."""
    return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.05)


def adafactor(parameters, *, foreach):
    """With an epsilon that hides the gradient of the keys' biases, which is rounding alone."""
    return torch.optim.Adafactor(parameters, lr=0.05, eps=(1e-4, 1e-3), foreach=foreach)


OPTIMIZERS = {
    "AdamW by ndim": adamw,
    "Muon": muon,
    "Adafactor": lambda p: adafactor(p, foreach=False),
    "Adafactor, foreach": lambda p: adafactor(p, foreach=True),
    "LAMB": Lamb,
    "SGD, norms clipped": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    "SGD, each clipped": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
}


def trained(module, name, batches):
    """The weights after three steps by the optimizer of that name."""
    parameters = list(module.parameters())
    optimizer = OPTIMIZERS[name](parameters)
    for batch in batches:
        optimizer.zero_grad()
        module(**batch).backward()
        if name == "SGD, norms clipped":
            nn.utils.clip_grad_norm_(parameters, 0.1)
        if name == "SGD, each clipped":
            for parameter in parameters:
                nn.utils.clip_grad_norm_([parameter], 0.05)
        optimizer.step()
    return {key: whole(p) for key, p in module.named_parameters()}


@pytest.mark.ranks
def test_optimizers_see_the_shapes_of_the_module():
    run_ranks(2, _optimizers, planned())


def _optimizers(texts):
    for text in texts:
        plan = sw.Plan.from_json(text)
        for name in OPTIMIZERS:
            model, batches = small()
            module = sw.parallelize(model, plan)
            shapes = {key: p.shape for key, p in model.named_parameters()}
            assert {key: p.shape for key, p in module.named_parameters()} == shapes
            assert all(isinstance(p, DTensor) for p in module.parameters())
            start = {key: whole(p).clone() for key, p in module.named_parameters()}
            for key, p in model.named_parameters():
                assert torch.equal(start[key], p), key
            with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.double):  # in Muon
                found, expected = trained(module, name, batches), trained(model, name, batches)
            for key, value in expected.items():
                assert not torch.equal(value, start[key]) or name == "Muon"
                where = f"{plan.name}, {name}, {key}: "
                torch.testing.assert_close(
                    found[key], value, rtol=0.0, atol=1e-9, msg=where.__add__
                )


def test_a_plan_that_stores_a_parameter_in_the_middle_of_a_dimension_is_refused():
    """As plans of earlier versions do, for a fused projection that is computed by heads."""
    model, batches = small()
    plan = sw.Plan.from_json(planned()[0])
    (axis,) = plan.mesh.names
    assert str(plan.layouts["block.c_attn.weight"]) == f"{axis}:S(1)"
    parameters = [
        replace(p, layout=Layout.parse(f"{axis}:S(0.1)", plan.mesh))
        if "c_attn.weight" in p.name
        else p
        for p in plan.parameters
    ]
    graph = sw.capture(model, (), batches[0])
    told = r"block.c_attn.weight of shape \[24, 8\] as \w+:S\(0.1\), and .*; plan again$"
    with pytest.raises(PlanError, match=told):
        read_plan(replace(plan, parameters=tuple(parameters)), graph, analyze(graph))
