"""One published measurement: what ran where, how long a step took, how much memory it needed.

Rows are kept in one CSV file a source; what all rows of a source have in common (licence,
assumptions) stands in `sources.toml`.
"""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from shardwright.ir.strategy.recompute import Recompute, StrategyError

FOLDER = Path(__file__).parent / "rows"
SOURCES = Path(__file__).parent / "sources.toml"

# How a source states the time of a step; the value stands in `published`.
METRICS = ("seconds", "milliseconds", "tokens/s/gpu", "tokens/s", "tflop/s/gpu", "minutes/run")
MEMORY_KINDS = ("allocated", "reserved", "unstated")
VERDICTS = ("ran", "out of memory")
# What is not stated, or not expressible ("other"), is priced without and has no verdict.
RECOMPUTE = ("none", "full", "every 2nd layer", "operators", "attention", "unstated", "other")
GATHERS = ("", "on", "off")  # empty: it is unstated, or nothing is in 8 bits
NORMS = ("fused", "composed", "shared")
OPTIMIZERS = ("adamw", "adamw-foreach", "adamw-fused")
LOSSES = ("float32", "half", "fused", "in place")
_ROUNDED = 0.02  # of tokens per second, which sources round


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measurement; sizes in elements, times in seconds, memory in GiB of one GPU.

    Attributes:
        source: key of `sources.toml`.
        path: file of the repository.
        commit: of the repository.
        line: of the file, from 1.
        excluded: why the row is not scored; empty for rows that are.
        model: as the source calls it.
        family: module definition that has this shape (`models`).
        layers: blocks.
        hidden: width of the residual stream.
        heads: attention heads of queries.
        kv_heads: of keys and values.
        head_size: width of a head.
        ffn: inner width of an MLP.
        vocab: rows of the embedding.
        tied: whether embedding and head share their weight.
        experts: of a layer; 0 where there are none. `ffn` is the inner width of one then.
        chosen: experts of a token.
        balanced: whether tokens are forced to be equally many for each expert.
        tuning: "all" parameters are trained, or "lora qv 32" for adapters of rank 32 of queries and
            values, "lora all 8" of all linear layers; or "lora", "qlora", "adapter", ....
        sequence: tokens of a sample.
        global_batch: samples of a step.
        micro_batch: samples that a rank computes at once.
        dp_replicate: data parallel replicas.
        dp_shard: data parallel ranks among which `zero` shards.
        cp: context parallel ranks.
        tp: tensor parallel ranks.
        pp: pipeline stages, in ranks.
        ep: expert parallel ranks.
        zero: what `dp_shard` shards, 0 to 3.
        reshard: whether gathered parameters are freed between forward and backward.
        sequence_parallel: Megatron's, along `tp`.
        virtual_stages: stages of a rank.
        schedule: of the pipeline.
        sync: gradients are reduced after "every" micro-batch, or the "last".
        precision: of compute, "fp16", "bf16", "fp8-...", with fp32 parameters or masters unless it
            begins with "pure-".
        fp8_gather: whether weights are cast to 8 bits before they are gathered: one of `GATHERS`.
        reduce: dtype in which gradients are reduced.
        recompute: one of `RECOMPUTE`, or a text of `Recompute`, such as "first(5)".
        offloaded: layers whose activations wait on the host.
        compiled: torch.compile.
        replayed: whether a CUDA graph replays the whole step, so that the host issues no kernels.
        attention: "fused", "flash-1" for the first FlashAttention, or "unfused" where the scores
            are stored.
        norms: "fused" into a kernel, "composed" of single operators, or fused and "shared" by
            attention and MLP.
        loss: on logits that were cast to "float32", or that stay in "half" precision; "fused" in
            one kernel that reads these; or "in place" in one float32 copy.
        dropout: probability, of embeddings, residuals and unfused attention.
        optimizer: its name and how torch runs it: one of `OPTIMIZERS`.
        gradient_buffers: gradients have buffers that are never freed, as Megatron-LM's.
        async_tp: whether collectives of `tp` overlap matrix products.
        ep_overlap: whether messages of experts run beside another micro-batch.
        overlapped: whether gradients are reduced while others are still computed, where `zero` is
            below 2 and the source states it; with it they always are.
        gpu: key of the machine's device.
        gpus: in all.
        gpus_per_node: in one host.
        network_gbit: of a host, in one direction; 0 is unstated.
        metric: what `published` is, one of `METRICS`; empty without a time.
        published: the figure as the source has it.
        step_seconds: of one step, derived; None without a time.
        memory_gib: peak of a GPU; None where unstated.
        memory_kind: one of `MEMORY_KINDS`; empty without a figure.
        verdict: one of `VERDICTS`.
        note: what is special about this row.
    """

    source: str
    path: str
    commit: str
    line: int
    excluded: str = ""
    model: str
    family: str = ""
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_size: int = 0
    ffn: int = 0
    vocab: int = 0
    tied: bool = False
    experts: int = 0
    chosen: int = 0
    balanced: bool = False
    tuning: str = "all"
    sequence: int = 0
    global_batch: int = 0
    micro_batch: int = 0
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    zero: int = 0
    reshard: bool = False
    sequence_parallel: bool = False
    virtual_stages: int = 1
    schedule: str = ""
    sync: str = "last"
    precision: str = ""
    fp8_gather: str = ""
    reduce: str = ""
    recompute: str = "unstated"
    offloaded: int = 0
    compiled: bool = False
    replayed: bool = False
    attention: str = "fused"
    norms: str = "fused"
    loss: str = "float32"
    dropout: float = 0.0
    optimizer: str = "adamw"
    gradient_buffers: bool = False
    async_tp: bool = False
    ep_overlap: bool = False
    overlapped: bool = False
    gpu: str = ""
    gpus: int = 1
    gpus_per_node: int = 8
    network_gbit: int = 0
    metric: str = ""
    published: float | None = None
    step_seconds: float | None = None
    memory_gib: float | None = None
    memory_kind: str = ""
    verdict: str = "ran"
    note: str = ""

    @property
    def key(self) -> str:
        """The row's name: where it was read."""
        column = ":async-tp" if self.async_tp else ""  # some tables have two measurements a line
        return f"{self.source}:{self.commit[:7]}:{self.path}:{self.line}:{self.gpu}{column}"

    @property
    def parameters(self) -> float:
        """How many parameters the model has, without norms and biases."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        matrices = 3 if self.family == "llama" or self.experts else 2
        layer = attention + matrices * self.hidden * self.ffn * max(1, self.experts)
        return self.layers * layer + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def has_known_memory(self) -> bool:
        """Whether all that decides what a device keeps is stated and priced."""
        return self.recompute not in ("unstated", "other") and not self.offloaded

    @property
    def nodes(self) -> int:
        """Hosts."""
        return -(-self.gpus // self.gpus_per_node)

    @property
    def replicas(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step, of one rank."""
        return self.global_batch // (self.replicas * self.micro_batch)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.sequence


def step_seconds(metric: str, published: float, tokens: int, gpus: int) -> float | None:
    """Seconds of a step, from the figure of a source; None for what is not the time of a step.

    >>> step_seconds("tokens/s/gpu", 1000.0, 2**20, 8)
    131.072
    """
    if metric == "seconds":
        return published
    if metric == "milliseconds":
        return published / 1e3
    if metric == "tokens/s/gpu":
        return tokens / (published * gpus)
    if metric == "tokens/s":
        return tokens / published
    return None


def problems(row: Row) -> Iterator[str]:
    """What contradicts itself in a row, one sentence each."""
    for name, value, known in (
        ("metric", row.metric, ("", *METRICS)),
        ("memory_kind", row.memory_kind, ("", *MEMORY_KINDS)),
        ("verdict", row.verdict, VERDICTS),
        ("fp8_gather", row.fp8_gather, GATHERS),
        ("norms", row.norms, NORMS),
        ("loss", row.loss, LOSSES),
        ("optimizer", row.optimizer, OPTIMIZERS),
    ):
        if value not in known:
            yield f"{name} is {value!r}, not one of {', '.join(map(repr, known))}"
    if row.recompute not in RECOMPUTE:
        try:
            Recompute.parse(row.recompute)
        except StrategyError as error:
            yield str(error)
    if bool(row.experts) != bool(row.chosen):
        yield "experts need a number that is chosen for each token, and no others have one"
    if (row.memory_gib is None) != (not row.memory_kind):
        yield "a figure of memory needs its kind, and a kind its figure"
    if (row.published is None) != (not row.metric):
        yield "a published time needs its metric, and a metric its figure"
    if row.excluded:
        return
    ranks = row.dp_replicate * row.dp_shard * row.cp * row.tp * row.pp
    if ranks != row.gpus:
        yield f"degrees multiply to {ranks}, not to {row.gpus} GPUs"
    if not all((row.layers, row.hidden, row.heads, row.kv_heads, row.head_size, row.ffn)):
        yield "a size of the model is missing"
    elif row.heads % row.kv_heads:
        yield f"{row.heads} heads do not share {row.kv_heads} of keys and values"
    if not all((row.vocab, row.sequence, row.micro_batch, row.gpu, row.precision, row.family)):
        yield "vocabulary, sequence, micro-batch, device, precision or family is missing"
    elif row.global_batch % (row.replicas * row.micro_batch):
        yield f"{row.global_batch} samples are no whole micro-batches of {row.micro_batch}"
    if row.metric:
        derived = step_seconds(row.metric, row.published or 0.0, row.tokens, row.gpus)
        if derived is None or row.step_seconds is None:
            yield f"{row.metric} is no time of a step; exclude the row or leave the time out"
        elif abs(derived - row.step_seconds) > _ROUNDED * derived:
            yield f"step_seconds is {row.step_seconds}, the published figure gives {derived:.4f}"
    if row.step_seconds is None and row.memory_gib is None and row.verdict == "ran":
        yield "neither a time nor memory nor a verdict other than ran"


def read(folder: Path = FOLDER) -> list[Row]:
    """All rows, sources in the order of their names."""
    return [row for file in sorted(folder.glob("*.csv")) for row in read_file(file)]


def read_file(file: Path) -> list[Row]:
    """The rows of a CSV file."""
    with file.open(newline="") as lines:
        return [Row(**_parsed(record)) for record in csv.DictReader(lines)]


def write_file(rows: Iterable[Row], file: Path) -> None:
    """The rows as a CSV file, columns in the order of `Row`; what has its default is empty."""
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {name: _text(name, value) for name, value in asdict(row).items()} for row in rows
        )


def sources() -> dict[str, dict[str, Any]]:
    """The sources by their key: `repository`, `license`, `title` and `assumptions`, texts."""
    return tomllib.loads(SOURCES.read_text())


_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Row)}
_TYPES: dict[str, str] = {field.name: str(field.type) for field in fields(Row)}


def _text(name: str, value: object) -> str:
    if value is None or value == _DEFAULTS[name]:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.8g}" if isinstance(value, float) else str(value)


def _parsed(record: dict[str, str]) -> dict[str, Any]:
    """The arguments of a row; what is empty is left to its default."""
    return {name: _value(_TYPES[name], text) for name, text in record.items() if text}


def _value(kind: str, text: str) -> object:
    if kind == "bool":
        return text == "yes"
    if kind == "int":
        return int(text)
    return float(text) if kind.startswith("float") else text
