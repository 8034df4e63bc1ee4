"""What accelerate would do in the place of the plan is refused; the rest runs on ranks."""

import pytest

pytest.importorskip("accelerate")

from shardwright.integrations.accelerate import PlannedAccelerator
from shardwright.integrations.planned_runs import found_plan
from shardwright.ir.plan import PlanError
from shardwright.runtime.weight_files.dcp_index import CheckpointError
from tests.harness.trainers.classifier import BATCH, Classifier, data


@pytest.fixture(scope="module")
def plan():
    return found_plan(Classifier(), data()[:BATCH], {}, "1xcpu", "model")


@pytest.mark.parametrize("name", ["mixed_precision", "fsdp_plugin", "dynamo_backend"])
def test_what_the_plan_decides_is_refused(plan, name):
    with pytest.raises(PlanError, match=f"the plan decides on {name}"):
        PlannedAccelerator(plan, cpu=True, **{name: "bf16"})


def test_a_module_without_a_plan_is_refused(plan):
    with pytest.raises(PlanError, match="Classifier runs no plan"):
        PlannedAccelerator(plan, cpu=True).prepare(Classifier())


def test_a_state_needs_a_folder_and_what_is_in_it(plan, tmp_path):
    accelerator = PlannedAccelerator(plan, cpu=True)
    with pytest.raises(CheckpointError, match="name the one"):
        accelerator.save_state()
    with pytest.raises(CheckpointError, match="0 modules and 0 optimizers are prepared"):
        accelerator.save_state(str(tmp_path))
