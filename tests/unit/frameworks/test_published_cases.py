"""Configs of published measurements, read field by field."""

from dataclasses import fields

import pytest

from shardwright.frameworks.canonical import canonical
from shardwright.frameworks.reading import read_file, read_text
from shardwright.ir.strategy.strategy import Strategy
from tests.harness import published_configs as published

SAC = "ac=ops(mm/2,attention,topk,reduce_scatter,all_to_all,max)"
FSDP_BF16 = "param=bfloat16 reduce=bfloat16 grad=float32 state=float32"
DEEPSPEED_BF16 = "param=bfloat16 reduce=bfloat16 grad=bfloat16 state=float32"
MEGATRON_FP8 = (
    "param=bfloat16 reduce=bfloat16 grad=bfloat16 state=float32 fp8=delayed fp8_gather=on"
)
AO_GATHER = "fp8=tensorwise fp8_gather=on"
EAGER = published.TORCHTITAN_8B
COMPILED = EAGER + published.COMPILED
FLOAT8 = EAGER.replace('"8B"', '"8B"\nconverters = ["float8"]') + published.FLOAT8
FLOAT8 += published.COMPILED
LONG = FLOAT8.replace('"selective"', '"full"').replace(
    "local_batch_size = 2", "local_batch_size = 1"
)
TP8 = COMPILED.replace("tensor_parallel_degree = 1", "tensor_parallel_degree = 8").replace(
    "local_batch_size = 2", "local_batch_size = 12"
)
ROWWISE = published.TORCHTITAN_70B + '[quantize.linear.float8]\nrecipe_name = "rowwise"\n'
BF16_70B = published.TORCHTITAN_70B.replace('converters = ["float8"]\n', "")
LOOPED = published.TORCHTITAN_405B.replace('"1F1B"', '"Interleaved1F1B"')
MXFP8 = published.NVFP4.replace("NVFP4Linear", "MXFP8Linear")
BRIDGE_70B = (
    published.BRIDGE_70B_SFT.replace(
        "model_parallel_size: 4\n  virtual", "model_parallel_size: 8\n  virtual"
    )
    .replace("seq_length: 4096", "seq_length: 8192")
    .replace("global_batch_size: 32", "global_batch_size: 256")
)
BRIDGE_235B = (
    published.BRIDGE_70B_SFT.replace(
        "tensor_model_parallel_size: 4", "tensor_model_parallel_size: 2"
    )
    .replace("model_parallel_size: 4\n  virtual", "model_parallel_size: 8\n  virtual")
    .replace("virtual_pipeline_model_parallel_size: 5", "virtual_pipeline_model_parallel_size: 4")
    .replace("global_batch_size: 32", "global_batch_size: 8192")
    .replace("ddp:", "  expert_model_parallel_size: 32\n  expert_tensor_parallel_size: 1\nddp:")
)
AO = published.ACCELERATE_FP8.replace("bf16", "fp8") + "fp8_config:\n  backend: AO\n"


def long(cp):
    """32k tokens for each rank of context parallelism."""
    return LONG.replace(
        "tensor_parallel_degree", f"context_parallel_degree = {cp}\ntensor_parallel_degree"
    ).replace("seq_len = 8192", f"seq_len = {32768 * cp}")


def experts(tp, fsdp):
    """Expert and tensor parallelism over the same ranks."""
    return published.TRAINER_EXPERTS.replace(
        '"tp_size": 4, "ep_size": 4, "fsdp_size": 2',
        f'"tp_size": {tp}, "ep_size": {tp}, "fsdp_size": {fsdp}',
    )


# Name, text, devices; strategy; samples of a step, of a micro-batch, tokens of a sequence.
CASES = [
    ("titan 8B eager", EAGER, 8, f"dp_shard=8 {SAC} bf16", (16, 2, 8192)),
    (
        "titan 8B compiled",
        COMPILED,
        128,
        f"dp_shard=128 {SAC} bf16 compile=regional",
        (256, 2, 8192),
    ),
    (
        *("titan 8B float8", FLOAT8, 8),
        *(f"dp_shard=8 {SAC} bf16 compile=regional {AO_GATHER}", (16, 2, 8192)),
    ),
    *(
        (
            *(f"titan 8B cp {cp}", long(cp), 8),
            f"dp_shard={8 // cp} cp={cp} cp_style=all-gather ac=full bf16 compile=regional"
            " fp8=tensorwise" + (" fp8_gather=on" if cp < 8 else ""),
            (8 // cp, 1, 32768 * cp),
        )
        for cp in (1, 2, 4, 8)
    ),
    (
        *("titan 70B float8", published.TORCHTITAN_70B, 256),
        *(
            "dp_shard=32 tp=8 async_tp=on ac=full bf16 compile=regional fp8=tensorwise",
            (512, 16, 8192),
        ),
    ),
    (
        *("titan 70B rowwise", ROWWISE, 256),
        *(
            "dp_shard=32 tp=8 async_tp=on ac=full bf16 compile=regional fp8=rowwise",
            (512, 16, 8192),
        ),
    ),
    (
        *("titan 70B bf16", BF16_70B, 256),
        *("dp_shard=32 tp=8 async_tp=on ac=full bf16 compile=regional", (512, 16, 8192)),
    ),
    (
        *("titan 405B", published.TORCHTITAN_405B, 512),
        "dp_shard=8 tp=8 pp=8 mb=32 async_tp=on ac=full bf16 compile=regional"
        " fp8=tensorwise sync=last",
        (256, 1, 8192),
    ),
    (
        *("titan 405B looped", LOOPED, 512),
        "dp_shard=8 tp=8 pp=8:Interleaved1F1B/v2 mb=32 async_tp=on ac=full bf16 compile=regional"
        " fp8=tensorwise sync=last",
        (256, 1, 8192),
    ),
    ("titan 8B tp", TP8, 64, f"dp_shard=8 tp=8 {SAC} bf16 compile=regional", (96, 12, 8192)),
    (
        *("titan 8B H200", FLOAT8, 32),
        *(f"dp_shard=32 {SAC} bf16 compile=regional {AO_GATHER}", (64, 2, 8192)),
    ),
    (
        *("titan 8B nvfp4", published.NVFP4, 4),
        *(f"dp_shard=4 {SAC} bf16 compile=regional loss=chunked(8)", (128, 32, 2048)),
    ),
    (
        *("titan 8B mxfp8", MXFP8, 4),
        *(f"dp_shard=4 {SAC} bf16 compile=regional loss=chunked(8) fp8=mxfp8", (128, 32, 2048)),
    ),
    (
        *("titan qwen3 8B", published.QWEN3_DUMP, 4),
        *(f"dp_shard=4 {SAC} bf16 compile=regional loss=chunked(8)", (64, 16, 2048)),
    ),
    (
        *("megatron 8B fp8", published.MEGATRON_8B, None),
        *(f"dp_shard=8 zero=1 mb=16 {MEGATRON_FP8} loss=vocabulary-parallel-fused", (128, 1, 8192)),
    ),
    (
        *("megatron 15B", published.GPT3_15B, 256),
        *("dp_shard=32 zero=1 tp=8 mb=3 bf16", (384, 4, 4096)),
    ),
    (
        *("megatron 8x7B", published.MIXTRAL_8X7B, 64),
        "dp_shard=8 zero=1 tp=2 pp=4:Interleaved1F1B/v8 ep=8 etp=1 mb=32 bf16",
        (256, 1, 4096),
    ),
    (
        *("megatron 8x22B", published.MIXTRAL_8X22B, 128),
        *("dp_shard=8 zero=1 tp=2 pp=8 ep=8 etp=2 mb=32 bf16", (256, 1, 4096)),
    ),
    (
        *("bridge 70B sft", published.BRIDGE_70B_SFT, 32),
        "dp_shard=2 zero=1 tp=4 pp=4:Interleaved1F1B/v5 mb=16 bf16 fp8=tensorwise fp8_gather=on",
        (32, 1, 4096),
    ),
    (
        *("bridge 70B", BRIDGE_70B, 64),
        "dp_shard=2 zero=1 tp=4 pp=8:Interleaved1F1B/v5 mb=128 bf16 fp8=tensorwise fp8_gather=on",
        (256, 1, 8192),
    ),
    (
        *("bridge gpt-oss 120B", published.BRIDGE_GPT_OSS, 64),
        "dp_shard=16 zero=1 pp=4 ep=8 mb=80 ac=modules(moe_act,layernorm) bf16",
        (1280, 1, 4096),
    ),
    (
        *("bridge qwen3 235B", BRIDGE_235B, 256),
        "dp_shard=16 zero=1 tp=2 pp=8:Interleaved1F1B/v4 ep=32 etp=1 mb=512 bf16"
        " fp8=tensorwise fp8_gather=on",
        (8192, 1, 4096),
    ),
    (
        *("accelerate fsdp2", published.ACCELERATE_FP8, None),
        *(f"dp_shard=8 {FSDP_BF16} compile=regional loss=whole", (None, None, None)),
    ),
    (
        *("accelerate fp8", AO, None),
        *(f"dp_shard=8 {FSDP_BF16} compile=regional fp8=tensorwise loss=whole", (None, None, None)),
    ),
    (
        *("accelerate tp x hsdp", published.ACCELERATE_HSDP, None),
        *(f"dp_replicate=2 dp_shard=2 tp=2 sp=off {FSDP_BF16} loss=whole", (None, None, None)),
    ),
    (
        *("accelerate cp", published.ACCELERATE_CP, None),
        *(f"cp=8 ac=children {FSDP_BF16} loss=whole", (None, None, None)),
    ),
    (
        "deepspeed z3",
        published.DEEPSPEED_Z3,
        8,
        f"dp_shard=8 {DEEPSPEED_BF16} loss=whole",
        (8, 1, None),
    ),
    (
        *("deepspeed autotp", published.DEEPSPEED_AUTOTP, 8),
        *(f"dp_shard=4 zero=2 tp=2 sp=off {DEEPSPEED_BF16} loss=whole", (None, None, None)),
    ),
    *(
        (
            *(f"trainer experts {tp}x{fsdp}", experts(tp, fsdp), 8),
            *(f"dp_shard={fsdp} tp={tp} ep={tp} sp=off pure-bf16 loss=whole", (fsdp, 1, 2048)),
        )
        for tp, fsdp in ((8, 1), (4, 2), (2, 4))
    ),
    (
        *("axolotl gpt-oss 20B", published.AXOLOTL_GPT_OSS, 8),
        f"dp_shard=8 mb=2 ac=full offload=activations {FSDP_BF16} loss=fused sync=last",
        (16, 1, 4096),
    ),
    (
        *("torchtune 70B", published.TORCHTUNE_70B, 8),
        "dp_shard=8 ac=full offload=optimizer,parameters pure-bf16 compile=regional"
        " loss=chunked(8)",
        (16, 2, 2048),
    ),
    (
        *("llama-factory megatron", published.LLAMA_FACTORY_MEGATRON, 8),
        *("dp_shard=2 zero=1 pp=4 ep=2 mb=8 ac=full bf16", (16, 1, 4096)),
    ),
]


@pytest.mark.parametrize(
    "text, devices, strategy, batch", [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_a_published_config_is_read_field_by_field(text, devices, strategy, batch):
    config = read_text(text, devices=devices)
    read, wanted = canonical(config.strategy), canonical(Strategy.parse(strategy))
    differing = {
        one.name: (getattr(read, one.name), getattr(wanted, one.name))
        for one in fields(Strategy)
        if getattr(read, one.name) != getattr(wanted, one.name)
    }
    assert differing == {}
    assert (config.batch.samples, config.batch.micro, config.batch.sequence) == batch


def test_llama_factory_reads_the_deepspeed_file_that_it_names(tmp_path):
    inner = tmp_path / "examples" / "deepspeed" / "ds_z3_config.json"
    inner.parent.mkdir(parents=True)
    inner.write_text(published.DEEPSPEED_AUTO)
    config = tmp_path / "examples" / "train_full" / "qwen3_full_sft.yaml"
    config.parent.mkdir()
    config.write_text(published.LLAMA_FACTORY_SFT)
    read = read_file(config, devices=8)
    wanted = Strategy.parse(f"dp_shard=8 mb=2 ac=full {DEEPSPEED_BF16} loss=whole")
    assert canonical(read.strategy) == canonical(wanted)
    assert (read.batch.samples, read.batch.sequence) == (16, 2048)
    assert any(key.name == "ds_z3_config.json: zero_optimization.stage" for key in read.used)
