"""TARGET of the command line: a function in a file that returns a `Job`, or a Hugging Face config.

Loading `file.py:function` runs that file, as Python would; loading a
`config.json` runs no code of its author.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwright.cost.memory import known_optimizer
from shardwright.train.export import load_weights
from shardwright.train.job import Batch, Job, JobError

if TYPE_CHECKING:
    from types import ModuleType

_CONFIG_STEPS = 20  # of training on made-up tokens, enough to see the speed


class TargetError(ValueError):
    """A TARGET that does not lead to a job."""


def load_job(
    target: str,
    batch: int | None = None,
    seq: int | None = None,
    settings: Sequence[str] = (),
) -> Job:
    """The job that TARGET names.

    `batch` and `seq` are the sizes of the example batch of a `config.json`, and
    belong to it only. `settings`, as `num_layers=4`, change fields of the config,
    or are arguments of the function. Raises `TargetError` for what is missing or is no job.
    """
    given = dict(_setting(text) for text in settings)
    if target.endswith(".json"):
        batch, seq = given.pop("batch", batch), given.pop("seq", seq)
        if batch is None or seq is None:
            raise TargetError(f"{target} has no batch: give its sizes, as in --batch 8 --seq 1024")
        if not (isinstance(batch, int) and isinstance(seq, int)) or batch < 1 or seq < 2:
            raise TargetError(
                f"--batch {batch} --seq {seq}: at least 1 sequence of 2 tokens, please"
            )
        return _config_job(Path(target), batch, seq, given)
    if batch is not None or seq is not None:
        raise TargetError(
            f"{target} brings its own batch; --batch and --seq belong to a config.json, --set"
            " batch=… gives the function an argument"
        )
    file, colon, function = target.rpartition(":")
    if not colon or not file.endswith(".py") or not function:
        example = f"{target}:job" if target.endswith(".py") else "train.py:job"
        raise TargetError(
            f"{target!r} is neither file.py:function nor a config.json; name the function that"
            f" returns a Job, as in {example}"
        )
    return _file_job(Path(file), function, given)


def build_model(job: Job, *, meta: bool = False) -> nn.Module:
    """The job's model, seeded, with the weights it starts from; on the meta device without memory.

    A factory that cannot work there, because it reads its own weights, say,
    builds the real model instead.
    """
    if meta:
        try:
            with torch.device("meta"):
                return _checked(job.model())
        except JobError:
            raise
        except Exception:  # whatever is wrong is so with a real device too
            pass
    torch.manual_seed(job.seed)
    try:
        made = job.model()
    except Exception as e:
        raise JobError(f"Job.model raised {_raised(e)}") from e
    model = _checked(made)
    if job.weights is not None:
        load_weights(model, job.weights)
    return model


def _checked(made: object) -> nn.Module:
    """What `Job.model` made; raises `JobError` for what cannot be trained."""
    if not isinstance(made, nn.Module):
        raise JobError(f"Job.model returned a {type(made).__name__}; it must return an nn.Module")
    if not any(p.requires_grad for p in made.parameters()):
        raise JobError(
            f"Job.model returned a {type(made).__name__} without parameters that require a"
            " gradient, so there is nothing to train"
        )
    return made


def optimizer_name(job: Job, model: nn.Module) -> str:
    """The optimizer of the job's `model` as planning knows it: `adamw`, `sgd_momentum`.

    Raises `JobError` where it cannot be made, and `OptimizerError` for one that is not known.
    """
    try:
        made = job.optimizer(list(model.parameters()))
    except Exception as e:
        raise JobError(f"Job.optimizer raised {_raised(e)}") from e
    if not isinstance(made, torch.optim.Optimizer):
        raise JobError(
            f"Job.optimizer returned a {type(made).__name__}; it must return an optimizer of"
            " torch.optim"
        )
    return known_optimizer(made)


def _raised(error: Exception) -> str:
    """An error in one line, with the last line of code that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = next((f for f in reversed(frames) if f.filename != __file__), None)
    at = f" at {where.filename}:{where.lineno}" if where else ""
    return f"{type(error).__name__}{at}: {' '.join(str(error).split())}"


def half_precision(target: str) -> str | None:
    """The 16-bit type that a `config.json` names for its weights; None without one.

    Models are built in float32 all the same.
    """
    if not target.endswith(".json"):
        return None
    data = json.loads(Path(target).read_text())
    named = str(data.get("dtype") or data.get("torch_dtype"))
    return named if named in ("bfloat16", "float16") else None


def _setting(text: str) -> tuple[str, Any]:
    """Name and value of `name=value`; a value that is no JSON is text."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip().isidentifier():
        raise TargetError(f"--set {text}: write it as name=value, as in --set num_layers=4")
    try:
        return name.strip(), json.loads(value)
    except ValueError:
        return name.strip(), value


def _file_job(file: Path, function: str, given: dict[str, Any]) -> Job:
    if not file.is_file():
        raise TargetError(f"there is no file {file}; a target is file.py:function")
    module = _run_file(file)
    make = getattr(module, function, None)
    if not callable(make):
        raise TargetError(f"{file} has no function {function}; it needs one that returns a Job")
    takes = inspect.signature(make).parameters
    for name in given:
        if name not in takes:
            raise TargetError(_unknown(f"{file}:{function}", name, takes, "argument"))
    try:
        job = make(**given)
    except JobError as e:
        raise TargetError(f"{file}:{function}: {e}") from e
    except Exception as e:
        raise TargetError(f"{file}:{function} raised {_cause(e, file)}") from e
    if not isinstance(job, Job):
        raise TargetError(
            f"{file}:{function} returned a {type(job).__name__}; it must return a shardwright.Job"
        )
    return job


def _run_file(file: Path) -> ModuleType:
    """Import `file` as `python file` would find it: its folder comes first in the path."""
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = file.stem if file.stem not in sys.modules else f"{file.stem}__target"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up by name
    try:
        spec.loader.exec_module(module)
    except Exception as e:
        del sys.modules[name]
        raise TargetError(f"{file} cannot be imported: {_cause(e, file)}") from e
    return module


def _cause(error: Exception, file: Path) -> str:
    """What went wrong and the last line of the user's file that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if Path(f.filename).resolve() == file.resolve()]
    where = f" at line {lines[-1]}" if lines else ""
    return f"{type(error).__name__}{where}: {error}"


def _unknown(owner: str, name: str, known: Iterable[str], what: str) -> str:
    close = get_close_matches(name, list(known), 3, 0.4) or sorted(known)[:5]
    there = f"there are {', '.join(close)}" if close else f"it takes no {what}s"
    hint = ", and the options --machine and --optimizer" * (name in ("machine", "optimizer"))
    return f"--set {name}: {owner} has no {what} {name}; {there}{hint}"


def _config_job(file: Path, batch: int, seq: int, given: dict[str, Any]) -> Job:
    """A causal language model of this architecture on random tokens."""
    config = _read_config(file, given)
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and seq > longest:
        raise TargetError(f"--seq {seq} is longer than the {longest} positions of {file}")

    def example() -> Batch:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(config.vocab_size, (batch, seq), generator=generator)
        return {"input_ids": tokens, "labels": tokens}

    def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters)

    return Job(
        model=lambda: _from_config(config),
        batch=example,
        optimizer=adamw,
        data=lambda: iter([example()]),
        steps=_CONFIG_STEPS,
        name=str(config.model_type),
    )


def _read_config(file: Path, given: dict[str, Any]) -> Any:
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError) as e:
        raise TargetError(f"cannot read {file}: {e}; give a Hugging Face config.json") from e
    if not isinstance(data, dict) or "model_type" not in data:
        raise TargetError(f"{file} names no model_type; give a Hugging Face config.json")
    try:
        from transformers import AutoConfig
    except ImportError as e:
        raise TargetError("a config.json needs transformers: pip install 'shardwright[hf]'") from e
    try:
        config = AutoConfig.for_model(**data)
        for name in given:
            if not hasattr(config, name):
                raise TargetError(_unknown(str(file), name, config.to_dict(), "field"))
        config = AutoConfig.for_model(**{**data, **given}) if given else config
    except TargetError:
        raise
    except (KeyError, TypeError, ValueError) as e:
        raise TargetError(
            f"{file}: this version of transformers does not take it: {str(e).splitlines()[0]}"
        ) from e
    config.use_cache = False  # a training step returns no keys and values
    return config


def _from_config(config: Any) -> nn.Module:
    import transformers

    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    architecture = next((found for found in named if found is not None), None)
    if architecture is not None:
        model = architecture(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert isinstance(model, nn.Module)
    return model.train()
