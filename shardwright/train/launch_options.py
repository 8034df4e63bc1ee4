"""Options of a run that its ranks are started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """Where ranks keep checkpoints, every how many steps, how many, and whether steps `wait`."""

    folder: str
    every: int = 100
    keep: int = 3
    wait: bool = False

    def arguments(self) -> list[str]:
        """What the worker is told."""
        numbers = ["--every", str(self.every), "--keep", str(self.keep)]
        waits = ["--wait-for-saves"] if self.wait else []
        return ["--checkpoint", _absolute(self.folder), *numbers, *waits]


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How a run goes; what is not given is the job's own, or the worker's default.

    * `steps`: to train;
    * `saving`: checkpoints, of which the ranks go on from the latest;
    * `max_restarts`: how often torchrun starts the ranks again if one dies, none has done a step
      for `stall_timeout` seconds, or a part of their start took `start_timeout` seconds;
    * `weights`: to start from, a `.safetensors` file or a folder;
    * `export`: where the weights are written at the end, a `.safetensors` file or a folder;
    * `compiled`: whether steps run through `torch.compile`;
    * `tune_host`: whether ranks on CPUs change how the host runs them (`parallelize`);
    * `tensorboard`: a folder for event files;
    * `traced`: whether one rank of each stage records a step.
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
        """What the worker is told, without the trace."""
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
