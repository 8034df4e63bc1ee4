"""torchtitan's options of storage, dtypes, recomputation, compilation and loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.frameworks.readers.understood import MIXED_BF16, WHOLE
from shardwright.frameworks.settings import Settings
from shardwright.ir.strategy.recompute import FULL, NONE, Recompute

# Results that `SelectiveAC` keeps: all of these operators, and of every second matrix product.
SELECTIVE = Recompute(
    "ops", names=("mm/2", "attention", "topk", "reduce_scatter", "all_to_all", "max")
)
RESHARD = {"default": None, "always": True, "never": False}
AC = "activation_checkpoint"
ASYNC_TP = "parallelism.enable_async_tensor_parallel"
FLOAT8 = "quantize.linear.float8"


def storage(settings: Settings, degrees: Mapping[str, Any]) -> dict[str, Any]:
    """Sharding of data parallelism, and what is kept on the host."""
    again = settings.word(
        "parallelism.fsdp_reshard_after_forward", None, RESHARD, "reshard_after_forward"
    )
    if again is None and degrees["pp"] == 1 and degrees["dp_shard"] * degrees["cp"] > 1:
        settings.notes.append(
            'norm and lm_head stay gathered after the forward pass; "always" frees them too'
        )
    offloads = settings.switch("training.enable_cpu_offload", False, "offload")
    return {
        "zero": 3,
        "reshard_after_forward": again,
        "offload": ("optimizer", "parameters") if offloads else (),
    }


def dtypes(settings: Settings) -> dict[str, str]:
    """Dtypes of parameters, reductions, gradients and state."""
    known = {"float32": "float32", "bfloat16": "bfloat16"}
    kept = settings.word("training.dtype", "float32", known, "state_dtype", "grad_dtype")
    used = settings.word("training.mixed_precision_param", "bfloat16", known, "param_dtype")
    reduced = settings.word("training.mixed_precision_reduce", "float32", known, "reduce_dtype")
    mixed = MIXED_BF16 if used == "bfloat16" else WHOLE
    return {**mixed, "reduce_dtype": reduced, "grad_dtype": kept, "state_dtype": kept}


def fp8(settings: Settings) -> str | None:
    """Scaling of matrix products in 8 bits, of whichever way the era names converters."""
    if settings.switch("float8.enable_float8_linear", False, "fp8"):
        return _recipe(settings, "float8.recipe_name", "tensorwise")
    for name, recipe, default in (
        ("model.converters", "quantize.linear.float8.recipe_name", "tensorwise"),
        ("model_spec.converters", "model_spec.converters.0.recipe_name", "rowwise"),
    ):
        for word in settings.words(name, "fp8"):
            plain = word.lower()
            if "nvfp4" in plain:
                settings.differ(name, "products in 4 bits are not known; read as bf16")
            elif "mx" in plain:
                settings.raw("quantize.linear.mx.recipe_name", "fp8")
                return "mxfp8"
            elif "float8" in plain:
                older = "float8.recipe_name"
                return _recipe(settings, older if older in settings else recipe, default)
    return None


def fp8_gather(settings: Settings, recipe: str | None, degrees: Mapping[str, Any]) -> bool:
    """Whether shards of weights are cast to 8 bits before they are gathered."""
    is_toml = settings.document.form == "toml"
    section = f"{FLOAT8}." if is_toml else "model_spec.converters.0."
    name = f"{section}enable_fsdp_float8_all_gather"
    if recipe is None or not settings.switch(name, False, "fp8_gather"):
        return False
    settings.require(recipe == "tensorwise", name, f"tensorwise is needed with it, not {recipe}")
    stated = next((n for n in ("float8.recipe_name", f"{FLOAT8}.recipe_name") if n in settings), "")
    settings.require(
        not (is_toml and stated),
        name,
        f"no {stated} is needed with it: torchtitan takes it for tensorwise without one",
    )
    if not settings.switch(f"{section}precompute_float8_dynamic_scale_for_fsdp", False):
        settings.notes.append(
            "the all-reduce of a weight's maximum before its gather has no price; with"
            " precompute_float8_dynamic_scale_for_fsdp there is one for all"
        )
    sharded = degrees["dp_shard"] * (1 if is_toml else degrees["cp"])
    return bool(sharded > 1)


def _recipe(settings: Settings, name: str, default: str) -> str:
    known = {"rowwise": "rowwise", "tensorwise": "tensorwise", "rowwise_with_gw_hp": "rowwise"}
    found = settings.word(name, default, known, "fp8")
    if settings.text(name, None) == "rowwise_with_gw_hp":
        settings.differ(name, "gradients of weights are computed in bf16; read as rowwise")
    return found


def recompute(settings: Settings) -> Recompute:
    """Recomputation: by mode, by the class that is called, or by the keys of a dump."""
    if f"{AC}.mode" in settings or settings.document.form == "toml":
        return _recompute_by_mode(settings)
    entry = settings.document.entries.get(AC)
    inside = {name.removeprefix(f"{AC}.") for name in settings.below(AC)}
    kind = settings.raw(AC, "recompute")
    for name in inside:
        settings.raw(f"{AC}.{name}", "recompute")
    if entry is not None and kind is None:
        return NONE
    word = kind.lower() if isinstance(kind, str) else ""
    if "memory" in word or "memory_budget" in inside:
        return _budget(settings)
    selects = any("force_recompute" in name for name in inside)
    if "full" in word or kind == {} or (inside and not word and not selects):
        return FULL
    settings.require(not word or "selective" in word, AC, "a known kind of checkpointing is needed")
    return SELECTIVE


def _recompute_by_mode(settings: Settings) -> Recompute:
    mode = settings.word(
        f"{AC}.mode",
        "selective",
        {word: word for word in ("selective", "full", "memory_budget", "none")},
        "recompute",
    )
    if mode == "selective":
        option = settings.text(f"{AC}.selective_ac_option", "2", "recompute")
        if option == "op":
            return SELECTIVE
        layers = settings.integer(f"{AC}.selective_ac_option", 2, "recompute")
        return FULL if layers == 1 else Recompute("every", layers)
    if mode == "memory_budget":
        return _budget(settings)
    return FULL if mode == "full" else NONE


def _budget(settings: Settings) -> Recompute:
    name = f"{AC}.memory_budget"
    part = settings.number(name, 0.5, "recompute")
    settings.require(part <= 1, name, "a number from 0 to 1 is needed")
    if part in (0, 1):
        return FULL if part == 0 else NONE
    return Recompute("budget", fraction=part)


def compiled(settings: Settings) -> str:
    """Whether layers are compiled."""
    on = settings.switch("compile.enable", False, "compile")
    parts = settings.words("compile.components", "compile") or ("model", "loss")
    return "regional" if on and "model" in parts else "off"


def async_tp(settings: Settings, tp: int, is_split: bool) -> bool:
    """Whether messages of tensor parallelism run beside products, which needs compiled layers."""
    if tp == 1 or not settings.switch(ASYNC_TP, False, "async_tp"):
        return False
    settings.require(compiled(settings) != "off", ASYNC_TP, "compile.enable is needed too")
    if not is_split:
        settings.differ(ASYNC_TP, "without sequence parallelism it has no effect; read as without")
    return is_split


def loss(settings: Settings, is_toml: bool) -> str:
    """The form of the loss."""
    if settings.switch("parallelism.disable_loss_parallel", False, "loss"):
        return "whole"
    kind = settings.raw("loss", "loss")
    chunks = settings.integer("loss.num_chunks", None, "loss")
    if chunks is None and isinstance(kind, str) and "Chunked" not in kind:
        return "vocabulary-parallel"
    if is_toml:
        return "vocabulary-parallel"
    return f"chunked({chunks or 8})"
