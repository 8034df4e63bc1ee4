"""Optimizers that a step can be planned with: their state, the work and memory of an update.

The counts are those of `torch.optim`; tests read them off torch again. A new optimizer is one more
entry of `OPTIMIZERS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


class OptimizerError(ValueError):
    """An optimizer whose memory and update are unknown."""


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """One optimizer, as planning and `verify` need it.

    * `torch_class`, `options`: the class of `torch.optim` and the arguments with which `verify`
      takes a step;
    * `state_tensors`: tensors of the parameter's size and dtype that it keeps for each parameter;
    * `calls`, `passes`: operators that one parameter's update runs after the first step, and how
      often they read or write its elements (torch 2.13, one parameter after the other);
    * `temporaries`: tensors of the parameter's size that are alive at once in its update;
    * `foreach_temporaries`: the same of the size of all parameters where they are updated at once
      (`foreach`, torch's default for plain tensors on a GPU). Neither counts weight decay that is
      added to gradients.
    """

    name: str
    torch_class: str
    state_tensors: int
    calls: int
    passes: int
    temporaries: int = 0
    foreach_temporaries: int = 0
    options: Mapping[str, float] = field(default_factory=lambda: {"lr": 1e-3})


_MOMENTUM = {"lr": 1e-2, "momentum": 0.9}
_SPECS = (
    OptimizerSpec("sgd", "SGD", 0, 1, 3, options={"lr": 1e-2}),
    OptimizerSpec("momentum", "SGD", 1, 3, 8, options=_MOMENTUM),
    OptimizerSpec("sgd_momentum", "SGD", 1, 3, 8, options=_MOMENTUM),
    OptimizerSpec("adam", "Adam", 2, 7, 19, 2, 1),
    OptimizerSpec("adamw", "AdamW", 2, 8, 21, 2, 1),
    OptimizerSpec("nadam", "NAdam", 2, 8, 23, 2, 1),
    OptimizerSpec("radam", "RAdam", 2, 12, 29, 4, 2),
    OptimizerSpec("adamax", "Adamax", 2, 6, 17, 1, 1),
    OptimizerSpec("adagrad", "Adagrad", 1, 4, 12, 1, 1, options={"lr": 1e-2}),
    OptimizerSpec("rmsprop", "RMSprop", 1, 5, 14, 1, 1),
)
OPTIMIZERS: Mapping[str, OptimizerSpec] = {spec.name: spec for spec in _SPECS}


def optimizer_spec(name: str) -> OptimizerSpec:
    """The optimizer of this name, in any case; raises `OptimizerError` for an unknown one.

    >>> optimizer_spec("AdamW").state_tensors
    2
    """
    try:
        return OPTIMIZERS[name.lower()]
    except KeyError:
        known = ", ".join(OPTIMIZERS)
        raise OptimizerError(
            f"optimizer {name!r} is not known; use one of {known}, to plan with the one whose"
            " state is most like it"
        ) from None


def known_optimizer(given: object) -> str:
    """The name of an optimizer given by its name, as a class or as an instance.

    Raises `OptimizerError` for one whose memory and update are not known.
    """
    if isinstance(given, str):
        name = given.lower()
    elif isinstance(given, type):
        name = given.__name__.lower()
    elif isinstance(defaults := getattr(given, "defaults", None), dict):
        name = type(given).__name__.lower()
        if name == "sgd" and defaults.get("momentum"):
            name = "sgd_momentum"
    else:
        raise OptimizerError(
            f"optimizer is a {type(given).__name__}; give a name as in optimizer='adamw', a class"
            " of torch.optim, or an optimizer"
        )
    return optimizer_spec(name).name
