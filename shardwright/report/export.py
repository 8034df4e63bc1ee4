"""Exports plans to the formats of torch, Hugging Face and torchtitan.

Every text lists what the plan does beyond it; a plan that a format cannot express raises
`NotExpressibleError`.
"""

from __future__ import annotations

import json
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from shardwright.ir.plan import Plan
from shardwright.report.styles import NotExpressibleError, Style, Styles, glob, styles
from shardwright.report.text.module_rows import module_tree
from shardwright.report.text.wrapping import WIDTH

_CLASSES = {
    "colwise": "ColwiseParallel",
    "rowwise": "RowwiseParallel",
    "sequence": "SequenceParallel",
    "input": "PrepareModuleInput",
    "output": "PrepareModuleOutput",
    "both": "PrepareModuleInputOutput",
}
_HUGGING_FACE = {
    ("colwise", "R", "S(-1)", False): "colwise",
    ("colwise", "R", "R", False): "colwise_gather_output",
    ("rowwise", "S(-1)", "R", False): "rowwise",
    ("rowwise", "R", "R", False): "rowwise_split_input",
    ("rowwise", "R", "R", True): "embedding_rowwise",
    ("colwise", "R", "R", True): "embedding_colwise",
    ("sequence", "S(1)", "S(1)", False): "sequence_parallel",
    ("sequence", "S(2)", "S(2)", False): "replicated_with_grad_allreduce",
}


def parallelize_module(plan: Plan) -> str:
    """A Python file with the `parallelize_plan` of `torch.distributed.tensor.parallel`."""
    found = styles(plan)
    lines = [_calls(pattern, style) for pattern, style in patterns(found.modules, plan).items()]
    used = sorted({_CLASSES[style.kind] for style in found.modules.values()})
    placements = sorted({word for line in lines for word in ("Replicate", "Shard") if word in line})
    imports = []
    if placements:
        imports.append(f"from torch.distributed.tensor import {', '.join(placements)}")
    if used:
        names = "".join(f"    {name},\n" for name in used)
        imports.append(f"from torch.distributed.tensor.parallel import (\n{names})")
    notes = (line for note in found.notes for line in _wrapped(f"Note: {note}."))
    return "\n".join(
        [
            f'"""{_in_docstring([_title(plan), "", *_usage(found), *notes])}\n"""\n',
            *imports,
            *([""] if imports else []),
            f"mesh = {dict(plan.mesh.axes)!r}  # outermost axis first",
            f"tensor_axis = {found.axis!r}",
            f"data_axes = {found.data!r}",
            "parallelize_plan = {",
            *(f"    {line}," for line in lines),
            "}",
            "",
        ]
    )


def hf_tp_plan(plan: Plan) -> str:
    """`base_model_tp_plan` and `_tp_plan` of a Hugging Face model, as JSON."""
    found = styles(plan)
    named = {}
    for pattern, style in patterns(found.modules, plan).items():
        key = style.kind, style.before, style.after, style.embedding
        if key not in _HUGGING_FACE:
            raise NotExpressibleError(
                f"{pattern} is {style.kind} from {style.before} to {style.after}, for which Hugging"
                " Face has no style"
            )
        named[pattern] = _HUGGING_FACE[key]
    first = {pattern.partition(".")[0] for pattern in named if "*" in pattern}
    base = f"{first.pop()}." if len(first) == 1 else ""
    inner = {p.removeprefix(base): s for p, s in named.items() if base and p.startswith(base)}
    return _json(
        {
            "about": _title(plan),
            "mesh": dict(plan.mesh.axes),
            "tensor_axis": found.axis,
            "data_axes": found.data,
            "notes": list(found.notes),
            "base_model_tp_plan": inner,
            "_tp_plan": {p: s for p, s in named.items() if p.removeprefix(base) not in inner},
        }
    )


def split_spec(plan: Plan) -> str:
    """`split_spec` of `torch.distributed.pipelining.pipeline`, as JSON."""
    if plan.stages == 1:
        raise NotExpressibleError(
            "the plan has one stage, and split_spec cuts a model into several"
        )
    return _json(
        {
            "about": _title(plan),
            "schedule": plan.schedule,
            "n_microbatches": plan.micro_batches,
            "split_spec": {_beginning(plan, cut): "SplitPoint.BEGINNING" for cut in plan.cuts},
        }
    )


def _beginning(plan: Plan, cut: str) -> str:
    """The outermost module that starts with operator `cut`; never a list, which is not called."""
    tree = module_tree(plan)
    names = [op.name for op in plan.ops]
    place = names.index(cut)
    path = plan.ops[place].source.module
    before = [op.source.module for op in plan.ops[:place]]
    parts = path.split(".") if path else []
    for depth in range(1, len(parts) + 1):
        module = ".".join(parts[:depth])
        found = tree.at(module)
        is_list = found.is_empty and all(name.isdigit() for name in found.children)
        if not is_list and not any(f"{other}.".startswith(f"{module}.") for other in before):
            return module
    raise NotExpressibleError(
        f"a stage begins with {plan.ops[place].kind} in the middle of {path or 'the model'}, and"
        " split_spec cuts only before or after a module"
    )


def torchtitan(plan: Plan) -> str:
    """The `[parallelism]` degrees of a torchtitan configuration."""
    found = styles(plan)
    size = dict(plan.mesh.axes)
    kinds: defaultdict[str, int] = defaultdict(lambda: 1)
    for axis, how in found.data.items():
        kinds[how] *= size[axis]
    sequence = any(style.before == "S(1)" for style in found.modules.values())
    again = [op.runs_again for op in plan.ops]
    mode = "none" if not any(again) else "selective"
    lines = [
        *(f"# {line}" for text in (_title(plan), *found.notes) for line in _wrapped(text)),
        "[parallelism]",
        f"data_parallel_replicate_degree = {kinds['replicate']}",
        f"data_parallel_shard_degree = {kinds['fully_shard']}",
        f"tensor_parallel_degree = {size[found.axis] if found.axis else 1}",
        f"pipeline_parallel_degree = {size.get('pp', 1)}",
        "context_parallel_degree = 1",
        *([f"disable_sequence_parallel = {str(not sequence).lower()}"] if found.axis else []),
        "",
        "[activation_checkpoint]",
        f'mode = "{mode}"',
    ]
    return "\n".join(lines) + "\n"


FORMS: Mapping[str, Callable[[Plan], str]] = {
    "parallelize_module": parallelize_module,
    "hf-tp-plan": hf_tp_plan,
    "split-spec": split_spec,
    "torchtitan": torchtitan,
}


def patterns(modules: Mapping[str, Style], plan: Plan) -> dict[str, Style]:
    """The styles by globs, where all modules of a plan that match a glob have one style."""
    by_glob: defaultdict[str, list[str]] = defaultdict(list)
    for path in _paths(plan):
        by_glob[glob(path)].append(path)
    found: dict[str, Style] = {}
    for path, style in modules.items():
        same_glob = by_glob[glob(path)]
        if all(modules.get(other) == style for other in same_glob):
            found[glob(path)] = style
        else:
            found[path] = style
    return found


def _paths(plan: Plan) -> Iterator[str]:
    """Paths of all modules that have operators."""
    waiting = [("", module_tree(plan))]
    while waiting:
        path, module = waiting.pop()
        yield path
        for name, child in module.children.items():
            waiting.append((f"{path}.{name}" if path else name, child))


def _in_docstring(lines: Sequence[str]) -> str:
    """The lines in a docstring, which no name in a plan can end: that would make it code."""
    return "\n".join(lines).replace("\\", "\\\\").replace('"""', '\\"\\"\\"')


def _title(plan: Plan) -> str:
    return f"{plan.name} plan of graph {plan.fingerprint}: {plan.mesh} on {plan.machine}"


def _usage(found: Styles) -> Iterator[str]:
    if found.axis:
        yield "Apply it to the plain model with"
        yield "parallelize_module(model, device_mesh[tensor_axis], parallelize_plan)."
    else:
        yield "There is nothing for parallelize_module to do: only the batch is split."
    for axis, how in found.data.items():
        yield f"Over {axis}, then {how} of torch.distributed: each rank takes its part of the"
        yield "batch, and gradients are those of the mean loss over all of it."


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH - 2, subsequent_indent="  ")


def _calls(pattern: str, style: Style) -> str:
    before, after = _placement(style.before), _placement(style.after)
    cut = f"input_layouts=({before},), desired_input_layouts=(Replicate(),)"
    join = f"output_layouts=(Replicate(),), desired_output_layouts=({after},)"
    given = {
        "sequence": f"sequence_dim={style.before[2:-1]}, use_local_output=True",
        "input": f"{cut}, use_local_output=True",
        "output": join,
        "both": f"{cut}, use_local_input=True, {join}",
    }.get(style.kind, f"input_layouts={before}, output_layouts={after}")
    return f"{json.dumps(pattern)}: {_CLASSES[style.kind]}({given})"


def _placement(text: str) -> str:
    return "Replicate()" if text == "R" else text.replace("S(", "Shard(")


def _json(content: Mapping[str, object]) -> str:
    return json.dumps(content, indent=2) + "\n"
