"""The tensor parallelism that Hugging Face ships beside what is found here, as `docs/tp-plans.md`.

python scripts/tp_plans.py                 # every family: two minutes on two cores
python scripts/tp_plans.py --only qwen3    # these anew, the others as they are
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PAGE = ROOT / "docs" / "tp-plans.md"

MACHINE, MESH, BATCH, SEQUENCE, LAYERS = "8xH100", "tp=8", 8, 2048, 4

# Family -> what its configuration says at the size in the first column.
FAMILIES: Mapping[str, tuple[str, dict[str, int]]] = {
    "llama": ("Llama-3-8B", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    }),
    "mistral": ("Mistral-7B", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32768,
    }),
    "qwen2": ("Qwen2.5-32B", {
        "hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 40,
        "num_key_value_heads": 8, "vocab_size": 152064,
    }),
    "qwen3": ("Qwen3-8B", {
        "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    }),
    "gemma2": ("Gemma-2-9B", {
        "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256000,
    }),
    "olmo2": ("OLMo-2-7B", {
        "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 100352,
    }),
    "phi3": ("Phi-3-mini", {
        "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32064,
    }),
    "gpt_neox": ("GPT-NeoX-20B", {
        "hidden_size": 6144, "intermediate_size": 24576, "num_attention_heads": 64,
        "vocab_size": 50432,
    }),
    "starcoder2": ("StarCoder2-15B", {
        "hidden_size": 6144, "intermediate_size": 24576, "num_attention_heads": 48,
        "num_key_value_heads": 4, "vocab_size": 49152,
    }),
}  # fmt: skip

HEAD = f"""# Tensor parallelism, as Hugging Face ships it and as it is found here

Many configurations of `transformers` carry a `base_model_tp_plan`, written by hand. This page,
written by `scripts/tp_plans.py`, gives the search the same models ({LAYERS} layers of the published
width, {BATCH} x {SEQUENCE} tokens a step, AdamW, {MACHINE}) and compares by one model of costs:

* *theirs*: the shipped plan, every module pinned to its style, and modules that it does not name
  computed whole, as `transformers` does;
* *{MESH}*: the fastest plan that is found for the same mesh;
* *any mesh*: the fastest of all meshes.

Theirs are plans for inference first. Nothing here was measured.

"""

WORDS = {"colwise": "n", "colwise_gather_output": "n", "rowwise": "k", "rowwise_split_input": "k"}


@dataclass(frozen=True)
class Section:
    """What the page says of one family: its row of the table, and the table of its modules."""

    row: str
    modules: str


def main() -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    options = parser.parse_args()
    known = read(PAGE.read_text()) if PAGE.exists() else {}
    for family in options.only:
        print(family, file=sys.stderr)
        known[family] = section(family)
    PAGE.write_text(page(known))
    return 0


def page(sections: Mapping[str, Section]) -> str:
    """The page with these sections, in the order of `FAMILIES`."""
    there = [family for family in FAMILIES if family in sections]
    rows = [
        "| model | theirs | " + MESH + " | any mesh |",
        "|---|---|---|---|",
        *(sections[family].row for family in there),
    ]
    texts = (f"## {FAMILIES[f][0]} (`{f}`)\n\n{sections[f].modules}" for f in there)
    return HEAD + "\n".join(rows) + "\n\n" + "\n\n".join(texts) + "\n"


def read(text: str) -> dict[str, Section]:
    """The sections of a page."""
    rows = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if "| " in line}
    found = {}
    for part in text.split("\n## ")[1:]:
        title, _, modules = part.partition("\n\n")
        family = re.findall(r"`(\w+)`", title)[0]
        found[family] = Section(rows[FAMILIES[family][0]], modules.strip())
    return found


def section(family: str) -> Section:
    """What the search and the cost model say of one family."""
    import shardwright as sw
    from shardwright.ir.options.constraints import ConstraintError

    title, sizes = FAMILIES[family]
    model, graph = capture(family, sizes)
    machine = sw.Machine.preset(MACHINE)
    shipped = {name: style for name, style in model._tp_plan.items() if style in WORDS}
    ours = sw.search(graph, machine, constraints=[f"mesh {MESH}"])[0]
    best = sw.search(graph, machine)[0]
    try:
        pins = [f"mesh {MESH}", *pinned(model, shipped)]
        theirs = costs(sw.search(graph, machine, constraints=pins)[0])
    except ConstraintError as e:
        theirs = f"not possible: {reason(str(e))}"
    row = f"| {title} | {theirs} | {costs(ours)} | {best.mesh}: {costs(best)} |"
    lines = ["| modules | theirs | here, by the same mesh |", "|---|---|---|"]
    for pattern, style in model._tp_plan.items():
        lines.append(f"| `{pattern}` | {style} | {said(ours, pattern)} |")
    for pattern in others(model, ours):
        lines.append(f"| `{pattern}` | | {said(ours, pattern)} |")
    return Section(row, "\n".join(lines))


def capture(family: str, sizes: Mapping[str, int]) -> tuple[Any, Any]:
    """The model of a family on the meta device, and its graph."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    import shardwright as sw

    config = CONFIG_MAPPING[family](num_hidden_layers=LAYERS, use_cache=False, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long, device="meta")
    return model, sw.capture(model, kwargs={"input_ids": ids, "labels": ids})


def pinned(model: Any, shipped: Mapping[str, str]) -> Iterator[str]:
    """The shipped plan as constraints; modules with parameters that it does not name are whole.

    A tied weight is stored as the last module that it is in wants it.
    """
    stored_by = {id(p): module for module in model.modules() for p in module.parameters(False)}
    for name, module in model.named_modules():
        own = [key for key, _ in module.named_parameters(recurse=False, remove_duplicate=False)]
        if not own:
            continue
        style = shipped.get(star(name))
        yield f"pin {name}=tp:{WORDS[style] if style else 'whole'}"
        split = {"n": "S(0)", "k": "S(1)"}[WORDS[style]] if style else "R"
        for key in own:
            if stored_by[id(getattr(module, key))] is not module:
                continue
            stored = "R" if key == "bias" and split == "S(1)" else split
            yield f"pin {name}.{key}=tp:{stored}"


def star(path: str) -> str:
    """The path with the numbers of layers left open."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def said(plan: Any, pattern: str) -> str:
    """What the plan splits in the modules of a pattern, and how their parameters are stored."""
    words: dict[str, None] = {}
    for op in plan.ops:
        if star(op.source.module) == pattern:
            words.update(dict.fromkeys(w for w in op.splits if w not in ("-", "partial sums")))
    stored = dict.fromkeys(
        f"{p.name.rpartition('.')[2]} {p.layout.placements[0]}"
        for p in plan.parameters
        if star(p.name.rpartition(".")[0]) == pattern
    )
    return f"{', '.join(words) or 'whole'}; {', '.join(stored)}" if stored else ", ".join(words)


def others(model: Any, plan: Any) -> list[str]:
    """Patterns of the modules with parameters that the shipped plan does not name."""
    found = dict.fromkeys(star(p.name.rpartition(".")[0]) for p in plan.parameters)
    return [pattern for pattern in found if pattern not in model._tp_plan]


def costs(plan: Any) -> str:
    """Step time and memory in words."""
    return f"{plan.step_seconds * 1e3:.1f} ms, {plan.peak_bytes / 2**30:.2f} GiB"


def reason(text: str) -> str:
    """A constraint's error without the constraint."""
    return text.rpartition(": ")[2]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
