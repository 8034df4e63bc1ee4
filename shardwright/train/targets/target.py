"""Resolves TARGET of the command line: a function in a file, or a Hugging Face config.

Loading `file.py:function` runs that file as Python would. Loading a `config.json` runs no code of
its author.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwright.ir.options.optimizers import known_optimizer
from shardwright.ir.options.plan_options import DEFAULTS
from shardwright.runtime.deferred.sources import deferred, set_sources, sources_of
from shardwright.runtime.weight_files.stored_weights import StoredSources, StoredWeights
from shardwright.train.checkpoint.export import load_weights
from shardwright.train.data.batch import JobError
from shardwright.train.job import Job
from shardwright.train.targets.config_schema import unknown_setting
from shardwright.train.targets.hf_config import config_job
from shardwright.train.targets.target_error import TargetError
from shardwright.train.targets.target_text import (
    ConfigTarget,
    FunctionTarget,
    parse_target,
)

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["TargetError", "build_model", "load_job", "optimizer_name"]


def load_job(
    target: str,
    batch: int | None = None,
    seq: int | None = None,
    settings: Sequence[str] = (),
) -> Job:
    """The job that TARGET names.

    Args:
        target: `file.py:function`, a `config.json`, or a folder with one.
        batch: sequences or images in the example batch of a config; functions take none.
        seq: tokens in a sequence of the example batch; functions and image models take none.
        settings: `NAME=VALUE`, such as `num_layers=4`: fields of the config, or arguments of the
            function.

    Raises:
        TargetError: the TARGET is missing or gives no job.
    """
    found = parse_target(target, batch, seq, settings)
    return config_job(found) if isinstance(found, ConfigTarget) else _file_job(found)


def build_model(job: Job, *, meta: bool = False) -> nn.Module:
    """Build the job's model from its seed, with the weights of `Job.weights` if given.

    With `meta` it is built on the meta device, without memory or values; if that fails, e.g.
    because the factory loads weights, the real model is built. Raises `JobError` if `Job.model`
    fails or returns nothing that can be trained.
    """
    if meta:
        try:
            with torch.device("meta"):
                return _checked(job.model())
        except JobError:
            raise
        except Exception:  # an error of the model itself occurs again below
            pass
    torch.manual_seed(job.seed)
    try:
        made = job.model()
    except JobError:
        raise
    except Exception as e:
        raise JobError(f"Job.model raised {_raised(e)}") from e
    model = _checked(made)
    if job.weights is not None:
        load_weights(model, job.weights)
    return model


def build_without_memory(job: Job) -> nn.Module:
    """Build the job's model without memory for its tensors.

    `parallelize` computes or reads the tiles of the initial weights. If the factory fails without
    memory, the real model is built. Raises `JobError` as `build_model`.
    """
    torch.manual_seed(job.seed)
    try:
        model = _checked(deferred(job.model))
    except JobError:
        raise
    except Exception:  # an error of the model itself occurs again there
        return build_model(job)
    if job.weights is not None:
        stored = StoredWeights(job.weights)
        set_sources(model, StoredSources(model, stored, sources_of(model)))
    return model


def _checked(made: object) -> nn.Module:
    """`made`, a result of `Job.model`; raises `JobError` unless it has trainable parameters."""
    if not isinstance(made, nn.Module):
        raise JobError(f"Job.model returned a {type(made).__name__}; it must return an nn.Module")
    if not any(p.requires_grad for p in made.parameters()):
        raise JobError(
            f"Job.model returned a {type(made).__name__} without parameters that require a"
            " gradient, so there is nothing to train"
        )
    return made


def optimizer_name(job: Job, model: nn.Module) -> str:
    """The name in plans of the job's optimizer, such as `adamw` or `sgd_momentum`.

    That of a job without one is the default of plans.

    Raises `JobError` if the optimizer cannot be built for `model`, and `OptimizerError` if it is
    not known.
    """
    if job.optimizer is None:
        return DEFAULTS.optimizer
    try:
        made = job.optimizer([_on_a_device(p) for p in model.parameters()])
    except Exception as e:
        raise JobError(f"Job.optimizer raised {_raised(e)}") from e
    if not isinstance(made, torch.optim.Optimizer):
        raise JobError(
            f"Job.optimizer returned a {type(made).__name__}; it must return an optimizer of"
            " torch.optim"
        )
    return known_optimizer(made)


def _on_a_device(parameter: nn.Parameter) -> nn.Parameter:
    """`parameter`, or one of its shape on the CPU that takes no memory if it is on the meta device.

    Fused optimizers refuse parameters on the meta device.
    """
    if not parameter.is_meta:
        return parameter
    values = torch.zeros((), dtype=parameter.dtype, device="cpu").expand(parameter.shape)
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


def _raised(error: Exception) -> str:
    """An error in one line, with the last line outside of this file in its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    where = next((f for f in reversed(frames) if f.filename != __file__), None)
    at = f" at {where.filename}:{where.lineno}" if where else ""
    return f"{type(error).__name__}{at}: {' '.join(str(error).split())}"


def _file_job(found: FunctionTarget) -> Job:
    file, function, given = found.file, found.function, found.given
    module = _run_file(file)
    make = getattr(module, function, None)
    if not callable(make):
        raise TargetError(f"{file} has no function {function}; it needs one that returns a Job")
    takes = inspect.signature(make).parameters
    for name in given:
        if name not in takes:
            raise TargetError(unknown_setting(f"{file}:{function}", name, takes, "argument"))
    try:
        job = make(**given)
    except JobError as e:
        raise TargetError(f"{file}:{function}: {e}") from e
    except (Exception, SystemExit) as e:
        raise TargetError(f"{file}:{function} raised {_cause(e, file)}") from e
    if not isinstance(job, Job):
        raise TargetError(
            f"{file}:{function} returned a {type(job).__name__}; it must return a shardwright.Job"
        )
    return job


def _run_file(file: Path) -> ModuleType:
    """Import `file`, with its folder at the front of `sys.path`, as for `python file`."""
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = file.stem if file.stem not in sys.modules else f"{file.stem}__target"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up the module of a class by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:
        del sys.modules[name]
        raise TargetError(f"{file} cannot be imported: {_cause(e, file)}") from e
    return module


def _cause(error: BaseException, file: Path) -> str:
    """The error, with the last line of the user's file in its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if Path(f.filename).resolve() == file.resolve()]
    where = f" at line {lines[-1]}" if lines else ""
    return f"{type(error).__name__}{where}: {error}"
