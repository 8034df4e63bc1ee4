"""Optimizers that a step can be planned with.

The counts are those of `torch.optim`; tests read them off torch again. A new optimizer is one more
entry, or a file of its own, or an `OptimizerSpec` of the user's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from shardwright.ir.options.muon import MUON
from shardwright.ir.options.optimizer_spec import Implementation, OptimizerSpec


class OptimizerError(ValueError):
    """An optimizer whose memory and update are unknown."""


_MOMENTUM = {"lr": 1e-2, "momentum": 0.9}
_SPECS = (
    OptimizerSpec("sgd", "SGD", 0, 1, 3, options={"lr": 1e-2}),
    OptimizerSpec("momentum", "SGD", 1, 3, 8, options=_MOMENTUM),
    OptimizerSpec("sgd_momentum", "SGD", 1, 3, 8, options=_MOMENTUM),
    OptimizerSpec("adam", "Adam", 2, 7, 19, 2, 1),
    OptimizerSpec("adamw", "AdamW", 2, 8, 21, 2, 1),
    OptimizerSpec("nadam", "NAdam", 2, 8, 23, 2, 1),
    OptimizerSpec("radam", "RAdam", 2, 12, 29, 5, 1),
    OptimizerSpec("adamax", "Adamax", 2, 6, 17, 1, 1),
    OptimizerSpec("adagrad", "Adagrad", 1, 4, 12, 1, 2, options={"lr": 1e-2}),
    OptimizerSpec("rmsprop", "RMSprop", 1, 5, 14, 1, 1),
    MUON,
)
OPTIMIZERS: Mapping[str, OptimizerSpec] = {spec.name: spec for spec in _SPECS}
# Classes that read and write no state but that of each parameter, nor their own `param_groups`.
SEPARATE = frozenset(spec.torch_class for spec in _SPECS if spec.matrix is None)
_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")  # classes that have a kernel for the whole update
_FUSED_ON_CPU = ("Adagrad",)  # of these, those that have none for NVIDIA GPUs
_ASKED: Mapping[str, tuple[str, ...]] = {
    spec.name: ("loop", "foreach", *(["fused"] if spec.torch_class in _FUSED else []))
    if spec.matrix is None
    else ()
    for spec in _SPECS
}
_USERS: dict[str, OptimizerSpec] = {}  # hold for the process that states them
# Behind the name of an optimizer whose state is offloaded, or that the host runs.
_ON_HOST, _BY_HOST = "_on_host", "_by_host"


def optimizer_spec(name: str) -> OptimizerSpec:
    """The optimizer of this name, in any case; raises `OptimizerError` for an unknown one.

    A name with `_fused`, `_foreach` or `_loop` behind it asks torch for that implementation.
    `placed` gives names of optimizers whose state is on the host.

    >>> optimizer_spec("AdamW").state_tensors
    2
    >>> optimizer_spec("adamw_fused").implementation
    <Implementation.FUSED: 'fused'>
    """
    found = _built_in(name.lower()) or _USERS.get(name.lower())
    if found is None:
        known = ", ".join(OPTIMIZERS)
        raise OptimizerError(
            f"optimizer {name!r} is not known; use one of {known}, to plan with the one whose"
            " state is most like it, or give an OptimizerSpec of your own"
        )
    return found


def by_tiles(spec: OptimizerSpec) -> bool:
    """Whether a rank updates its tiles as plain tensors, however many ranks there are.

    That is so of classes that update every element by itself.

    >>> by_tiles(optimizer_spec("adamw")), by_tiles(optimizer_spec("muon"))
    (True, False)
    """
    return spec.matrix is None and spec.torch_class in SEPARATE


def placed(name: str, offload: Collection[str]) -> str:
    """The name of the optimizer, with its state on the host if `offload` names the optimizer.

    If it names parameters, the host runs the optimizer. `offload` is as in `Strategy`. Raises
    `OptimizerError` for one whose state is not offloaded.

    >>> placed("adamw_fused", ("optimizer",)), placed("adamw_fused_on_host", ())
    ('adamw_fused_on_host', 'adamw_fused')
    >>> placed("adamw_on_host", ("optimizer", "parameters"))
    'adamw_by_host'
    """
    plain = name.removesuffix(_ON_HOST).removesuffix(_BY_HOST)
    what = "parameters" if "parameters" in offload else "optimizer"
    if what not in offload:
        return plain
    if not offloadable(plain):
        having = ", ".join(one.name for one in _SPECS if one.matrix is None)
        how = "copies to the device in parts" if what == "optimizer" else "keeps where no device is"
        raise OptimizerError(
            f"optimizer {plain} may need all of its state at once, which offload={what} {how};"
            f" leave that out, or use one of {having}"
        )
    return plain + (_BY_HOST if what == "parameters" else _ON_HOST)


def offloadable(name: str) -> bool:
    """Whether the state of the optimizer of this name, if there is any, may be kept on the host.

    Those of whole matrices, and those of users, may need all state at once.
    """
    return optimizer_spec(name).matrix is None and name.lower() not in _USERS


def _built_in(name: str) -> OptimizerSpec | None:
    for suffix in (_ON_HOST, _BY_HOST):
        if name.endswith(suffix):
            found = _built_in(name.removesuffix(suffix))
            if found is None:
                return None
            by_host = suffix == _BY_HOST
            return replace(found, name=name, on_host=not by_host, by_host=by_host)
    plain, _, word = name.rpartition("_")
    if word in _ASKED.get(plain, ()):
        return replace(OPTIMIZERS[plain], name=name, implementation=Implementation(word))
    return OPTIMIZERS.get(name)


def fused(name: str, *, on_gpu: bool) -> str | None:
    """The name of the same optimizer with an update in one kernel; None if torch has none.

    None, too, for the name of a fused optimizer.

    >>> [fused(name, on_gpu=True) for name in ("adamw", "adamw_loop", "adamw_fused", "adagrad")]
    ['adamw_fused', 'adamw_fused', None, None]
    """
    spec = optimizer_spec(name)
    on_cpu_alone = on_gpu and spec.torch_class in _FUSED_ON_CPU
    if spec.implementation is Implementation.FUSED or on_cpu_alone:
        return None
    plain = name.lower().removesuffix(f"_{spec.implementation.value}")
    return f"{plain}_fused" if "fused" in _ASKED.get(plain, ()) else None


def known_optimizer(given: object) -> str:
    """The name of an optimizer given by its name, as a class, an instance or an `OptimizerSpec`.

    A spec is known by its name from here on, in this process. Raises `OptimizerError` for an
    optimizer whose memory and update are not known.
    """
    if isinstance(given, OptimizerSpec):
        name = given.name.lower()
        if _built_in(name) is not None:
            raise OptimizerError(f"optimizer {name!r} is known already; give yours another name")
        _USERS[name] = given
    elif isinstance(given, str):
        name = given.lower()
    elif isinstance(given, type):
        name = given.__name__.lower()
    elif isinstance(defaults := getattr(given, "defaults", None), dict):
        name = type(given).__name__.lower()
        if name == "sgd" and defaults.get("momentum"):
            name = "sgd_momentum"
        name += _asked(name, defaults)
    else:
        raise OptimizerError(
            f"optimizer is a {type(given).__name__}; give a name as in optimizer='adamw', a class"
            " of torch.optim, or an optimizer"
        )
    return optimizer_spec(name).name


def _asked(name: str, defaults: Mapping[str, Any]) -> str:
    """The suffix of the implementation that the arguments of an optimizer ask for, if any."""
    foreach = defaults.get("foreach")
    words = {"fused": defaults.get("fused"), "foreach": foreach, "loop": foreach is False}
    known = _ASKED.get(name, ())
    return next((f"_{word}" for word, asked in words.items() if asked and word in known), "")
