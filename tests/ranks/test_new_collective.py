"""A new kind of collective is priced, simulated, written and run by entries of its own alone."""

import pickle

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from shardwright.ir.layout import Mesh
from shardwright.ir.redistribution import Collective, collective_named
from shardwright.machine.topology import links
from shardwright.planner.tables.soybean import Communication
from shardwright.program.instructions import Move
from shardwright.program.step.instructions import Part, Transfer, Wait
from shardwright.program.step.program_json import program_from_json, program_to_json
from shardwright.program.step.step_program import StepProgram
from shardwright.runtime.comm.collectives import collected
from shardwright.runtime.executor.transfers import Collectives
from shardwright.simulate.costs.collectives import collective_seconds
from shardwright.simulate.memory.allocator import Allocator
from shardwright.simulate.memory.collectives import SentTensors, started
from shardwright.simulate.memory.values import View
from shardwright.simulate.time.program_prices import transfer_seconds
from tests.harness.ranks import run_ranks
from tests.harness.rooted_all_reduce import NAME, known_without_torch, runnable
from tests.harness.small_graphs import toy_machine

MESH = Mesh.parse("dp=2")
SHAPE = (3, 2)


@pytest.mark.ranks
def test_a_new_kind_needs_nothing_but_its_entries():
    run_ranks(2, _all_layers)  # in processes of their own, so that no other test knows the kind
    with pytest.raises(ValueError, match=f"'{NAME}' is no collective"):
        collective_named(NAME)


def _all_layers():
    with pytest.raises(ValueError, match=f"'{NAME}' is no collective"):
        collective_named(NAME)
    kind = known_without_torch()
    assert pickle.loads(pickle.dumps(kind)) is kind is collective_named(NAME)
    with pytest.raises(ValueError, match=f"there is a collective '{NAME}' already"):
        known_without_torch()
    transfer = _transfer(kind)
    _check_planning(kind, transfer)
    with pytest.raises(ValueError, match=f"{NAME} is no communication that ranks run"):
        Collectives(transfer, *_group())
    runnable(kind)
    _check_runs(transfer)


def _transfer(kind):
    move = Move("dp", kind, SHAPE, -1, -1, 0, 0, True)
    part = Part("x", "total", SHAPE, (), move, SHAPE, "float64")
    return Transfer(kind, "dp", (part,), "t1")


def _check_planning(kind, transfer):
    assert kind.gradient is Collective.ALL_REDUCE
    program = StepProgram(
        MESH, 0, (), ("x",), (), (), (), (transfer, Wait("t1", ("total",))), ("total",), (), ()
    )
    assert program_from_json(program_to_json(program)) == program
    assert f"t1 = {NAME}(%x) on dp" in str(program)
    machine = toy_machine(2)
    (link,) = links(machine, MESH)
    seconds = collective_seconds(kind, link, transfer.bytes, transfer.bytes, machine)
    assert seconds == transfer_seconds(transfer, MESH, machine).link > 0
    assert kind.crossing(2) == Collective.ALL_REDUCE.crossing(2)
    assert Communication(MESH).launches(kind).tolist() == [0.0]
    allocator = Allocator(1)
    view = View(allocator.new(transfer.bytes), SHAPE, (2, 1), "float64")
    (result,) = started(allocator, kind, SentTensors(transfer.parts, [view], 2, True, True))()
    assert (result.shape, allocator.total) == (SHAPE, transfer.bytes)


def _group():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return mesh.get_group(), mesh.get_local_rank()


def _check_runs(transfer):
    group, rank = _group()
    x = torch.arange(6.0, dtype=torch.float64).view(SHAPE) * (rank + 1)
    expected = torch.arange(6.0, dtype=torch.float64).view(SHAPE) * 3
    (total,) = Collectives(transfer, group, rank).start([x], [False]).results()
    assert torch.equal(total, expected)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    assert torch.equal(collected(x, transfer.parts[0].move, mesh), expected)
