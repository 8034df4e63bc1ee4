"""World splits, against each framework's own rule told in another way."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.frameworks.errors import FrameworkError
from shardwright.frameworks.reading import read_text
from shardwright.frameworks.world import world_split
from shardwright.frameworks.writers.nearest import ConfigFacts
from shardwright.frameworks.writing import write_config
from shardwright.ir.strategy.strategy import Strategy, divisors

DEGREE = st.integers(1, 4)


@st.composite
def degrees(draw, experts=True):
    found = {axis: draw(DEGREE) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    inner = found["dp_shard"] * found["cp"] * found["tp"]
    ep = draw(st.sampled_from(divisors(inner))) if experts else 1
    return found, ep


def strategy_of(found, ep, **more):
    return Strategy(**found, ep=ep, etp=1, micro_batches=4, **more)


@given(degrees())
def test_torchtitan_reshapes_the_world_and_regroups_it_for_experts(drawn):
    """Meshes are the world reshaped; experts reshape what is inside of a replica."""
    found, ep = drawn
    split = world_split("torchtitan", strategy_of(found, ep))
    shape = [found[axis] for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")]
    dense = np.arange(np.prod(shape)).reshape(shape)
    inner = found["dp_shard"] * found["cp"] * found["tp"]
    experts = dense.reshape(found["pp"], found["dp_replicate"], inner // ep, ep)
    for rank in range(dense.size):
        assert tuple(split.coordinates(rank).values()) == tuple(np.argwhere(dense == rank)[0])
        place = split.expert_coordinates(rank)
        assert list(place) == ["pp", "dp_replicate", "efsdp", "ep"]
        assert tuple(place.values()) == tuple(np.argwhere(experts == rank)[0])


@given(degrees(), st.booleans())
def test_megatron_counts_strides_from_its_order_string(drawn, swapped):
    """`tp-cp-ep-dp-pp`: the stride of an axis is the product of the degrees before it."""
    found, ep = drawn
    order = ("dp_replicate", "dp_shard", "pp", "cp", "tp")
    strategy = strategy_of(found, ep, **({"order": order} if swapped else {}))
    split = world_split("megatron", strategy)
    dp = found["dp_replicate"] * found["dp_shard"]
    sizes = {"tp": found["tp"], "cp": found["cp"], "dp": dp, "pp": found["pp"]}
    names = "tp-cp-pp-dp" if swapped and found["pp"] > 1 and dp > 1 else "tp-cp-dp-pp"
    experts = {"etp": 1, "ep": ep, "edp": dp * found["cp"] * found["tp"] // ep, "pp": found["pp"]}
    for rank in range(strategy.devices):
        stride, place = 1, {}
        for name in names.split("-"):
            place[name] = rank // stride % sizes[name]
            stride *= sizes[name]
        said = split.coordinates(rank)
        assert said["dp_replicate"] * found["dp_shard"] + said["dp_shard"] == place["dp"]
        assert {name: said[name] for name in ("tp", "cp", "pp")} == {
            name: place[name] for name in ("tp", "cp", "pp")
        }
        stride, place = 1, {}
        tail = ["pp", "edp"] if names.endswith("dp") else ["edp", "pp"]
        for name in ("etp", "ep", *tail):
            place[name] = rank // stride % experts[name]
            stride *= experts[name]
        assert split.expert_coordinates(rank) == place


@given(degrees(experts=False))
def test_accelerate_and_deepspeed_put_neighbours_in_the_innermost_axis(drawn):
    found, _ = drawn
    found = {**found, "pp": 1}
    strategy = strategy_of(found, 1)
    for framework in ("accelerate", "trainer", "deepspeed"):
        split = world_split(framework, strategy)
        for rank in range(strategy.devices):
            place, left = split.coordinates(rank), rank
            for axis in ("tp", "cp", "dp_shard", "dp_replicate"):
                assert place[axis] == left % found[axis]
                left //= found[axis]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_degrees_that_are_left_open_fill_the_world(tp, cp, pp, rest):
    """Torchtitan's -1 and Megatron-LM's data parallelism are what the other degrees leave."""
    world = tp * cp * pp * rest
    toml = f"""
[training]
local_batch_size = {4 * pp}
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = {tp}
context_parallel_degree = {cp}
pipeline_parallel_degree = {pp}
"""
    flags = (
        f"--tensor-model-parallel-size {tp} --context-parallel-size {cp}"
        f" --pipeline-model-parallel-size {pp} --use-distributed-optimizer"
        f" --micro-batch-size 1 --global-batch-size {rest * 4}"
    )
    for text in (toml, flags):
        strategy = read_text(text, devices=world).strategy
        assert (strategy.dp_shard, strategy.devices) == (rest, world)
    wide = toml.replace("tensor_parallel_degree = ", "tensor_parallel_degree = 9")
    with pytest.raises(FrameworkError, match="devices are not divided by"):
        read_text(wide, devices=world)


@pytest.mark.parametrize("framework", ["torchtitan", "accelerate", "deepspeed"])
def test_an_order_that_a_framework_does_not_have_is_refused(framework):
    strategy = Strategy(dp_shard=2, tp=2, order=("pp", "tp", "dp_replicate", "dp_shard", "cp"))
    with pytest.raises(FrameworkError, match="orders its axes"):
        world_split(framework, strategy)


def test_experts_over_replicas_are_refused_where_meshes_end_at_a_replica():
    strategy = Strategy(dp_replicate=4, tp=2, ep=4)
    assert world_split("megatron", strategy).experts[1:3] == (("edp", 2), ("ep", 4))
    with pytest.raises(FrameworkError, match="does not divide the 2 ranks"):
        world_split("torchtitan", strategy)


SWAPPED = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer"
    " --use-tp-pp-dp-mapping --micro-batch-size 1 --global-batch-size 16"
)


def test_stages_near_each_other_are_read_and_written_as_one_flag():
    found = read_text(SWAPPED, devices=16)
    assert found.strategy.axes == (("dp_shard", 4), ("pp", 2), ("tp", 2))
    written = write_config("megatron", found.strategy, ConfigFacts(batch=found.batch))
    assert "--use-tp-pp-dp-mapping" in written.text and not written.reasons
    assert read_text(written.text).strategy == found.strategy


def test_experts_on_other_ranks_than_dense_layers_keep_the_pipeline_outermost():
    """Megatron-Core asserts that both have equally many data-parallel ranks."""
    with pytest.raises(FrameworkError, match="needs etp x ep, 8, to be tp x cp, 2"):
        read_text(f"{SWAPPED} --expert-model-parallel-size 4", devices=16)
    swapped = read_text(SWAPPED, devices=16)
    experts = swapped.strategy.but(ep=4, etp=1)
    written = write_config("megatron", experts, ConfigFacts(batch=swapped.batch))
    assert any("pipelines are outside of data parallelism" in one for one in written.reasons)
    assert read_text(written.text).strategy.order[0] == "pp"
