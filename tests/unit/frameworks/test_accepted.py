"""Written configs are accepted by the frameworks' own parsers that are installed."""

import json
import os
import subprocess
import sys
import warnings
from collections import defaultdict
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.parallelism_config import ParallelismConfig
from hypothesis import Phase, given, seed, settings
from transformers import HfArgumentParser, TrainingArguments

from shardwright.frameworks.config import Batch
from shardwright.frameworks.writers.nearest import ConfigFacts
from shardwright.frameworks.writing import write_config
from shardwright.ir.strategy.strategy import Strategy
from tests.harness.strategies import training_strategies

FACTS = ConfigFacts(
    batch=Batch(samples=2**10 * 3**6, sequence=2**9 * 9), model="llama3 8B", layers=32, clip=0.5
)
INSTALLED = Path(__file__).parents[3] / "build" / "frameworks"
# Frameworks that are installed apart, and the folders of each: versions of one exclude others.
APART = {
    "torchtitan-0.3": ("latest",),
    "deepspeed": ("latest",),
    "megatron": ("latest",),
    "megatron-bridge": ("latest",),
    "torchtitan-toml": ("toml", "latest"),
}


@settings(max_examples=40)
@given(wanted=training_strategies())
def test_accelerate_reads_its_yaml_and_builds_the_mesh(tmp_path_factory, wanted):
    written = write_config("accelerate", wanted, FACTS)
    file = tmp_path_factory.mktemp("accelerate") / "config.yaml"
    file.write_text(written.text)
    config = load_config_from_file(str(file))
    assert isinstance(config, ClusterConfig)
    assert config.num_processes == written.strategy.devices
    sizes = {
        key.removeprefix("parallelism_config_"): value
        for key, value in config.parallelism_config.items()
        if key.endswith("_size")
    }
    mesh = ParallelismConfig(**sizes)
    assert mesh.total_size == (written.strategy.devices if sizes else 1)


@settings(max_examples=25)
@given(wanted=training_strategies())
def test_transformers_reads_its_arguments(wanted):
    written = write_config("trainer", wanted, FACTS)
    content = json.loads(written.text)
    content.pop("tf32", None)  # is refused on hosts without a GPU that has it
    parser = HfArgumentParser(TrainingArguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (arguments,) = parser.parse_dict({**content, "output_dir": "out", "use_cpu": True})
    assert arguments.gradient_accumulation_steps == written.strategy.micro_batches
    assert bool(arguments.fsdp) == (written.strategy.dp_shard > 1)
    if arguments.fsdp:
        plugin = arguments.fsdp_plugin_args
        assert plugin["reshard_after_forward"] == written.strategy.reshards


def test_yaml_that_is_written_is_plain():
    wanted = Strategy.parse("dp_shard=4 zero=1 tp=2 bf16 sync=last")
    text = write_config("megatron-bridge", wanted, FACTS).text
    assert yaml.safe_load(text)["model"]["tensor_model_parallel_size"] == 2


@pytest.fixture(scope="module")
def understood():
    """What each framework that is installed apart understood of files of random strategies."""
    if not (INSTALLED / ".ready").exists() and "CI" not in os.environ:
        pytest.skip("the other frameworks are not installed: run `make build/frameworks/.ready`")
    written = defaultdict(list)

    @seed(29)
    @settings(max_examples=30, database=None, phases=[Phase.generate], deadline=None)
    @given(wanted=training_strategies())
    def write(wanted):
        for framework, folders in APART.items():
            # Products in fp8 need torchao, which is installed apart.
            wanted = wanted.but(fp8=None) if framework == "torchtitan-0.3" else wanted
            file = write_config(framework, wanted, FACTS)
            written[folders].append((framework, file))

    write()
    found = defaultdict(list)
    for folders, files in written.items():
        cases = [
            {"framework": name, "text": file.text, "devices": file.strategy.devices}
            for name, file in files
        ]
        ran = subprocess.run(
            [
                *(sys.executable, "-m", "tests.harness.framework_parsers"),
                *(str(INSTALLED / folder) for folder in folders),
            ],
            input=json.dumps(cases),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ran.returncode == 0, ran.stderr[-3000:]
        for (name, file), facts in zip(files, json.loads(ran.stdout), strict=True):
            found[name].append((file, facts))
    return found


def said(strategy):
    """A strategy under the names that `framework_parsers` gives to what it found."""
    data = strategy.dp_replicate * strategy.dp_shard
    shards = strategy.dp_shard * strategy.cp > 1
    return {
        "dp_replicate": strategy.dp_replicate,
        "dp_shard": strategy.dp_shard,
        "data": data,
        "cp": strategy.cp,
        "tp": strategy.tp,
        "pp": strategy.pp,
        "ep": strategy.ep,
        "etp": strategy.expert_tensor,
        "zero": strategy.zero if shards else 0,
        "sequence_parallel": strategy.sequence_parallel and strategy.tp > 1,
        "schedule": strategy.schedule if strategy.pp > 1 else None,
        "virtual_stages": strategy.virtual_stages,
        "micro_batches": strategy.micro_batches,
        "micro": FACTS.batch.samples // (data * strategy.micro_batches),
        "samples": FACTS.batch.samples,
        "sequence": FACTS.batch.sequence,
        "clip": FACTS.clip,
        "param_dtype": strategy.param_dtype,
        "grad_dtype": strategy.grad_dtype,
        "state_dtype": strategy.state_dtype,
        "fp8": strategy.fp8,
        "fp8_gather": strategy.fp8_gather,
        "async_tp": strategy.async_tp,
        "ep_overlap": strategy.ep_overlap,
        "offload": list(strategy.offload),
        "regional": strategy.compile == "regional",
        "recompute": strategy.recompute.kind,
        "loss": strategy.loss,
    }


# What kinds of recomputation and losses are called in each framework.
WORDS = {
    "torchtitan-0.3": {
        "recompute": {None: ("none",), "FullAC": ("full",), "SelectiveAC": ("ops",)}
        | {"MemoryBudgetAC": ("budget",)},
        "loss": {"CrossEntropyLoss": ("vocabulary-parallel",)}
        | {"ChunkedLossWrapper": tuple(f"chunked({n})" for n in (2, 4, 8))},
    },
    "torchtitan-toml": {
        "recompute": {"none": ("none",), "full": ("full",), "memory_budget": ("budget",)}
        | {"selective": ("ops", "every")},
    },
}
MEGATRON = {
    "recompute": {None: ("none",), "full": ("full", "groups", "first"), "selective": ("modules",)}
}


@pytest.mark.parametrize("framework", APART)
def test_frameworks_read_what_is_written_for_them(understood, framework):
    """Each value that the framework's own classes have after reading is that of the strategy."""
    assert len(understood[framework]) >= 30
    words = WORDS.get(framework, MEGATRON)
    for file, facts in understood[framework]:
        assert "error" not in facts, f"{facts['error']}\n{file.text}"
        wanted = said(file.strategy)
        if facts.get("sequence_parallel"):
            facts["sequence_parallel"] = facts["tp"] > 1
        if "virtual_stages" in facts and file.strategy.stage_cut is not None:
            facts.pop("virtual_stages")  # the layout has it
        if "zero" in facts and file.strategy.zero == 3 and not file.strategy.reshards:
            facts.pop("zero")  # of torch's FSDP2, which Megatron-Core does not know
        for key, value in facts.items():
            if key in words:
                assert wanted[key] in words[key][value], (key, file.text)
            else:
                assert value == wanted[key], (key, file.text)
