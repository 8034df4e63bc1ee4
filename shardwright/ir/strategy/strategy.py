"""`Strategy`: how a model is trained in parallel, in the words of the frameworks.

A strategy is uniform: every layer does the same. Its text is one line of words, each a field whose
value is not its default, as `dp_shard=8 tp=8 pp=2:Interleaved1F1B/v2 mb=16 ac=full bf16`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from shardwright.ir.options.fp8 import recipe_of
from shardwright.ir.options.numerics import Numerics
from shardwright.ir.schedules.registry import SCHEDULES
from shardwright.ir.strategy.fields import (
    AXES,
    COMPILES,
    CP_STYLES,
    LOSSES,
    MLPS,
    POSSIBLE,
    lacking,
)
from shardwright.ir.strategy.recompute import NONE, Recompute, StrategyError
from shardwright.ir.strategy.text import read, written


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Sizes of a model that limit degrees; None where one is not known or does not exist.

    Attributes:
        batch: samples of the global batch.
        sequence: tokens of a sample.
        heads: query heads of attention.
        key_value_heads: key and value heads of attention.
        layers: repeated layers.
        experts: experts of a mixture.
    """

    batch: int | None = None
    sequence: int | None = None
    heads: int | None = None
    key_value_heads: int | None = None
    layers: int | None = None
    experts: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One uniform way to train: degrees of parallelism, storage, schedule, memory and dtypes.

    Attributes:
        dp_replicate: replicas of everything (DDP; the outer degree of HSDP).
        dp_shard: devices over which parameters, gradients and state are sharded (FSDP), as `zero`
            says. They are sharded over `cp` too.
        cp: devices over which the sequence of a sample is split in attention too.
        tp: devices over which the features of layers are split.
        pp: pipeline groups.
        ep: devices over which experts are split, on ranks of the other axes but `pp`.
        etp: devices over which the features of one expert are split; None: `tp` where `ep` is 1,
            else 1.
        order: the axes, outer to inner; ranks along the last are neighbours.
        zero: what the sharding of data parallelism holds: 0 nothing, 1 optimizer state, 2
            gradients too, 3 parameters too.
        reshard_after_forward: whether gathered parameters are freed after the forward pass and
            gathered again, with `zero` 3; None: yes without a pipeline.
        sequence_parallel: whether norms and dropout are split over the sequence along `tp`.
        async_tp: whether messages of `tp` run beside the matrix products that they feed or send, in
            chunks.
        ep_overlap: whether messages of experts run beside operators of another micro-batch.
        cp_style: how attention crosses the sequence: "ring-zigzag", "all-gather" or "ulysses".
        schedule: of the pipeline, a name in `ir/schedules`.
        virtual_stages: stages of each pipeline group.
        micro_batches: how many parts a step takes its global batch in.
        stage_cut: layers of each stage, from the first; None: equal in time.
        recompute: what is recomputed in the backward pass.
        offload: what is kept on the host: of "activations", "optimizer" and "parameters". Gradients
            and the optimizer's state are where parameters are.
        param_dtype: in which parameters are used; None: as the model was captured. So are the
            other dtypes.
        reduce_dtype: in which gradients are reduced.
        grad_dtype: in which gradients are kept.
        state_dtype: in which parameters and the optimizer's state are kept.
        fp8: scaling of matrix products in 8 bits, as "rowwise"; None: no such products.
        fp8_gather: whether shards of their weights are cast to 8 bits before they are gathered.
        compile: "off", or "regional": each layer is one compiled function.
        loss: "vocabulary-parallel" (split over `tp`), "whole", "chunked(n)", or "fused" with its
            projection, as Liger's kernels and cut cross entropy are: in chunks whose logits are as
            large as the hidden states. "vocabulary-parallel-fused" is Megatron-LM's loss in one
            kernel, which has the price of the first, and runs as it.
        mlp: "whole", or "chunked(n)": computed in n parts of a rank's rows.
        gradient_sync: gradients are reduced after the "last" or after "every" micro-batch; None:
            after every one where they are kept sharded (`zero` 2 and 3), else after the last.

    Raises `StrategyError` for a value that a field cannot have, and for fields that contradict
    each other.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    order: tuple[str, ...] = AXES
    zero: int = 3
    reshard_after_forward: bool | None = None
    sequence_parallel: bool = True
    async_tp: bool = False
    ep_overlap: bool = False
    cp_style: str = CP_STYLES[0]
    schedule: str = "1F1B"
    virtual_stages: int = 1
    micro_batches: int = 1
    stage_cut: tuple[int, ...] | None = None
    recompute: Recompute = field(default=NONE)
    offload: tuple[str, ...] = ()
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    grad_dtype: str | None = None
    state_dtype: str | None = None
    fp8: str | None = None
    fp8_gather: bool = False
    compile: str = COMPILES[0]
    loss: str = LOSSES[0]
    mlp: str = MLPS[0]
    gradient_sync: str | None = None

    def __post_init__(self) -> None:
        for name, possible in POSSIBLE.items():
            value = getattr(self, name)
            if not possible.holds(value):
                raise StrategyError(f"{name}={value!r} is not possible; give {possible.words}")
        self._require_consistent()

    def _require_consistent(self) -> None:
        """Raise `StrategyError` where two fields contradict each other."""
        ranks = self.devices // self.pp
        if ranks % (self.ep * self.expert_tensor):
            near = _near(self.ep, lambda n: ranks % (n * self.expert_tensor) == 0)
            raise StrategyError(
                f"ep={self.ep} x etp={self.expert_tensor} does not divide the {ranks} ranks of a"
                f" stage (dp_replicate x dp_shard x cp x tp); {_use('ep', near)}"
            )
        if self.pp == 1 and self.virtual_stages > 1:
            raise StrategyError(
                f"virtual_stages={self.virtual_stages} needs a pipeline; use pp=2 or more, or"
                " virtual_stages=1"
            )
        if self.pp > 1:
            self._require_schedule()
        for name, missing in lacking(self._fields).items():
            raise StrategyError(f"{name}=on needs {missing}; add that or leave {name} out")
        if self.stage_cut is not None and len(self.stage_cut) != self.stages:
            raise StrategyError(
                f"stage_cut names {len(self.stage_cut)} stages, and pp={self.pp} x"
                f" virtual_stages={self.virtual_stages} are {self.stages}"
            )

    def _require_schedule(self) -> None:
        schedule = SCHEDULES[self.schedule]
        each = schedule.stages_per_group
        if each is not None and self.virtual_stages != each:
            several = "Interleaved1F1B" if self.virtual_stages > 1 else "1F1B"
            other = self._pipeline(several, self.virtual_stages)
            raise StrategyError(
                f"schedule {self.schedule} has {each} stage{'s'[: each != 1]} per pipeline group,"
                f" not {self.virtual_stages}; use {self._pipeline(self.schedule, each)}, or {other}"
            )

        def runs(count: int) -> bool:
            return not schedule.needs(self.pp, self.stages, count)

        if not runs(self.micro_batches):
            wrong = schedule.needs(self.pp, self.stages, self.micro_batches)
            near = _near(self.micro_batches, runs)
            raise StrategyError(f"schedule {self.schedule} {wrong}; {_use('micro_batches', near)}")

    def _pipeline(self, schedule: str, each: int) -> str:
        """The word of a pipeline with `each` stages per group, as `parse` reads it."""
        return f"pp={self.pp}:{schedule}" + (f"/v{each}" if each > 1 else "")

    @property
    def _fields(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @property
    def devices(self) -> int:
        """The number of devices that the strategy uses."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    @property
    def stages(self) -> int:
        """The number of pipeline stages, virtual ones included."""
        return self.pp * self.virtual_stages

    @property
    def expert_tensor(self) -> int:
        """`etp`, or what it is where none is given."""
        return self.etp if self.etp is not None else (self.tp if self.ep == 1 else 1)

    @property
    def reshards(self) -> bool:
        """Whether parameters are gathered again in the backward pass."""
        again = self.reshard_after_forward
        return self.zero == 3 and (self.pp == 1 if again is None else again)

    @property
    def syncs_every(self) -> bool:
        """Whether gradients are reduced after every micro-batch; by default if they are sharded."""
        if self.gradient_sync is not None:
            return self.gradient_sync == "every"
        return self.zero >= 2 and self.dp_shard * self.cp > 1

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The axes of more than one device with their degrees, outer to inner.

        >>> Strategy.parse("dp_shard=8 tp=4").axes
        (('dp_shard', 8), ('tp', 4))
        """
        return tuple((name, getattr(self, name)) for name in self.order if getattr(self, name) > 1)

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """The strategy of a line; raises `StrategyError`, naming the word that cannot be read.

        >>> Strategy.parse("dp_shard=8 pp=2:Interleaved1F1B/v2 mb=16 ac=full bf16").stages
        4
        """
        return cls(**read(text))

    def __str__(self) -> str:
        given = {
            one.name: value
            for one in fields(self)
            if (value := getattr(self, one.name)) != one.default
        }
        return written(given) or "dp_shard=1"

    def in_form(self, numerics: Numerics) -> Strategy:
        """The strategy with the chunks of loss and MLPs and the recipe in 8 bits of a graph."""
        counts = {"loss": numerics.loss_chunks, "mlp": numerics.mlp_chunks}
        changes = {name: f"chunked({count})" for name, count in counts.items() if count > 1}
        found, recipe = self.but(**changes), recipe_of(numerics.fp8)
        if recipe is None:
            return found
        return found.in_8_bit(recipe.name, gathers=recipe.gathers)

    def in_8_bit(self, recipe: str | None, *, gathers: bool) -> Strategy:
        """The strategy with a recipe that, where parameters are sharded, `gathers` in 8 bits."""
        found = self.but(fp8=recipe, fp8_gather=False)
        return found.switched_on("fp8_gather") if gathers else found

    def switched_on(self, name: str) -> Strategy:
        """The strategy with a field of `strategy/dependent.py` on, if it has what that needs."""
        return self if lacking({**self._fields, name: True}) else self.but(**{name: True})

    def require(self, devices: int, limits: ModelLimits) -> None:
        """Raise `StrategyError` where a degree does not fit the machine or the model.

        The message names the nearest degrees that do.
        """
        self.require_devices(devices)
        for name, what, size, fits in self._model_rules(limits):
            degree = getattr(self, name)
            if size is not None and not fits(degree, size):
                near = _near(degree, partial(_flipped, fits, size))
                raise StrategyError(
                    f"{name}={degree} does not fit {size} {what}; {_use(name, near)}"
                )

    def require_devices(self, devices: int) -> None:
        """Raise `StrategyError`, with the nearest degrees, unless it uses so many devices."""
        if self.devices != devices:
            self._refuse_devices(devices)

    def _refuse_devices(self, devices: int) -> None:
        product = " x ".join(f"{name}={degree}" for name, degree in self.axes) or "dp_shard=1"
        legal = []
        for name in ("dp_shard", "dp_replicate", "pp", "tp"):
            rest = self.devices // getattr(self, name)
            if devices % rest == 0:
                legal.append(f"{name}={devices // rest}")
        for name in ("tp", "dp_shard") if not legal else ():
            near = _near(getattr(self, name), lambda n: devices % n == 0)
            legal += [f"{name} {' or '.join(map(str, near))}"]
        raise StrategyError(
            f"{product} is {self.devices} device{'s'[: self.devices != 1]} and the machine has"
            f" {devices}; use {', or '.join(legal)}"
        )

    def _model_rules(
        self, limits: ModelLimits
    ) -> Iterable[tuple[str, str, int | None, Callable[[int, int], bool]]]:
        """Field, what it splits, how much of that there is, and whether a degree fits it."""
        data, twice = self.dp_replicate * self.dp_shard, 2 if self.cp_style == "ring-zigzag" else 1
        replicas, mb, each = self.dp_replicate, self.micro_batches, self.virtual_stages

        def divides(degree: int, size: int) -> bool:
            return size % degree == 0

        yield "tp", "attention heads", limits.heads, divides
        yield "tp", "key and value heads", limits.key_value_heads, divides
        yield "ep", "experts", limits.experts, divides
        yield "pp", f"layers in {each} x pp stages", limits.layers, lambda n, size: n * each <= size
        if self.cp > 1:
            what = "tokens of a sequence" + (" in two chunks each" if twice == 2 else "")
            yield "cp", what, limits.sequence, lambda n, size: size % (n * twice) == 0
        what = f"samples ({mb} micro-batches, {replicas} replicas)"
        yield "dp_shard", what, limits.batch, lambda n, size: size % (n * replicas * mb) == 0
        what = f"samples over {data} data-parallel ranks"
        yield "micro_batches", what, limits.batch, lambda n, size: size % (n * data) == 0

    def but(self, **changes: Any) -> Strategy:
        """The strategy with some fields changed; raises `StrategyError` as the class does.

        A field of `strategy/dependent.py` is off if what it needs is gone, unless it is among the
        changes.
        """
        off: dict[str, Any] = dict.fromkeys(
            lacking({**self._fields, **changes}).keys() - changes.keys(), False
        )
        return replace(self, **changes, **off)


def _near(degree: int, fits: Callable[[int], bool]) -> tuple[int, ...]:
    """The nearest smaller and the nearest larger number that fit; up to four times as large."""
    below = next((n for n in range(degree - 1, 0, -1) if fits(n)), None)
    above = next((n for n in range(degree + 1, 4 * degree + 1) if fits(n)), None)
    return tuple(n for n in (below, above) if n is not None)


def _flipped(fits: Callable[[int, int], bool], size: int, degree: int) -> bool:
    return fits(degree, size)


def _use(name: str, near: tuple[int, ...]) -> str:
    if not near:
        return f"no {name} does with the other degrees, change those"
    return "use " + " or ".join(f"{name}={n}" for n in near)


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, from 1 up.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(dict.fromkeys([*low, *(number // n for n in reversed(low))]))
