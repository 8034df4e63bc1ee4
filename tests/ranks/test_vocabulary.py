"""Logits that several ranks share take as much less memory, counted in a real step."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import Layout, Mesh
from shardwright.runtime.parameters.peak_memory import metered
from tests.harness.ranks import run_ranks
from tests.ranks.test_random_tilings import Widened
from tests.ranks.test_wide import along, stored

WORDS, SAMPLES, WIDTH = 4001, 128, 2
LOGITS = 8 * WORDS * SAMPLES  # bytes, on one device
MESHES = {"a=4": 4, "a=2 b=2": 2}  # and the ranks that share the vocabulary


class Tied(nn.Module):
    """Next to its logits nothing is large."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, words, labels):
        logits = nn.functional.linear(self.table(words), self.table.weight)
        return nn.functional.cross_entropy(logits, labels, ignore_index=3, label_smoothing=0.1)


@pytest.mark.ranks
def test_logits_take_a_part_of_the_memory_for_each_rank_that_shares_the_vocabulary():
    torch.manual_seed(0)
    words = torch.arange(SAMPLES) * 31
    one = Widened(Tied().double(), {"words": words, "labels": words.roll(1)})
    for alone, shared in run_ranks(4, _measure, one):
        assert alone >= 2 * LOGITS, "logits and what the loss keeps of them"
        for text, ranks in MESHES.items():
            assert shared[text] <= 1.1 * alone / ranks, f"{text}: {shared[text]} of {alone}"
            assert shared[text] >= LOGITS / ranks


def _measure(one):
    """Bytes of tensors at the peak of a step, alone and by mesh, less what lasts."""
    alone = _peak(one, one.one_device())
    shared = {}
    for text in MESHES:
        mesh = Mesh.parse(text)
        device_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names)
        atom = one.analysis.dims["table.weight"][0][-1]
        first = Mesh(mesh.axes[:1])  # the vocabulary lies along the first axis alone
        chosen = {
            name: (*tiling, *(None,) * (len(mesh.axes) - 1))
            for name, tiling in along(one, first, atom)[0].items()
        }
        storage = {}
        for leaf in one.graph.leaves_of(LeafKind.PARAMETER):
            lies = stored(one, leaf.name, first, atom).placements
            rest = Layout.replicated(mesh).placements[1:]
            storage[leaf.name] = Layout(mesh, (*lies, *rest))
        shared[text] = _peak(one, one.module(mesh, chosen, storage, device_mesh))
    return alone, shared


def _peak(one, module):
    def step():
        module(**one.batch).backward()

    step()
    for parameter in module.parameters():
        parameter.grad = None
    held = [*module.parameters(), *one.batch.values()]
    _, most = metered(step, held, torch.device("cpu"))
    return most - sum(t.numel() * t.element_size() for t in one.batch.values())
