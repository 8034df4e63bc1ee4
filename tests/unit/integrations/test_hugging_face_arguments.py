"""What a plan decides is refused, and what the Trainer would do instead of it is turned off."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
from transformers import TrainingArguments

from shardwright.integrations.hugging_face_arguments import (
    check_arguments,
    first_batch,
    planned_arguments,
)
from shardwright.ir.plan import PlanError

pytestmark = pytest.mark.hf


@pytest.mark.parametrize(
    "given, said",
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor does not go with a plan"),
        ({"gradient_checkpointing": True}, "the plan says what is recomputed"),
        ({"auto_find_batch_size": True}, "the plan is for one batch"),
        ({"neftune_noise_alpha": 5.0}, "in the model's forward"),
    ],
)
def test_what_a_plan_decides_is_refused(given, said, tmp_path):
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **given)
    with pytest.raises(PlanError, match=said):
        check_arguments(torch.nn.Linear(1, 1), arguments, ())


def test_another_loss_or_model_is_refused(tmp_path):
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    check_arguments(torch.nn.Linear(1, 1), arguments, ("train_dataset",))
    for name in ("model_init", "compute_loss_func"):
        with pytest.raises(PlanError, match=f"{name} does not go with a plan"):
            check_arguments(torch.nn.Linear(1, 1), arguments, (name,))


def test_a_routers_loss_is_refused_over_several_batches(tmp_path):
    model = SimpleNamespace(config=SimpleNamespace(output_router_logits=True))
    for count in (1, 2):
        arguments = TrainingArguments(
            str(tmp_path), use_cpu=True, report_to="none", gradient_accumulation_steps=count
        )
        if count == 1:
            check_arguments(model, arguments, ())
        else:
            with pytest.raises(PlanError, match="gradient_accumulation_steps=1"):
                check_arguments(model, arguments, ())


def test_accelerate_neither_casts_nor_reads_for_all(tmp_path):
    given = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", bf16=True)
    found = planned_arguments(given, "loss")
    assert (found.mixed_precision, found.bf16, found.prediction_loss_only) == ("no", True, True)
    assert found.accelerator_config.dispatch_batches is False
    assert given.mixed_precision == "bf16", "the user's are left"
    assert given.accelerator_config.dispatch_batches is None
    assert not planned_arguments(given, "model").prediction_loss_only


def test_the_first_batch_draws_nothing():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    found = first_batch(lambda: [{"noise": torch.rand(3)}])
    assert found["noise"].shape == (3,)
    assert torch.equal(torch.get_rng_state(), before)
