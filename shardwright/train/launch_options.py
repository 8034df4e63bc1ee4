"""Options with which the ranks of a run are started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """Options of checkpoints.

    * `folder`: the folder of the checkpoints;
    * `every`: the number of steps between two checkpoints;
    * `keep`: the number of latest checkpoints that are kept;
    * `wait`: whether steps wait until a checkpoint is written.
    """

    folder: str
    every: int = 100
    keep: int = 3
    wait: bool = False

    def arguments(self) -> list[str]:
        """The worker's command-line arguments."""
        numbers = ["--every", str(self.every), "--keep", str(self.keep)]
        waits = ["--wait-for-saves"] if self.wait else []
        return ["--checkpoint", _absolute(self.folder), *numbers, *waits]


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """Options of a run; None means the value of the job, or the worker's default.

    * `steps`: the number of steps;
    * `saving`: options of checkpoints, None for none; the ranks resume from the latest one;
    * `max_restarts`: how often torchrun restarts the ranks if one fails, finishes no step for
      `stall_timeout` seconds, or takes longer than `start_timeout` seconds for a part of its start;
    * `weights`: initial weights, a `.safetensors` file or a folder;
    * `export`: the `.safetensors` file or folder for the final weights;
    * `compiled`: whether steps run through `torch.compile`; the job may also say so;
    * `tune_host`: whether ranks on CPUs change how the host runs them (`parallelize`);
    * `tensorboard`: a folder for event files of TensorBoard;
    * `traced`: whether one rank of each stage writes a trace of one step.
    """

    steps: int | None = None
    saving: SaveOptions | None = None
    max_restarts: int = 0
    stall_timeout: float | None = None
    start_timeout: float | None = None
    weights: str | None = None
    export: str | None = None
    compiled: bool = False
    tune_host: bool = False
    tensorboard: str | None = None
    traced: bool = False

    def arguments(self) -> list[str]:
        """The worker's command-line arguments without those of the trace."""
        found = self.saving.arguments() if self.saving is not None else []
        for option, number in (
            ("--steps", self.steps),
            ("--stall-timeout", self.stall_timeout),
            ("--start-timeout", self.start_timeout),
        ):
            found += [option, str(number)] if number is not None else []
        for option, path in (
            ("--weights", self.weights),
            ("--export", self.export),
            ("--tensorboard", self.tensorboard),
        ):
            found += [option, _absolute(path)] if path is not None else []
        found += ["--compile"] if self.compiled else []
        return [*found, "--tune-host"] if self.tune_host else found


DEFAULTS = LaunchOptions()


def _absolute(path: str) -> str:
    return str(Path(path).absolute())
