"""Gradients of inputs, and derivatives of them, are those of one device under any tilings.

The critic of a GAN reads what a generator made, and a gradient penalty is made of the critic's own
gradient. Every operator draws one of its tilings, every parameter a way to be stored, and the batch
may come in micro-batches.
"""

import random
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwright as sw
from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import Mesh
from shardwright.rules.micro_batches import micro_batches
from shardwright.rules.placements import feasible, layouts_under, tiling_text, tilings
from tests.harness.ranks import run_ranks, whole
from tests.harness.training_scripts import difference_of, gan
from tests.ranks.test_random_tilings import TOLERANCE, Widened, error, some_segments, stored_as

BATCH, LENGTH, WIDTH, HEADS = 5, 4, 8, 2
ASSIGNMENTS = 4
MESHES = {2: ["a=2"], 4: ["a=2 b=2"]}
PAIRS = [  # plans of a generator and of the critic that reads what it makes
    ("", "data parallel"),
    ("data parallel", "tensor parallel"),
    ("tensor parallel", "fully sharded"),
]


class Critic(nn.Module):
    """Reads its input three times, and one that has no batch; returns a loss."""

    def __init__(self):
        super().__init__()
        self.projections = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, style, wanted):
        heads = self.projections(x).view(len(x), LENGTH, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        scores = (query @ key.mT * 0.5).softmax(-1)
        mixed = (scores @ value).transpose(1, 2).reshape(x.shape)
        hidden = self.norm(x + mixed) * style
        hidden = hidden + self.down(torch.tanh(self.up(hidden)))
        scale = x.square().mean((1, 2), keepdim=True)
        return F.mse_loss(hidden * scale, wanted)


def subject():
    torch.manual_seed(0)
    model = Critic().double()
    sizes = {"x": (BATCH, LENGTH, WIDTH), "style": (WIDTH,), "wanted": (BATCH, LENGTH, WIDTH)}
    batch = {key: torch.randn(size, dtype=torch.float64) for key, size in sizes.items()}
    for key in ("x", "style"):
        batch[key].requires_grad_()
    return Widened(model, batch)


def _run(one, module, *, twice):
    """Loss and gradients; if `twice`, of the loss and of how large its gradients are."""
    module.zero_grad()
    given = {key: value.detach().clone() for key, value in one.batch.items()}
    read = [given[key].requires_grad_() for key in ("x", "style")]
    loss = module(**given)
    if twice:
        slopes = torch.autograd.grad(loss, read, create_graph=True)
        loss = loss + sum((slope.norm(dim=-1) - 0.1).square().mean() for slope in slopes)
    loss.backward()
    found = {"loss": loss.detach(), "x": read[0].grad, "style": read[1].grad}
    for key, parameter in module.named_parameters():
        found[key] = whole(parameter.grad)
    return found


def _assignments(one, text):
    mesh = Mesh.parse(text)
    device_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names)
    draw = random.Random(text)
    layouts = {
        leaf.name: stored_as(one.analysis.atoms[leaf.name], mesh)
        for leaf in one.graph.leaves_of(LeafKind.PARAMETER)
    }
    for count in (1, 2):
        micro = micro_batches(one.graph, one.analysis, count)
        options = {op.name: _options(one, micro, op, mesh) for op in one.graph.ops}
        expected = {
            twice: _run(one, one.one_device(count), twice=twice)
            for twice in ((False, True) if count == 1 else (False,))
        }
        if count > 1:  # of what one device gives that takes the batch as a whole
            expected = {False: _run(one, one.one_device(), twice=False)}
        for number in range(ASSIGNMENTS):
            chosen = {key: draw.choice(found) for key, found in options.items()}
            storage = {key: draw.choice(found) for key, found in layouts.items()}
            again = frozenset(key for key in storage if draw.random() < 0.5)
            segments = some_segments(one.graph, draw)
            module = one.module(mesh, chosen, storage, device_mesh, again, segments, count)
            for twice, serial in expected.items():
                parallel = _run(one, module, twice=twice)
                errors = {key: error(serial[key], parallel[key]) for key in serial}
                worst = max(errors, key=errors.get)
                tiled = {key: " ".join(tiling_text(tiling)) for key, tiling in chosen.items()}
                assert errors[worst] <= TOLERANCE, (
                    f"{count} micro-batches on {text}, assignment {number}, {twice=}: {worst} is"
                    f" {errors[worst]:.1e} off under {tiled}, {storage}, {again} and {segments}"
                )


def _options(one, micro, op, mesh):
    rule, wide = one.analysis.rules[op.name], micro.mesh(mesh)
    return [
        tiling
        for tiling, _ in tilings(rule, mesh)
        if feasible(rule, layouts_under(rule, (micro.choices[op.name], *tiling), wide))
    ]


def _compare(one, meshes):
    warnings.simplefilter("ignore")
    for text in meshes:
        _assignments(one, text)
    machine = sw.Machine.preset(f"{dist.get_world_size()}xcpu")
    for pair in PAIRS:
        names = iter(pair)
        found = difference_of(gan, partial(_parallel, machine, names))
        assert found < TOLERANCE, f"{machine.name}, {pair}: {found}"


def _parallel(machine, names, model, args):
    """`model` under the baseline of the next of `names`, or as it is."""
    if not (name := next(names)):
        return model
    plans = sw.search(sw.capture(model, args), machine, "adam", seconds=0).baselines
    return sw.parallelize(model, next(plan for plan in plans if plan.name == name))


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("world", MESHES)
def test_gradients_of_inputs_equal_one_device(world):
    run_ranks(world, _compare, subject(), MESHES[world])
