"""Rows of published measurements: readers on samples, and the committed rows."""

import json
from collections import Counter
from dataclasses import dataclass, replace

import pytest

from benchmarks.published import own_rows
from benchmarks.published.readers import (
    fms_fsdp,
    litgpt,
    llm_foundry,
    megatron_bridge,
    megatron_lm,
    torchtitan,
    vtrain,
)
from benchmarks.published.readers.bridge_recipes import recipe_settings
from benchmarks.published.readers.snapshot import tables
from benchmarks.published.row import problems, read, read_file, sources, step_seconds, write_file


@dataclass(eq=False)
class Pages:
    """A snapshot of pages that are given as texts; those at other commits are the same."""

    texts: dict
    commit: str = "c" * 40

    def read(self, path):
        return self.texts.get(path, "")

    def files(self, folder):
        return sorted(path for path in self.texts if path.startswith(folder))

    def at(self, commit):
        return replace(self, commit=commit)


@pytest.fixture(scope="module")
def committed():
    return read()


def table(**cells):
    """A Markdown table with one row."""
    lines = (cells, ["---"] * len(cells), cells.values())
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def test_tables_have_their_heading_and_line():
    text = "# A\nwords\n\n| a | b |\n|---|:-:|\n| 1 | x |\n\nother\n| c |\n| - |\n| 2 |\n"
    found = [(line.number, line.heading, line.cells) for line in tables(text)]
    assert found == [(6, "words", {"a": "1", "b": "x"}), (11, "other", {"c": "2"})]


def test_vtrain():
    header = (
        "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,"
        "tensor parallelism,data parallelism,pipeline parallelism,iteration time (ms)\n"
    )
    texts = dict.fromkeys(vtrain._FILES, header)
    texts[vtrain._FILES[0]] = "\ufeff" + header + "8,32,4,1024,16,24,1024,2,2,2,219.5\n"
    (row,) = vtrain.rows(Pages(texts))
    assert (row.tp, row.dp_replicate, row.pp, row.gpus, row.micro_batches) == (2, 2, 2, 8, 4)
    assert (row.step_seconds, row.schedule, row.line) == (0.2195, "1F1B", 2)
    assert list(problems(row)) == []


def test_llm_foundry():
    page = table(
        **{
            "Model": "7b",
            "SeqLen (T)": "2048",
            "# GPUs": "16",
            "GPU": "a100_40gb",
            "MicroBatchSize": "16",
            "GlobalBatchSize": "256",
            "Throughput (T/s)": "52428.8",
            "Precision": "bf16",
            "MP Mode": "PURE",
            "Sharding Strategy": "SHARD_GRAD_OP",
            "Activation Checkpointing": "True",
        }
    )
    (row,) = llm_foundry.rows(Pages({llm_foundry._PATH: page}))
    assert (row.step_seconds, row.dp_shard, row.reshard, row.reduce) == (10.0, 16, False, "bf16")
    assert (row.recompute, row.gpu, row.nodes) == ("full", "A100-40", 2)
    assert list(problems(row)) == []


def test_torchtitan_takes_degrees_from_the_cells():
    page = """**Table 2** words
| Parallelism | Sequence Length | TPS/GPU | Memory(GiB) |
| ----- | ----: | ----: | ----: |
| FSDP 4, CP 2 | 65536 | 2,048 | 84.2 |

| repo | commit |
| --- | --- |
| torch | x |
"""
    (row,) = torchtitan.rows(Pages({torchtitan._2024: page}))
    assert (row.dp_shard, row.cp, row.global_batch, row.memory_gib) == (4, 2, 4, 84.2)
    assert row.step_seconds == 4 * 65536 / 8 / 2048
    assert list(problems(row)) == []


def test_a_table_of_fms_fsdp_has_a_measurement_for_each_gpu():
    page = """
| Model Size | Sharding Strategy | Activation Checkpointing | Batch Size | {0}A100 80G|{0}H100 96 |
|---|---|---|---|---|---|
| 7b | HSDP | No AC | 2 | 4096 | 8192 |
| 13b | FSDP | Selective AC | 2 | 2,150 | 4,850 |
""".format("tokens/sec/GPU <br/> ")
    found = [row for row in fms_fsdp.rows(Pages({"README.md": page})) if row.commit == "c" * 40]
    assert [(row.gpu, row.step_seconds) for row in found[:2]] == [("A100-80", 2.0), ("H100", 1.0)]
    assert (found[0].dp_replicate, found[0].dp_shard) == (16, 8)
    assert [bool(row.excluded) for row in found] == [False, False, True, True]


def test_litgpt_runs_out_of_memory_and_infers():
    recipes = """
| Config | Max seq length | Micro batch size | Machine | Training runtime | Peak memory |
|---|---|---|---|---|---|
| llama-2-7b/full.yaml | 512 | 4 | 4xA10G | OOM | OOM |
| | | | | | |
| phi-2/lora.yaml | 512 | 4 | 1xA10G | 3.78 min | 13.98 GB |
"""
    resources = """## Single-GPU Inference

| Size | Model | Quantization | GPU | Max GPU RAM | Token/sec |
|---|---|---|---|---|---|
| 70 B | Llama 2 | None | 1 x A100 | OOM | - |
"""
    recipe = "lora_r: 8\n" + "".join(f"lora_{role}: true\n" for role in litgpt._ROLES)
    pages = {litgpt._RECIPES: recipes, litgpt._RESOURCES: resources}
    pages["config_hub/finetune/phi-2/lora.yaml"] = recipe
    full, lora, inference = litgpt.rows(Pages(pages))
    assert (full.verdict, full.gpus, full.zero, full.memory_gib) == ("out of memory", 4, 3, None)
    assert (lora.tuning, lora.norms) == ("lora all 8", "shared")
    assert lora.memory_gib == round(13.98e9 / 2**30, 3)
    assert inference.excluded == "inference"


def test_megatron_bridge_says_the_rest_in_its_recipes():
    columns = "| #-GPUs | Precision | GBS | MBS | Sequence Length | TP | PP | CP | VP | EP |"
    columns += " Tokens / sec / GPU |"
    page = f"""## 26.04 NeMo Container
### Pre-Training Performance
#### Model: LLAMA3_70B
| System {columns}
|---|---|---|---|---|---|---|---|---|---|---|---|
| DGX-GB200 | 64 | MXFP8 | 128 | 1 | 8192 | 4 | 8 | 1 | 5 | n/a | 4096[^1] |
| DGX-GB200 | 64 | MXFP8 | 128 | 1 | 8192 | 4 | 4 | 1 | 5 | n/a | 4096 |
#### Model: Qwen3_30B_a3B
| System {columns}
|---|---|---|---|---|---|---|---|---|---|---|---|
| DGX-H100 | 8 | BF16 | 64 | 1 | 4096 | 1 | 1 | 1 | n/a | 8 | 4096 |
#### Model: Nemotron_3_Nano
| System {columns}
|---|---|---|---|---|---|---|---|---|---|---|---|
| DGX-H100 | 64 | BF16 | 128 | 1 | 8192 | 1 | 8 | 1 | n/a | 8 | 4096 |
## 26.06 NeMo Container
### Pre-Training Performance
#### Model: Qwen3_30B_a3B
| System {columns}
|---|---|---|---|---|---|---|---|---|---|---|---|
| DGX-H100 | 8 | BF16 | 64 | 1 | 4096 | 1 | 1 | 1 | n/a | 8 | 4096 |
"""
    common = """
from megatron.bridge.perf_recipes.defaults import usual as plain

def shared(cfg, more="te"):
    if more:
        cfg.model.recompute_modules = ["all"]
    cfg.model.recompute_granularity = "selective"
    cfg.ddp.grad_reduce_in_fp32 = False
"""
    recipe = """
from megatron.bridge.perf_recipes.common import shared, plain

def llama3_70b_pretrain_64gpu_gb200_fp8mx_config():
    cfg = plain()
    cfg.model.pipeline_model_parallel_size = 8
    cfg.model.virtual_pipeline_model_parallel_size = 5
    cfg.model.recompute_modules = ["core_attn"]
    cfg.model.cpu_offloading, cfg.model.cpu_offloading_num_layers = unknown, 20
    cfg.model.cpu_offloading = True
    cfg.ddp.overlap_grad_reduce = True
    shared(cfg)
    return cfg

def qwen3_30b_a3b_pretrain_8gpu_h100_bf16_config():
    cfg = ConfigContainer()
    cfg.model.expert_model_parallel_size = 8
    cfg.model.cuda_graph_impl = "full_iteration"
    cfg.comm_overlap = CommOverlapConfig(overlap_moe_expert_parallel_comm=True)
    return cfg
"""
    usual = """
def usual():
    cfg = ConfigContainer()
    cfg.model.tensor_model_parallel_size = 4
    cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=True)
    return cfg
"""
    folder = "src/megatron/bridge/perf_recipes"
    files = {"common.py": common, "gb200.py": recipe, "defaults.py": usual, "data.cfg": "x"}
    texts = {f"{folder}/{name}": text for name, text in files.items()}
    pages = Pages({megatron_bridge._PAGES[0]: page, **texts})
    dense, other, mixture, excluded, later = megatron_bridge.rows(pages)
    assert (dense.dp_shard, dense.schedule, dense.gpus_per_node) == (2, "Interleaved1F1B", 4)
    assert (dense.step_seconds, dense.zero) == (128 * 8192 / 64 / 4096, 1)
    assert (dense.recompute, dense.async_tp, dense.reduce) == ("modules(*attn*)", True, "bf16")
    assert (dense.offloaded, dense.has_known_memory) == (0, True)
    assert (other.recompute, other.has_known_memory) == ("unstated", False)
    assert (mixture.experts, mixture.chosen, mixture.ep, mixture.balanced) == (128, 8, 8, True)
    assert [problem for row in (dense, other, mixture) for problem in problems(row)] == []
    assert excluded.excluded
    assert (dense.overlapped, other.overlapped) == (True, False), "another recipe may have run"
    assert (mixture.replayed, later.replayed) == (False, True), "recipes of 26.04 had no graphs"
    assert (mixture.ep_overlap, later.ep_overlap) == (False, True)
    settings = recipe_settings(pages, "LLAMA3_70B", "GB200", 64, "fp8-mx")
    assert settings["model.recompute_modules"] == ["core_attn"]
    assert settings["comm_overlap.tp_comm_overlap"] is True


_FLAGS = """MODEL_ARGS:
  --num-layers: 12
  --hidden-size: 512
  --num-attention-heads: 8
  --seq-length: 1024
  --micro-batch-size: 4
  --global-batch-size: 32
  --tensor-model-parallel-size: 2
  --pipeline-model-parallel-size: {pp}
  --transformer-impl: transformer_engine
  --bf16: true
"""
_VALUES = """{
  "iteration-time": {"values": {"1": "nan", "2": 9.5, "3": 0.25, "4": 0.25}},
  "mem-max-allocated-bytes": {"values": {"1": 1073741824.0, "2": 2147483648.0}}
}"""


def megatron_lm_rows(flags, name="golden_values_dev_dgx_h100.json"):
    folder = f"{megatron_lm._FOLDER}/some_test"
    pages = Pages({f"{folder}/model_config.yaml": flags, f"{folder}/{name}": _VALUES})
    return list(megatron_lm.rows(pages))


def test_megatron_lm_takes_the_median_time_and_the_highest_peak():
    (row,) = megatron_lm_rows(_FLAGS.format(pp=1))
    assert (row.step_seconds, row.memory_gib, row.memory_kind) == (0.25, 2.0, "allocated")
    assert (row.tp, row.dp_replicate, row.micro_batches, row.vocab) == (2, 4, 2, 50432)
    assert list(problems(row)) == []
    (staged,) = megatron_lm_rows(_FLAGS.format(pp=2))
    assert (staged.schedule, staged.memory_gib) == ("1F1B", None)
    assert list(problems(staged)) == []


def test_megatron_lm_excludes_flags_without_a_column():
    (row,) = megatron_lm_rows(_FLAGS.format(pp=1) + "  --swiglu: true\n")
    assert row.excluded == "no column for the flag swiglu"
    (row,) = megatron_lm_rows(_FLAGS.format(pp=1), "golden_values_lts.json")
    assert row.excluded == "the GPU is not stated"


def test_own_rows_name_their_lines():
    def run(seconds, gib):
        return {"seconds": seconds, "allocated_bytes": gib * 2**30}

    first, second = list(own_rows._SHAPES)[1:3]
    result = {
        first: {"module": run(1.0, 9.0), "program": run(1.5, 10.0)},
        second: {"module": run(2.0, 20.0)},
    }
    text = json.dumps({"commit": "c" * 40, "checks": {"predicted": {"result": result}}}, indent=1)
    found = list(own_rows.own_rows(text))
    assert [problem for row in found for problem in problems(row)] == []
    assert [row.step_seconds for row in found] == [1.0, 1.5, 2.0]
    assert [row.memory_gib for row in found] == [9.0, 10.0, 20.0]
    lines = text.splitlines()
    assert all(f'"{row.note}"' in lines[row.line - 1] for row in found)


def test_times_of_steps_by_what_is_published():
    assert step_seconds("milliseconds", 250.0, 1, 1) == 0.25
    assert step_seconds("tokens/s", 500.0, 1000, 8) == 2.0
    assert step_seconds("minutes/run", 500.0, 1000, 8) is None


def test_contradictions_are_found(committed):
    row = committed[0]
    assert list(problems(row)) == []
    for change, found in (
        ({"gpus": row.gpus * 2}, "degrees multiply"),
        ({"step_seconds": 2 * (row.step_seconds or 1.0), "metric": "seconds"}, "published figure"),
        ({"memory_kind": "allocated"}, "a figure of memory needs its kind"),
        ({"micro_batch": row.global_batch + 1}, "no whole micro-batches"),
        ({"recompute": "some"}, "recomputation 'some' is not known"),
        ({"layers": 0}, "a size of the model"),
    ):
        broken = replace(row, excluded="", published=row.published or 1.0, **change)
        assert any(found in problem for problem in problems(broken)), change


def test_committed_rows_are_consistent_and_enough(committed):
    assert [f"{row.key}: {problem}" for row in committed for problem in problems(row)] == []
    assert {row.source for row in committed} == set(sources())
    assert Counter(row.key for row in committed).most_common(1)[0][1] == 1
    used = [row for row in committed if not row.excluded]
    assert sum(row.step_seconds is not None for row in used) >= 2000
    assert sum(row.memory_gib is not None or row.verdict != "ran" for row in used) >= 150
    assert all(len(row.commit) == 40 for row in committed)


def test_rows_are_read_as_they_are_written(tmp_path, committed):
    some = committed[:5] + committed[-5:]
    write_file(some, tmp_path / "rows.csv")
    assert read_file(tmp_path / "rows.csv") == some
