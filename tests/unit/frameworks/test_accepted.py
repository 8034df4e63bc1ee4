"""Written configs are accepted by the frameworks' own parsers that are installed."""

import json
import warnings

import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.parallelism_config import ParallelismConfig
from hypothesis import given, settings
from transformers import HfArgumentParser, TrainingArguments

from shardwright.frameworks.config import Batch
from shardwright.frameworks.writers.nearest import ConfigFacts
from shardwright.frameworks.writing import write_config
from shardwright.ir.strategy.strategy import Strategy
from tests.harness.strategies import training_strategies

FACTS = ConfigFacts(batch=Batch(samples=2**10 * 3**6, sequence=4096), clip=0.5)


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
