"""The parsers of other training frameworks, run on config files in a process of their own.

    python -m tests.harness.framework_parsers FOLDER... < cases.json

The folders are those that `make` installs the frameworks into, out of the environment of the suite.
Standard input is a list of `{"framework", "text", "devices"}`, output a list of what each framework
understood, under the names of `Strategy`'s fields where it has them.

Packages that hold kernels for GPUs, and data sets, are replaced by empty ones: parsers import them
and do not call them.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import json
import logging
import shlex
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import yaml

EMPTY = (
    "datasets",
    "modelopt",
    "nvidia_resiliency_ext",
    "sentencepiece",
    "transformer_engine",
    "triton",
    "wandb",
)
# torch asks whether there is triton when these are imported, and must not find the empty one.
BEFORE = (
    "torch.utils.flop_counter",
    "torch.distributed.tensor",
    "torch.distributed.pipelining",
    "torch.distributed.fsdp",
    "torch._inductor.select_algorithm",
)
Facts = dict[str, Any]


class EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports modules whose every name is a mock."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in EMPTY:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module: Any = MagicMock(name=spec.name)
        module.__name__, module.__spec__, module.__path__ = spec.name, spec, []
        module.__version__ = "99.0"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _titan_facts(config: Any, dims: Any) -> Facts:
    from torch.distributed.pipelining.schedules import get_schedule_class

    training, parallel = config.training, config.parallelism
    local, micro = training.local_batch_size, parallel.pipeline_parallel_microbatch_size
    parts = local // micro if dims.pp > 1 else 1
    passes = training.global_batch_size // (local * dims.dp_replicate * dims.dp_shard)
    schedule = parallel.pipeline_parallel_schedule
    assert get_schedule_class(schedule).__name__ == f"Schedule{schedule}"
    return {
        **{name: getattr(dims, name) for name in ("dp_replicate", "dp_shard", "cp", "tp")},
        "pp": dims.pp,
        "ep": dims.ep,
        "schedule": schedule if dims.pp > 1 else None,
        "micro_batches": parts * passes,
        "samples": training.global_batch_size,
        "sequence": training.seq_len,
        "clip": training.max_norm,
        "state_dtype": training.dtype,
        "param_dtype": training.mixed_precision_param,
        "regional": config.compile.enable,
    }


def torchtitan(text: str, devices: int) -> Facts:
    """Torchtitan 0.3: the function in the file changes the config of a model that is its own."""
    from torchtitan.distributed import ParallelDims
    from torchtitan.trainer import Trainer

    names: dict[str, Any] = {}
    exec(compile(text, "written.py", "exec"), names)
    (made,) = (value for name, value in names.items() if name.endswith("_planned"))
    config = made()
    assert isinstance(config, Trainer.Config)
    for part in (config, config.parallelism, config.training, config.compile):
        if hasattr(part, "__post_init__"):
            part.__post_init__()
    found = _titan_facts(config, ParallelDims.from_config(config.parallelism, devices))
    kept = config.activation_checkpoint
    return {
        **found,
        "sequence_parallel": config.parallelism.enable_sequence_parallel,
        "async_tp": config.compile.enable_async_tensor_parallel,
        "recompute": None if kept is None else type(kept).__qualname__.removesuffix(".Config"),
        "loss": type(config.loss).__qualname__.removesuffix(".Config"),
    }


def torchtitan_toml(text: str, devices: int) -> Facts:
    """Torchtitan 0.2: its `ConfigManager` reads the TOML."""
    from torchtitan.config.manager import ConfigManager
    from torchtitan.distributed.parallel_dims import ParallelDims

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.toml"
        file.write_text(text)
        config: Any = ConfigManager().parse_args([f"--job.config_file={file}"])
    parallel = config.parallelism
    dims = ParallelDims(
        dp_replicate=parallel.data_parallel_replicate_degree,
        dp_shard=parallel.data_parallel_shard_degree,
        cp=parallel.context_parallel_degree,
        tp=parallel.tensor_parallel_degree,
        pp=parallel.pipeline_parallel_degree,
        ep=parallel.expert_parallel_degree,
        etp=parallel.expert_tensor_parallel_degree,
        world_size=devices,
    )
    float8 = config.quantize.linear.float8
    return {
        **_titan_facts(config, dims),
        "recompute": config.activation_checkpoint.mode,
        "async_tp": parallel.enable_async_tensor_parallel,
        "fp8_gather": float8.enable_fsdp_float8_all_gather,
        "fp8": (float8.recipe_name or "tensorwise")
        if "float8" in config.model.converters
        else None,
    }


def deepspeed(text: str, devices: int) -> Facts:
    """DeepSpeed: `DeepSpeedConfig` on as many ranks."""
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig

    content = json.loads(text)
    tp = content.get("tensor_parallel", {}).get("autotp_size", 1)
    groups = types.SimpleNamespace(get_data_parallel_world_size=lambda: devices // tp)
    with patch.multiple(comm, get_rank=lambda: 0, get_world_size=lambda: devices):
        config = DeepSpeedConfig(content, mpu=groups if tp > 1 else None)
    zero = config.zero_config
    offloaded = {
        "optimizer": zero.offload_optimizer,
        "parameters": zero.offload_param,
    }
    return {
        "tp": config.tensor_parallel_config.autotp_size or 1,
        "ep": config.expert_parallel_config.autoep_size
        if config.expert_parallel_config.enabled
        else 1,
        "zero": zero.stage,
        "samples": config.train_batch_size,
        "micro_batches": config.gradient_accumulation_steps,
        "clip": config.gradient_clipping,
        "param_dtype": "bfloat16"
        if config.bfloat16_config.enabled
        else "float16"
        if config.float16_config.enabled
        else "float32",
        "offload": [
            name for name, part in offloaded.items() if part is not None and part.device == "cpu"
        ],
    }


# Arguments of Megatron-LM's training script, which is not on the package index.
MEGATRON_TRAINING = (
    "num_virtual_stages_per_pipeline_rank",
    "use_tp_pp_dp_mapping",
    "micro_batch_size",
    "global_batch_size",
    "seq_length",
    "use_torch_fsdp2",
    "torch_fsdp2_no_reshard_after_forward",
    "grad_reduce_in_bf16",
    "num_distributed_optimizer_instances",
)
LAYERS = 32  # of the model that the flags are given to


def _flags(script: str) -> dict[str, Any]:
    """The flags of a script's array, by the names of fields."""
    found: dict[str, Any] = {}
    words = shlex.split(script.partition("PARALLEL_ARGS=(")[2].partition("\n)")[0])
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--").replace("-", "_")
            found[name] = []
        else:
            found[name].append(yaml.safe_load(word))
    several = ("recompute_modules",)
    return {
        name: True if not given else given if name in several else given[0]
        for name, given in found.items()
    }


def megatron(text: str, devices: int) -> Facts:
    """Megatron-LM: the flags as fields of Megatron-Core's classes of configs."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    flags = _flags(text)
    training = {name: flags.pop(name) for name in MEGATRON_TRAINING if name in flags}
    if "fp8_format" in flags:
        flags["fp8"] = flags.pop("fp8_format")
    virtual = training.get("num_virtual_stages_per_pipeline_rank")
    shape: Facts = {"num_layers": LAYERS, "hidden_size": 144, "num_attention_heads": 144}
    shape |= {"pipeline_dtype": "float", "virtual_pipeline_model_parallel_size": virtual}
    if flags["expert_model_parallel_size"] > 1 or "moe_act" in flags.get("recompute_modules", ()):
        shape |= {
            "num_moe_experts": 2**6 * 3**4,
            "add_bias_linear": False,
            "moe_grouped_gemm": True,
        }
    classes = (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
    known = [{field.name for field in dataclasses.fields(one)} for one in classes]
    unknown = set(flags) - set().union(*known)
    assert not unknown, f"no class of Megatron-Core has {unknown}"
    model, sums, update = (
        one(**{name: value for name, value in flags.items() if name in names}, **more)
        for one, names, more in zip(classes, known, (shape, {}, {}), strict=True)
    )
    return _megatron_facts(model, sums, update, devices) | {
        "grad_dtype": "bfloat16" if "grad_reduce_in_bf16" in training else "float32",
        "fp8_gather": sums.fp8_param_gather,
        "samples": training["global_batch_size"],
        "micro": training["micro_batch_size"],
        "sequence": training["seq_length"],
    }


def _megatron_facts(model: Any, sums: Any, update: Any, devices: int) -> Facts:
    sharded = {"optim_grads": 2, "optim_grads_params": 3}
    zero = (
        sharded[sums.data_parallel_sharding_strategy]
        if sums.use_megatron_fsdp
        else int(update.use_distributed_optimizer)
    )
    tp, cp, pp = (
        getattr(model, f"{name}_parallel_size")
        for name in ("tensor_model", "context", "pipeline_model")
    )
    return {
        "tp": tp,
        "cp": cp,
        "pp": pp,
        "data": devices // (tp * cp * pp),
        "ep": model.expert_model_parallel_size,
        "etp": model.expert_tensor_parallel_size,
        "sequence_parallel": model.sequence_parallel,
        "async_tp": model.tp_comm_overlap,
        "ep_overlap": bool(getattr(model, "overlap_moe_expert_parallel_comm", False)),
        "virtual_stages": model.virtual_pipeline_model_parallel_size or 1,
        "zero": zero,
        "clip": update.clip_grad,
        "fp8": model.fp8_recipe if model.fp8 else None,
        "grad_dtype": "float32"
        if sums.grad_reduce_in_fp32 or not (update.bf16 or update.fp16)
        else "bfloat16"
        if update.bf16
        else "float16",
        "param_dtype": "bfloat16" if update.bf16 else "float16" if update.fp16 else "float32",
        "recompute": model.recompute_granularity,
    }


def megatron_bridge(text: str, devices: int) -> Facts:
    """Megatron-Bridge: its override of a recipe, whose `ConfigContainer` validates itself."""
    from megatron.bridge.models.llama.llama_provider import Llama3ModelProvider8B
    from megatron.bridge.training import config as bridge
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    # A mixture, in case that the file splits experts, in sizes that any degrees divide.
    shape = {"hidden_size": 144, "num_attention_heads": 144, "num_query_groups": 144}
    experts = {"num_moe_experts": 2**6 * 3**4, "moe_grouped_gemm": True}
    model = Llama3ModelProvider8B(num_layers=LAYERS, **shape, **experts)
    recipe = bridge.ConfigContainer(
        model=model,
        train=bridge.TrainingConfig(train_iters=10),
        optimizer=bridge.OptimizerConfig(lr=1e-4, use_distributed_optimizer=True),
        ddp=bridge.DistributedDataParallelConfig(use_distributed_optimizer=True),
        scheduler=bridge.SchedulerConfig(lr_warmup_iters=2),
        dataset=bridge.GPTDatasetConfig(
            random_seed=1,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            seq_length=8192,
        ),
        logger=bridge.LoggerConfig(),
        tokenizer=bridge.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=128256),
        checkpoint=bridge.CheckpointConfig(),
        mixed_precision="bf16_mixed",
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "override.yaml"
        file.write_text(text)
        config = process_config_with_overrides(recipe, str(file))
    if isinstance(config.mixed_precision, str):
        config.mixed_precision = bridge.get_mixed_precision_config(config.mixed_precision)
    if config.mixed_precision is not None:
        config.mixed_precision.setup(config.model, config.optimizer, config.ddp)
    with patch.object(bridge, "get_world_size_safe", lambda: devices):
        config.validate()
    return _megatron_facts(config.model, config.ddp, config.optimizer, devices) | {
        "samples": config.train.global_batch_size,
        "micro": config.train.micro_batch_size,
        "sequence": config.dataset.seq_length,
    }


PARSERS: dict[str, Callable[[str, int], Facts]] = {
    "torchtitan-0.3": torchtitan,
    "torchtitan-toml": torchtitan_toml,
    "deepspeed": deepspeed,
    "megatron": megatron,
    "megatron-bridge": megatron_bridge,
}


def main() -> None:
    """Reads cases from standard input and prints what the framework understood of each."""
    for name in BEFORE:
        importlib.import_module(name)
    sys.meta_path.insert(0, EmptyModules())
    sys.path[:0] = sys.argv[1:]
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    found = []
    printed, sys.stdout = sys.stdout, sys.stderr
    for case in json.load(sys.stdin):
        try:
            found.append(PARSERS[case["framework"]](case["text"], case["devices"]))
        except (Exception, SystemExit):
            found.append({"error": traceback.format_exc(limit=-4)})
    json.dump(found, printed, default=str)


if __name__ == "__main__":
    main()
