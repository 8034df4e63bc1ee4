"""SoyBean's networks: what is cut how, and how much crosses the cuts."""

import pytest
import torch

from shardwright.api import capture
from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import Mesh
from shardwright.machine.presets import preset
from shardwright.planner.kcut.cutter import Cutter
from tests.zoo.images.pytorchcv_models import Classifier

MACHINE = preset("8xH100")
HALVES = {n: Mesh(tuple((f"k{i}", 2) for i in range(1, n + 1))) for n in (1, 2, 3)}


def cutter_of(name, batch):
    from pytorchcv.model_provider import get_model

    with torch.device("meta"):
        images, classes = torch.zeros(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.long)
        return Cutter(capture(Classifier(get_model(name)), (images, classes)), MACHINE)


@pytest.fixture(scope="module")
def alexnet():
    return cutter_of("alexnet", 128)


@pytest.fixture(scope="module")
def vgg():
    return cutter_of("vgg16", 64)


@pytest.fixture(scope="module")
def resnet():
    return cutter_of("resnet18", 64)


def splits(cutter, cuts, kind):
    """What the operators of one kind split, in order: a word for each cut, without the atom."""
    rules = cutter.analysis.rules
    return [
        [str(rules[op.name].choices()[k]).partition(".")[0] for k in cuts.tilings[op.name]]
        for op in cutter.graph.ops
        if op.kind == kind
    ]


def data_parallel(cutter, devices):
    graph = cutter.graph
    weights = (graph.tensor[leaf.name].bytes for leaf in graph.leaves_of(LeafKind.PARAMETER))
    return 2 * (devices - 1) * sum(weights)


@pytest.mark.parametrize("network, cuts", [("alexnet", 3), ("vgg", 2)])
def test_convolutions_are_cut_by_batch_and_big_layers_by_columns_or_rows(network, cuts, request):
    cutter = request.getfixturevalue(network)
    found = cutter.cut(HALVES[cuts])
    assert splits(cutter, found, "conv2d") == [["b"] * cuts] * (5 if network == "alexnet" else 13)
    by_layer = splits(cutter, found, "linear")
    assert len(by_layer) == 3
    assert 8 * found.bytes < data_parallel(cutter, 2**cuts)
    assert all(word in ("n", "k") for layer in by_layer for word in layer)


def test_the_last_convolutions_of_vgg_turn_to_channels_where_the_batch_is_short(vgg):
    found = splits(vgg, vgg.cut(HALVES[3]), "conv2d")
    assert found[:10] == [["b"] * 3] * 10
    assert {first for first, _, _ in found} == {second for _, second, _ in found} == {"b"}
    assert all(third in ("o", "c") for _, _, third in found[10:])


@pytest.mark.parametrize("network, most", [("alexnet", 3), ("vgg", 3), ("resnet", 2)])
def test_all_cuts_at_once_move_no_more_than_one_by_one(network, most, request):
    cutter = request.getfixturevalue(network)
    one_by_one = [cutter.cut(HALVES[n]) for n in range(1, most + 1)]
    joint = [cutter.cut(HALVES[n], at_once=n) for n in range(1, most + 1)]
    for found, best in zip(one_by_one, joint, strict=True):
        assert not found.pinned and not best.pinned
        assert best.bytes <= found.bytes
        assert best.bytes == cutter.crossing(best) and found.bytes == cutter.crossing(found)
    assert joint[0].bytes == one_by_one[0].bytes
