"""Which plan is for how many devices."""

import pytest

from shardwright.ir.plan import PlanError
from shardwright.plan_io.files import plan_for, save_plan
from tests.harness import plans


def test_a_file_is_taken_as_it_is(tmp_path):
    plan = plans.simple(mesh="dp=2")
    save_plan(plan, tmp_path / "plan.json")
    assert plan_for(tmp_path / "plan.json", 4) == plan  # what does not fit, `parallelize` says


def test_of_a_folder_the_one_for_so_many_devices_is_taken(tmp_path):
    found = {n: plans.simple(mesh=f"dp={n}") for n in (1, 2, 4)}
    for n, plan in found.items():
        save_plan(plan, tmp_path / f"any-{9 - n}.json")
    assert [plan_for(tmp_path, n) for n in found] == list(found.values())
    with pytest.raises(PlanError, match=r"no plan for 3 devices; it has some for 1, 2, 4: plan"):
        plan_for(tmp_path, 3)
    save_plan(plans.simple(mesh="dp=4"), tmp_path / "b.json")
    with pytest.raises(PlanError, match=r"several plans for 4 devices \(any-5\.json, b\.json\)"):
        plan_for(tmp_path, 4)


def test_an_empty_folder_and_a_damaged_plan_are_told(tmp_path):
    with pytest.raises(PlanError, match="it has some for none"):
        plan_for(tmp_path, 1)
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(PlanError, match=r"a\.json: is not JSON"):
        plan_for(tmp_path, 1)
