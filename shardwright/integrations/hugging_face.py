"""The Trainer of transformers under a plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

from shardwright.integrations.accelerate import hide_ranks
from shardwright.integrations.hugging_face_arguments import (
    check_arguments,
    first_batch,
    planned_arguments,
    planning_options,
)
from shardwright.integrations.planned_runs import (
    found_plan,
    is_first_rank,
    planned_module,
    resume_run,
    save_run,
)
from shardwright.ir.plan import Plan, PlanError
from shardwright.machine.model import Machine
from shardwright.runtime.model_values import Stored
from shardwright.runtime.weight_files.pretrained import has_adapters
from shardwright.train.checkpoint.export import export_pretrained


class PlannedTrainer(Trainer):  # type: ignore[misc]
    """A `Trainer` that trains the model under a plan; start it by torchrun.

    To the Trainer there is one device: `per_device_train_batch_size` is the global batch, on any
    number of ranks, and loaders give it to each of them. `save_model` writes what `from_pretrained`
    reads. Checkpoints are resumed under any plan and on any number of ranks. Batches of an update
    are weighted by their labels, as by the Trainer.

    Args:
        model: a model of transformers with one copy of its values on each rank, or on the meta
            device with `weights`; also any module that takes a batch by keywords.
        args: the arguments of the run.
        plan: for the collator's batches; None: the fastest one on `machine`.
        machine: the hardware, or the name of a preset such as `"8xH100"`.
        outputs: as in `parallelize`. With `"loss"` evaluation has no predictions, and no rank has
            whole logits.
        weights: as in `parallelize`.
        more: the other arguments of `Trainer`, by keyword.

    Raises:
        PlanError: neither plan nor machine is given, or an argument asks for what a plan decides.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        plan: Plan | None = None,
        machine: Machine | str | None = None,
        outputs: str = "model",
        weights: Stored = None,
        **more: Any,
    ) -> None:
        check_arguments(model, args, more)
        args = planned_arguments(args, outputs)
        hide_ranks(args.distributed_state)
        super().__init__(model, args, **more)
        self._set_signature_columns_if_needed()  # of the model's forward
        model.train()  # from_pretrained returns it in evaluation mode
        if plan is None:
            options = planning_options(args, *self.get_optimizer_cls_and_kwargs(args, model))
            example = first_batch(self.get_train_dataloader)
            plan = found_plan(model, (), example, machine, outputs, **options)
        elif args.bf16 and plan.numerics.precision != "bf16":
            raise PlanError("bf16=True, and the plan is of another precision; plan with bf16")
        self.plan, self.outputs = plan, outputs
        self.shifts_labels = getattr(model, "loss_function", None) is ForCausalLMLoss
        self.adapted = model if has_adapters(model) else None
        planned = planned_module(model, plan, outputs, weights, args.seed)
        self.model = self.model_wrapped = self.callback_handler.model = planned

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: `parallelize` puts each rank's part on its device."""

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """The loss of a global batch, of which each rank takes its part.

        Args:
            model: the planned module.
            inputs: the global batch.
            return_outputs: whether the model's outputs are returned beside it.
            num_items_in_batch: labels of all batches of this update, over which the loss is a mean.
        """
        found = model(**inputs)
        outputs = {"loss": found} if self.outputs == "loss" else found
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
        if num_items_in_batch is not None:
            loss = loss * (self._label_count(inputs) / num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _label_count(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """The labels over which the model's loss of this batch is a mean."""
        labels: torch.Tensor = inputs.get("shift_labels", inputs["labels"])
        if self.shifts_labels and "shift_labels" not in inputs:
            labels = labels[..., 1:]
        return labels.ne(-100).sum()

    def _save(self, output_dir: str | None = None, state_dict: object = None) -> None:
        """Write weights and configuration from all ranks, and the rest as the Trainer does."""
        folder = Path(output_dir or self.args.output_dir)
        if self.adapted is not None:
            export_pretrained(cast(Any, self.model), self.adapted, folder)
        else:
            self.model.save_pretrained(folder)
        if is_first_rank():
            tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = self.model, self.optimizer.optimizer, self.lr_scheduler
        save_run(Path(output_dir), self.plan, *state, self.state.global_step)

    def _save_rng_state(self, output_dir: str) -> None:
        if is_first_rank():  # all ranks draw the same
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: object = None) -> None:
        """Read nothing: parameters come with the optimizer."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            state = self.model, self.optimizer.optimizer, self.lr_scheduler
            resume_run(Path(checkpoint), self.plan, *state)

    def _load_best_model(self) -> None:
        self._load_optimizer_and_scheduler(self.state.best_model_checkpoint)
