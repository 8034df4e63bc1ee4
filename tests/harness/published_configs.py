"""Configs with the key values of published measurements, as their frameworks write them."""

from pathlib import Path

_EXAMPLES = Path(__file__).parents[2] / "examples" / "configs"


def _example(name: str) -> str:
    return (_EXAMPLES / name).read_text()


TORCHTITAN_8B = _example("torchtitan.toml")
COMPILED = "[compile]\nenable = true\n"
FLOAT8 = """\
[quantize.linear.float8]
enable_fsdp_float8_all_gather = true
precompute_float8_dynamic_scale_for_fsdp = true
filter_fqns = ["output"]
"""
TORCHTITAN_70B = """\
[model]
name = "llama3"
flavor = "70B"
converters = ["float8"]
[training]
batch_size = 16
seq_len = 8192
data_parallel_shard_degree = 32
tensor_parallel_degree = 8
[experimental]
enable_async_tensor_parallel = true
[activation_checkpoint]
mode = "full"
[compile]
enable = true
"""
TORCHTITAN_405B = """\
[model]
name = "llama3"
flavor = "405B"
converters = ["float8"]
[training]
batch_size = 32
seq_len = 8192
data_parallel_shard_degree = 8
tensor_parallel_degree = 8
[experimental]
enable_async_tensor_parallel = true
pipeline_parallel_degree = 8
pipeline_parallel_schedule = "1F1B"
[activation_checkpoint]
mode = "full"
[compile]
enable = true
"""
NVFP4 = """\
from torchtitan.components.quantization import NVFP4LinearConverter
from torchtitan.config import CompileConfig
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_8b


def llama3_8b_narrow():
    config = llama3_8b()
    config.model_spec = model_registry(
        "8B", converters=[NVFP4LinearConverter.Config(fqns=["layers.0"])]
    )
    config.training.num_tokens_per_microbatch_per_dp_rank = 65536
    config.training.max_context_length = 2048
    config.compile = CompileConfig(enable=True)
    return config
"""
QWEN3_DUMP = """\
{
  "model_spec": {"name": "qwen3", "flavor": "8B"},
  "training": {"local_batch_size": 16, "global_batch_size": -1, "seq_len": 2048,
    "max_norm": 1.0, "dtype": "float32", "mixed_precision_param": "bfloat16",
    "mixed_precision_reduce": "float32", "enable_cpu_offload": false},
  "parallelism": {"data_parallel_replicate_degree": 1, "data_parallel_shard_degree": -1,
    "tensor_parallel_degree": 1, "pipeline_parallel_degree": 1, "context_parallel_degree": 1,
    "expert_parallel_degree": 1, "fsdp_reshard_after_forward": "default"},
  "activation_checkpoint": {"preserve_rng_state": true,
    "force_recompute_mm_shapes_by_fqns": ["moe.router.gate"]},
  "compile": {"enable": true, "components": ["model", "loss"]},
  "loss": {"num_chunks": 8},
  "metrics": {"log_freq": 10}
}
"""
MEGATRON_8B = _example("megatron.sh")
GPT3_15B = """\
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  --num-layers: 32
  --hidden-size: 6144
  --num-attention-heads: 48
  --group-query-attention: true
  --num-query-groups: 8
  --ffn-hidden-size: 24576
  --squared-relu: true
  --seq-length: 4096
  --micro-batch-size: 4
  --global-batch-size: 384
  --tensor-model-parallel-size: 8
  --sequence-parallel: true
  --use-distributed-optimizer: true
  --overlap-grad-reduce: true
  --overlap-param-gather: true
  --bf16: true
"""
MIXTRAL_8X7B = """\
MODEL_ARGS:
  --num-layers: 32
  --hidden-size: 4096
  --num-experts: 8
  --moe-router-topk: 2
  --seq-length: 4096
  --micro-batch-size: 1
  --global-batch-size: 256
  --tensor-model-parallel-size: 2
  --pipeline-model-parallel-size: 4
  --num-layers-per-virtual-pipeline-stage: 1
  --expert-model-parallel-size: 8
  --expert-tensor-parallel-size: 1
  --sequence-parallel: true
  --use-distributed-optimizer: true
  --moe-token-dispatcher-type: alltoall
  --bf16: true
"""
MIXTRAL_8X22B = """\
MODEL_ARGS:
  --num-layers: 56
  --hidden-size: 6144
  --ffn-hidden-size: 16384
  --num-experts: 8
  --seq-length: 4096
  --micro-batch-size: 1
  --global-batch-size: 256
  --tensor-model-parallel-size: 2
  --pipeline-model-parallel-size: 8
  --expert-model-parallel-size: 8
  --sequence-parallel: true
  --use-distributed-optimizer: true
  --bf16: true
"""
BRIDGE_70B_SFT = _example("megatron_bridge.yaml")
BRIDGE_GPT_OSS = """\
train:
  micro_batch_size: 1
  global_batch_size: 1280
model:
  seq_length: 4096
  pipeline_model_parallel_size: 4
  expert_model_parallel_size: 8
  recompute_granularity: selective
  recompute_modules: [layernorm, moe_act]
ddp: {use_distributed_optimizer: true}
mixed_precision: bf16_mixed
"""
ACCELERATE_FP8 = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
dynamo_config:
  dynamo_backend: INDUCTOR
  dynamo_use_regional_compilation: true
"""
ACCELERATE_HSDP = _example("accelerate.yaml")
ACCELERATE_CP = """\
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_activation_checkpointing: true # long sequences
parallelism_config:
  parallelism_config_cp_size: 8
  parallelism_config_cp_comm_strategy: alltoall
"""
DEEPSPEED_Z3 = _example("deepspeed.json")
DEEPSPEED_AUTOTP = """\
{
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto",
  "gradient_clipping": "auto",
  "zero_allow_untested_optimizer": true,
  "bf16": {"enabled": true},
  "zero_optimization": {"stage": 2, "overlap_comm": false, "contiguous_gradients": true},
  "tensor_parallel": {"autotp_size": 2}
}
"""
DEEPSPEED_AUTO = """\
{
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto",
  "bf16": {"enabled": "auto"},
  "zero_optimization": {"stage": 3}
}
"""
LLAMA_FACTORY_SFT = """\
model_name_or_path: Qwen/Qwen3-4B
stage: sft
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_config.json
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
bf16: true
"""
TRAINER_EXPERTS = """\
{
  "per_device_train_batch_size": 1,
  "max_length": 2048,
  "dtype": "bfloat16",
  "distributed_config": {"tp_size": 4, "ep_size": 4, "fsdp_size": 2},
  "learning_rate": 1e-5
}
"""
AXOLOTL_GPT_OSS = _example("axolotl.yaml")
TORCHTUNE_70B = _example("torchtune.yaml")
LLAMA_FACTORY_MEGATRON = _example("llama_factory.yaml")
