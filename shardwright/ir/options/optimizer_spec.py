"""Values that describe an optimizer: its state, the work and the memory of an update.

Most optimizers treat each element of a parameter alike. Some compute with whole matrices, as Muon
and Shampoo do: `MatrixUpdate` says how.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

Shape = tuple[int, ...]
OfMatrix = Callable[[int, int], int]  # of its rows and columns


def _none(_rows: int, _columns: int) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class MatrixUpdate:
    """The update of a parameter of two dimensions by an optimizer that needs it whole.

    Every rank gathers what it has a tile of, and computes with the whole matrix.

    * `torch_class`: the class of `torch.optim` for these parameters; empty: that of the others;
    * `state_tensors`: tensors of the parameter's tile that it keeps;
    * `passes`: how often its operators on tiles read or write their elements;
    * `calls`: operators on whole matrices that one update runs;
    * `flop`: of these operators;
    * `temporaries`: elements of whole matrices that are alive at once;
    * `kept`: further elements of state, of which each rank has all;
    * `dtype`: of the whole matrices; empty: the parameter's.
    """

    torch_class: str
    state_tensors: int
    passes: int
    calls: int
    flop: OfMatrix
    temporaries: OfMatrix
    kept: OfMatrix = _none
    dtype: str = ""
    options: Mapping[str, float] = field(default_factory=dict)


class Implementation(Enum):
    """The ways in which `torch.optim` runs an update, by the argument that asks for them."""

    DEFAULT = ""  # FOREACH of plain tensors on a GPU, LOOP of others: on CPUs, and of DTensors
    LOOP = "loop"  # one operator after the other, of each parameter (`foreach=False`)
    FOREACH = "foreach"  # one operator after the other, each of all parameters
    FUSED = "fused"  # all operators in one kernel, which has no temporaries


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
      added to gradients;
    * `matrix`: the update of parameters of two dimensions, where it is another one;
    * `implementation`: how torch runs the update;
    * `keeps_gradients`: whether gradients have buffers of their own that are never freed, of the
      size in which a rank sums them, as in Megatron-LM;
    * `on_host`: whether the state is kept in the memory of the host, and copied to the device and
      back for the update, group by group;
    * `by_host`: whether parameters, gradients and state are all there, and the host updates them.
    """

    name: str
    torch_class: str
    state_tensors: int
    calls: int
    passes: int
    temporaries: int = 0
    foreach_temporaries: int = 0
    options: Mapping[str, float] = field(default_factory=lambda: {"lr": 1e-3})
    matrix: MatrixUpdate | None = None
    implementation: Implementation = Implementation.DEFAULT
    keeps_gradients: bool = False
    on_host: bool = False
    by_host: bool = False

    @property
    def offload(self) -> tuple[str, ...]:
        """Its values that are on the host, as `offload` of a `Strategy` names them."""
        if self.by_host:
            return ("optimizer", "parameters")
        return ("optimizer",) if self.on_host else ()

    @property
    def fused_passes(self) -> int:
        """Passes of a fused update over the elements of a parameter, each read or write one."""
        return 3 + 2 * self.state_tensors

    def runs(self, *, plain: bool, on_gpu: bool) -> Implementation:
        """The implementation for parameters that are `plain` tensors, or DTensors if not."""
        if self.implementation is not Implementation.DEFAULT:
            return self.implementation
        return Implementation.FOREACH if plain and on_gpu else Implementation.LOOP

    def matrix_of(self, shape: Shape) -> MatrixUpdate | None:
        """The update of a parameter of this shape, if it is one of whole matrices."""
        return self.matrix if len(shape) == 2 else None

    def tensors_of(self, shape: Shape) -> int:
        """The tensors of its tile that are kept for a parameter of this shape."""
        matrix = self.matrix_of(shape)
        return self.state_tensors if matrix is None else matrix.state_tensors

    def resident_of(self, shape: Shape) -> int:
        """The tensors of its tile that are kept in the memory of the device."""
        return 0 if self.offload else self.tensors_of(shape)

    def kept_of(self, shape: Shape) -> int:
        """Further elements that every rank keeps for a parameter of this shape, if it has a tile.

        >>> OptimizerSpec("sgd", "SGD", 0, 1, 3).kept_of((3, 4))
        0
        """
        matrix = self.matrix_of(shape)
        return 0 if matrix is None else matrix.kept(*shape)
