"""Words and defaults in which frameworks differ: each is read as its framework means it."""

import pytest

from shardwright.frameworks.canonical import canonical
from shardwright.frameworks.config import Batch
from shardwright.frameworks.reading import read_text
from shardwright.frameworks.semantics import changed_numbers
from shardwright.frameworks.writers.nearest import ConfigFacts
from shardwright.frameworks.writing import write_config
from shardwright.ir.strategy.recompute import Recompute
from shardwright.ir.strategy.strategy import Strategy

TITAN = """
[training]
local_batch_size = 2
seq_len = 4096
[parallelism]
data_parallel_shard_degree = 2
"""
TOKENS = """
def config():
    config = llama3_8b()
    config.training.num_tokens_per_microbatch_per_dp_rank = 8192
    config.training.max_context_length = 4096
    config.training.num_tokens_per_train_step = 32768
    config.parallelism.data_parallel_shard_degree = 2
    return config
"""
MEGATRON = (
    "--tensor-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 8 --seq-length 4096"
)
ACCELERATE = """
distributed_type: FSDP
num_processes: 4
mixed_precision: bf16
fsdp_config:
  fsdp_version: 2
"""
TRAINER = '{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "bf16": true}'
FSDP_TRAINER = TRAINER.replace(
    "}", ', "fsdp": true, "fsdp_config": {"activation_checkpointing": true}}'
)
DEEPSPEED = (
    '{"zero_optimization": {"stage": STAGE}, "bf16": {"enabled": true},'
    ' "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}'
)


def stage(number):
    return read_text(DEEPSPEED.replace("STAGE", str(number)), devices=4)


def test_1_global_batches_are_sequences_or_tokens_and_only_data_ranks_multiply_them():
    plain = read_text(TITAN)
    assert (plain.batch.samples, plain.batch.tokens) == (4, 16384)
    tokens = read_text(TOKENS)
    assert (tokens.batch.samples, tokens.batch.tokens) == (8, 32768)
    assert tokens.strategy.micro_batches == 2
    wider = (
        TITAN
        + "tensor_parallel_degree = 2\ncontext_parallel_degree = 2\nexpert_parallel_degree = 4\n"
    )
    assert read_text(wider).batch.samples == 4
    assert read_text(MEGATRON, devices=8).strategy.micro_batches == 1
    long = '{"zero_optimization": {"stage": 1}, "sequence_parallel_size": 2, "train_batch_size": 8}'
    assert read_text(long, devices=8).batch.micro == 2  # 4 data-parallel ranks, not 8


def test_2_selective_means_operators_every_second_layer_or_core_attention():
    def read(lines):
        return read_text(f"{TITAN}[activation_checkpoint]\n{lines}").strategy.recompute

    assert read("") == Recompute("every", 2)
    assert read('mode = "selective"\nselective_ac_option = "3"') == Recompute("every", 3)
    assert read('selective_ac_option = "op"').kind == "ops"
    assert read_text(TOKENS).strategy.recompute.kind == "ops"
    flags = read_text(f"{MEGATRON} --recompute-granularity selective", devices=8)
    assert flags.strategy.recompute == Recompute("modules", names=("core_attn",))


def test_3_fsdp2_of_accelerate_wraps_children_and_the_trainer_wraps_layers():
    on = ACCELERATE + "  fsdp_activation_checkpointing: true\n"
    assert read_text(on).strategy.recompute == Recompute("children")
    assert read_text(on.replace("version: 2", "version: 1")).strategy.recompute == Recompute("full")
    assert read_text(FSDP_TRAINER, devices=4).strategy.recompute == Recompute("children")
    layers = TRAINER.replace("}", ', "gradient_checkpointing": true}')
    assert read_text(layers, devices=4).strategy.recompute == Recompute("full")


def test_4_full_recomputation_of_megatron_needs_a_method_and_a_number():
    def read(flags):
        full = f"{MEGATRON} --recompute-granularity full {flags}"
        return read_text(full, devices=8).strategy.recompute

    assert read("--recompute-method uniform --recompute-num-layers 1") == Recompute("full")
    assert read("--recompute-method uniform --recompute-num-layers 4") == Recompute("groups", 4)
    assert read("--recompute-method block --recompute-num-layers 3") == Recompute("first", 3)
    with pytest.raises(
        ValueError, match="line 1, recompute-granularity = 'full': recompute-method"
    ):
        read("")


def test_5_bytes_of_a_parameter_follow_from_stage_and_dtypes():
    assert read_text(MEGATRON, devices=8).strategy.dp_replicate == 4  # all on every rank
    sharded = read_text(f"{MEGATRON} --use-distributed-optimizer", devices=8).strategy
    assert (sharded.dp_shard, sharded.zero, sharded.grad_dtype) == (4, 1, "float32")
    assert stage(1).strategy.grad_dtype == "bfloat16"
    titan = read_text(TITAN).strategy
    assert (titan.zero, titan.state_dtype, titan.grad_dtype) == (3, "float32", "float32")
    narrow = read_text(TITAN.replace("seq_len", 'dtype = "bfloat16"\nseq_len')).strategy
    assert (narrow.state_dtype, narrow.grad_dtype) == ("bfloat16", "bfloat16")


def test_6_gradients_are_reduced_after_every_or_after_the_last_micro_batch():
    def sync(config):
        return config.semantics.gradient_sync

    assert sync(read_text(TITAN)) == "every"
    pipeline = TITAN + "pipeline_parallel_degree = 2\n"
    assert sync(read_text(pipeline)) == "last"
    assert not read_text(pipeline).strategy.reshards  # "default" keeps parameters gathered
    assert sync(read_text(ACCELERATE)) == "last"
    assert sync(read_text(FSDP_TRAINER, devices=4)) == "last"
    assert [sync(stage(n)) for n in range(4)] == ["last", "last", "every", "every"]
    assert sync(read_text(f"{MEGATRON} --use-distributed-optimizer", devices=8)) == "last"
    for strategy, when in (("optim", "last"), ("optim_grads", "every")):
        flags = f"--use-megatron-fsdp --data-parallel-sharding-strategy {strategy}"
        assert sync(read_text(f"{MEGATRON} {flags}", devices=8)) == when


def test_7_gradients_are_reduced_in_float32_or_in_the_dtype_of_parameters():
    assert read_text(TITAN).strategy.reduce_dtype == "float32"
    assert read_text(f"{MEGATRON} --bf16", devices=8).strategy.reduce_dtype == "float32"
    narrow = read_text(f"{MEGATRON} --bf16 --grad-reduce-in-bf16", devices=8).strategy
    assert narrow.reduce_dtype == "bfloat16"
    assert read_text(ACCELERATE).strategy.reduce_dtype == "bfloat16"
    assert read_text(FSDP_TRAINER, devices=4).strategy.reduce_dtype == "bfloat16"
    assert read_text(TRAINER, devices=4).strategy.reduce_dtype == "float32"  # DDP with autocast
    assert stage(2).strategy.reduce_dtype == "bfloat16"


def test_8_losses_are_means_over_the_step_or_over_micro_batches():
    def mean(config):
        return config.semantics.loss_mean

    assert mean(read_text(TITAN)) == "tokens of the step"
    assert mean(read_text(TRAINER, devices=4)) == "tokens of the step"
    assert mean(read_text(MEGATRON, devices=8)) == "micro-batches"
    per_token = read_text(f"{MEGATRON} --calculate-per-token-loss", devices=8)
    assert mean(per_token) == "tokens of the step"
    assert mean(stage(2)) == "micro-batches"
    assert mean(read_text(ACCELERATE)) == "what the training script says"


def test_9_sequence_parallel_is_norms_within_tp_or_ulysses_or_a_ring():
    norms = read_text(f"{MEGATRON} --sequence-parallel", devices=8).strategy
    assert (norms.cp, norms.sequence_parallel) == (1, True)
    ulysses = read_text(
        '{"zero_optimization": {"stage": 2}, "sequence_parallel_size": 4}', devices=8
    ).strategy
    assert (ulysses.cp, ulysses.cp_style) == (4, "ulysses")
    split = ACCELERATE + "parallelism_config:\n  parallelism_config_sp_size: 4\n"
    assert read_text(split).strategy.cp_style == "ulysses"
    ring = read_text("base_model: m\nsequence_parallel_degree: 4\n", devices=4).strategy
    assert (ring.cp, ring.cp_style) == (4, "ring-zigzag")
    alone = read_text("--tensor-model-parallel-size 1 --sequence-parallel", devices=8).strategy
    assert canonical(alone) == canonical(alone.but(sequence_parallel=False))


def test_10_written_configs_of_torchtitan_construct():
    facts = ConfigFacts(batch=Batch(samples=64, sequence=4096), model="llama3 8B", layers=32)
    graphs = "config.training.disable_cuda_graphs = True"
    for text, written in (
        ("dp_shard=4 pp=2 mb=4", True),
        ("dp_shard=4 ep=2", True),
        ("dp_shard=4", False),
    ):
        said = write_config("torchtitan", Strategy.parse(text), facts).text
        assert (graphs in said) == written
    float8 = write_config("torchtitan", Strategy.parse("dp_shard=4 bf16 fp8=tensorwise"), facts)
    assert float8.strategy.fp8 == "rowwise"
    assert float8.reasons == ("float8 is rowwise or mxfp8",)
    odd = ConfigFacts(batch=Batch(samples=64, sequence=4097), model="llama3 8B", layers=32)
    chunked = write_config("torchtitan", Strategy.parse("dp_shard=64 bf16 loss=chunked(8)"), odd)
    assert chunked.strategy.loss == "vocabulary-parallel"
    assert any("4097 tokens" in reason for reason in chunked.reasons)


def test_11_the_flags_count_and_not_the_name_of_a_file():
    text = "MODEL_ARGS:\n  --tensor-model-parallel-size: 2\n  --expert-model-parallel-size: 8\n"
    config = read_text(text, name="mixtral_tp1pp4ep8.yaml", devices=16)
    assert (config.strategy.tp, config.strategy.pp, config.strategy.ep) == (2, 1, 8)


def test_12_always_and_never_reshard_differ_from_the_default():
    def read(word):
        return read_text(f'{TITAN}fsdp_reshard_after_forward = "{word}"\n').strategy

    assert [read(word).reshards for word in ("default", "always", "never")] == [True, True, False]
    pipelined = f"{TITAN}pipeline_parallel_degree = 2\nfsdp_reshard_after_forward = "
    assert read_text(f'{pipelined}"always"\n').strategy.reshards
    assert not read_text(f'{pipelined}"default"\n').strategy.reshards
    notes = read_text(f'{TITAN}fsdp_reshard_after_forward = "default"\n').notes
    assert any("norm and lm_head" in note for note in notes)
    always = read_text(f'{TITAN}fsdp_reshard_after_forward = "always"\n').notes
    assert not any("norm and lm_head" in note for note in always)


def test_megatron_bridge_takes_dtypes_of_gradients_from_its_mixed_precision():
    """Its classes replace what `ddp` says, and share the switch of the sharded optimizer."""
    below = "model: {tensor_model_parallel_size: 1}\nddp: {grad_reduce_in_fp32: false}\n"
    plain = read_text(below, framework="megatron-bridge", devices=8)
    assert plain.strategy.grad_dtype == "float32"
    assert any("ddp.grad_reduce_in_fp32 has no effect" in note for note in plain.notes)
    half = read_text(
        f"{below}mixed_precision: fp16_mixed\n", framework="megatron-bridge", devices=8
    )
    assert half.strategy.grad_dtype == half.strategy.reduce_dtype == "float16"
    narrow = "model: {}\nmixed_precision: {bf16: true, grad_reduce_in_fp32: false}\n"
    assert (
        read_text(narrow, framework="megatron-bridge", devices=8).strategy.grad_dtype == "bfloat16"
    )
    sharded = f"{below}optimizer: {{use_distributed_optimizer: true}}\n"
    assert read_text(sharded, framework="megatron-bridge", devices=8).strategy.zero == 1


def test_6_gradients_of_whole_parameters_are_reduced_once_unless_told():
    """The program of such a strategy does so; torchtitan reduces after every micro-batch."""
    plain = Strategy.parse("dp_replicate=8 mb=4 bf16")
    assert not plain.syncs_every and Strategy.parse("dp_shard=8 mb=4 bf16").syncs_every
    facts = ConfigFacts(batch=Batch(samples=64, sequence=128))
    written = write_config("torchtitan-toml", plain, facts)
    assert written.strategy.gradient_sync == "every"
    said = changed_numbers(plain, written.strategy)
    assert said == ["gradients are reduced after every micro-batch, not after the last micro-batch"]
    assert any("after every one" in reason for reason in written.reasons)


def test_parameters_alone_on_the_host_are_read_with_their_state():
    zero = '"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}%s}'
    text = '{"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}, ' + zero + "}"
    alone = read_text(text % "", devices=4)
    both = read_text(text % ', "offload_optimizer": {"device": "cpu"}', devices=4)
    assert alone.strategy.offload == ("parameters",)
    assert both.strategy.offload == ("optimizer", "parameters")
    said = [line for line in alone.differences if "the host updates its parameters" in line]
    assert len(said) == 1 and "offload_param" in said[0]
    assert not any("the host updates" in line for line in both.differences)
