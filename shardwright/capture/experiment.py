"""The rule of an operator, found out by running it: on a whole, and on two tiles of it.

EasyDist's idea (ShardCombine): where the tiles' results put together, by
concatenation or by sum, give the whole's result, that split is a factor of the
operator. Gradients are compared too. Sizes are small, uneven and distinct, so
that dimensions do not pass for each other; where the operator takes only the
sizes it has, those. What recombines by chance on one input does not on three.

Deviation: results that recombine as a maximum are not used, since no placement
says so, and operators are not tested for letting partial sums through.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import torch

from shardwright.capture.call import CaptureError
from shardwright.capture.operators import call_op
from shardwright.capture.recombine import equal, gradients, put_together
from shardwright.ir.graph import Arg, Graph, Op, Tensor

# Twice a prime each, so that sizes divide no other; and smaller ones, for many dimensions.
_SIZES = ((6, 10, 14, 22, 26, 34, 38, 46), (3, 4, 5, 6, 7, 8, 9, 10))
_SMALLEST_NAMED = 5  # an argument this large that equals a size is that size
_LARGEST = 2**16  # elements of operands in an experiment
_MOST_CANDIDATES = 256  # per size
_PATIENCE = 60  # seconds for one operator
_CPU = torch.device("cpu")

Place = tuple[str, int]  # an operand and a dimension of it


def discover(op: Op, graph: Graph) -> str | None:
    """Index notation of a call, or None where nothing can be split or nothing can be run.

    Each trial runs in a process of its own: a kernel that is given sizes it
    does not expect may take the process with it, and then others are tried.
    Raises `CaptureError` for an operator that answers differently when asked again.
    """
    described = {name: graph.tensor[name] for name in op.operands}
    if any("complex" in tensor.dtype for tensor in described.values()):
        return None
    dims = [len(graph.tensor[name].shape) for name in op.outputs]
    end = time.monotonic() + _PATIENCE
    for sizes in _trials(tuple(described.values())):
        for wide in (torch.float64, torch.float32):
            found = _in_a_process(end - time.monotonic(), op, described, sizes, wide, dims)
            if isinstance(found, CaptureError):
                raise found
            if found is not None:
                return found or None
    return None


def _in_a_process(seconds: float, *trial: Any) -> str | CaptureError | None:
    """What `_answer` finds; None if the process died or took too long."""
    context = multiprocessing.get_context("fork")  # which knows the user's operators
    answer, ask = context.Pipe(duplex=False)
    child = context.Process(target=_send_answer, args=(ask, *trial), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which it does not use
        child.start()
    ask.close()
    found: str | CaptureError | None
    try:
        found, gradients_left = answer.recv() if answer.poll(max(0, seconds)) else (None, False)
    except EOFError:  # it died
        found, gradients_left = None, False
    child.kill()
    child.join()
    if not gradients_left:
        return found
    # All calls were made there and did no harm, so they and their gradients may be made here.
    with torch.random.fork_rng(devices=()):
        try:
            return _answer(*trial, differentiates=True)
        except Exception:  # a user's backward pass, which would have ended the process there
            return None


def _send_answer(ask: Any, *trial: Any) -> None:
    """Send what `_answer` finds, and whether gradients are still to be compared."""
    torch.set_num_threads(1)  # those of the parent are not there
    faulthandler.disable()  # a crash here is an answer
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # last words
        differentiates = _differentiates()
        found = _answer(*trial, differentiates=differentiates)
        ask.send((found, isinstance(found, str) and not differentiates))


def _differentiates() -> bool:
    """Whether autograd works in this process, forked off another.

    Where there are accelerators it has threads for them, and torch refuses it without the parent's.
    """
    if torch.accelerator.is_available():
        return False
    try:
        with torch.inference_mode(False), torch.enable_grad():
            (torch.zeros(1, requires_grad=True) * 1).backward()
    except RuntimeError:
        return False
    return True


def _answer(
    op: Op,
    described: Mapping[str, Tensor],
    sizes: Mapping[int, int],
    wide: torch.dtype,
    dims: Sequence[int],
    *,
    differentiates: bool,
) -> str | CaptureError | None:
    """The notation, empty if nothing can be split, or None if the call does not run."""
    try:
        with torch.inference_mode(False), torch.enable_grad():  # whatever the caller is in
            trial = _Trial(op, described, sizes, wide, differentiates)
            return (trial.notation() or "") if trial.runs(dims) else None
    except CaptureError as e:
        return e


def _trials(tensors: Sequence[Tensor]) -> Iterator[dict[int, int]]:
    """Small sizes for the sizes there are; then those there are, if they are small enough."""
    known = sorted({size for tensor in tensors for size in tensor.shape if size > 1})
    for small in _SIZES:
        sizes = dict(zip(known, small, strict=False))
        if len(known) <= len(small) and _elements(tensors, sizes) <= _LARGEST:
            yield sizes
    if _elements(tensors, {}) <= _LARGEST:
        yield {size: size for size in known}


def _elements(tensors: Sequence[Tensor], sizes: Mapping[int, int]) -> int:
    return sum(prod(sizes.get(size, size) for size in tensor.shape) for tensor in tensors)


@dataclass(frozen=True)
class _Split:
    """A factor: the operand dimensions that are cut together, and per result what becomes of it.

    `results[i]` is (dimension, repeats) where tiles are concatenated, None where they are added.
    """

    places: tuple[Place, ...]
    results: tuple[tuple[int, int] | None, ...]


class _Trial:
    """One call at certain sizes and in one precision.

    Without autograd all calls are made, and no split recombines for certain.
    """

    def __init__(
        self,
        op: Op,
        described: Mapping[str, Tensor],
        sizes: Mapping[int, int],
        wide: torch.dtype,
        differentiates: bool,
    ) -> None:
        self.op = replace(
            op,
            args=tuple(_resized(a, sizes) for a in op.args),
            kwargs=tuple((key, _resized(value, sizes)) for key, value in op.kwargs),
        )
        self.wide, self.differentiates = wide, differentiates
        self.described = described
        self.shapes = {
            name: tuple(sizes.get(size, size) for size in tensor.shape)
            for name, tensor in described.items()
        }
        self.samples = [self._sample(seed) for seed in range(3)]
        self.wholes = [self._call(sample) for sample in self.samples]

    def _sample(self, seed: int) -> dict[str, torch.Tensor]:
        """Operands; the first sample is positive, the others around zero."""
        generator = torch.Generator(device="cpu").manual_seed(seed)
        sizes = [size for shape in self.shapes.values() for size in shape if size > 1]
        below = min(sizes, default=2)
        found = {}
        for name, tensor in self.described.items():
            shape = self.shapes[name]
            if tensor.dtype.startswith(("float", "bfloat")):
                drawn = torch.rand(shape, generator=generator, dtype=self.wide, device="cpu")
                drawn = 0.1 + 0.8 * drawn if seed == 0 else 4.0 * drawn - 2.0
                found[name] = drawn.requires_grad_(tensor.requires_grad)
            else:
                low = 1 if seed == 0 else 0
                drawn = torch.randint(low, below, shape, generator=generator, device="cpu")
                dtype = getattr(torch, tensor.dtype)
                found[name] = drawn > below // 2 if dtype == torch.bool else drawn.to(dtype)
        return found

    def runs(self, dims: Sequence[int]) -> bool:
        """Whether the operator takes these sizes and gives results of so many dimensions.

        Raises for an operator of the user's that is not a function of its operands.
        """
        first, again = self.wholes[0], self._call(self.samples[0])
        if first is None or again is None or [r.dim() for r in first] != list(dims):
            return False
        if all(equal(a, b) for a, b in zip(first, again, strict=True)):
            return True
        if self.op.target.startswith("aten."):
            return False
        raise CaptureError(
            f"{self.op.source}: {self.op.target} gives another result when it is called again;"
            " draw random numbers outside of it, with torch.rand"
        )

    def notation(self) -> str | None:
        """The notation of all splits that recombine; None if none does."""
        splits: list[_Split] = []
        taken: set[Place] = set()
        for places in self._candidates():
            if taken.intersection(places):
                continue
            split = self._recombines(places)
            if split is None:
                continue
            outputs = {
                (f"result {i}", at[0]) for i, at in enumerate(split.results) if at is not None
            }
            if not taken.intersection(outputs):
                taken.update(places, outputs)
                splits.append(split)
        return self._text(splits) if splits else None

    def _candidates(self) -> Iterator[tuple[Place, ...]]:
        """Sets of equally long operand dimensions, at most one an operand, small sets first."""
        for size in sorted({n for shape in self.shapes.values() for n in shape if n > 1}):
            options: list[list[Place | None]] = [
                [None, *((name, d) for d, n in enumerate(shape) if n == size)]
                for name, shape in self.shapes.items()
            ]
            found = [
                tuple(p for p in pick if p is not None)
                for pick in _some(product(*options), _MOST_CANDIDATES)
            ]
            yield from sorted((places for places in found if places), key=len)

    def _recombines(self, places: tuple[Place, ...]) -> _Split | None:
        """The split along `places`, if every sample says so and all say the same."""
        verdicts = []
        for sample, whole in zip(self.samples, self.wholes, strict=True):
            if whole is None:
                continue
            verdict = self._compare(sample, whole, dict(places))
            if verdict is None:
                return None
            verdicts.append(verdict)
        return _Split(places, verdicts[0]) if len(set(verdicts)) == 1 else None

    def _compare(
        self,
        sample: Mapping[str, torch.Tensor],
        whole: Sequence[torch.Tensor],
        cut: Mapping[str, int],
    ) -> tuple[tuple[int, int] | None, ...] | None:
        """What becomes of each result, or None where tiles do not make the whole."""
        size = next(sample[name].shape[dim] for name, dim in cut.items())
        length = (2 * size + 2) // 3
        if length == size:
            return None
        tiles: list[dict[str, torch.Tensor]] = [{}, {}]
        for name, value in sample.items():
            parts = value.split((length, size - length), cut[name]) if name in cut else [value] * 2
            for tile, part in zip(tiles, parts, strict=True):
                tile[name] = part.detach().clone().requires_grad_(value.requires_grad)
        one, other = (self._call(tile) for tile in tiles)
        if one is None or other is None:
            return None
        found: list[tuple[int, int] | None] = []
        for result, a, b in zip(whole, one, other, strict=True):
            verdict = put_together(result, a, b, size, length)
            if verdict == "neither":
                return None
            found.append(None if isinstance(verdict, str) else verdict)
        if not self.differentiates:
            return None
        # What the results are weighed with: each element differently, on tiles as on the whole.
        weights = [torch.linspace(0.5, 1.5, w.numel()).view(w.shape).to(w.dtype) for w in whole]
        halves = [
            [w, w]
            if at is None
            else list(w.split((length * at[1], (size - length) * at[1]), at[0]))
            for w, at in zip(weights, found, strict=True)
        ]
        expected = gradients(whole, weights, sample)
        mine = [
            gradients(results, [half[i] for half in halves], tile)
            for i, (results, tile) in enumerate(zip((one, other), tiles, strict=True))
        ]
        if any(one.keys() != expected.keys() for one in mine):
            return None  # tiles have no derivative where the whole has one
        for name, gradient in expected.items():
            a, b = (one[name] for one in mine)
            if not equal(gradient, torch.cat([a, b], cut[name]) if name in cut else a + b):
                return None
        return tuple(found)

    def _call(self, values: Mapping[str, torch.Tensor]) -> list[torch.Tensor] | None:
        try:
            results = call_op(self.op, values, _CPU)
        except Exception:  # whatever it dislikes: these sizes, these tiles, this precision
            return None
        return results if all(isinstance(r, torch.Tensor) for r in results) else None

    def _text(self, splits: Sequence[_Split]) -> str:
        words = {
            name: [f"w{o}d{d}!" for d in range(len(shape))]
            for o, (name, shape) in enumerate(self.shapes.items())
        }
        whole = self.wholes[0] or []
        results = [[f"r{i}d{d}!" for d in range(one.dim())] for i, one in enumerate(whole)]
        for number, split in enumerate(splits):
            for name, dim in split.places:
                words[name][dim] = f"f{number}"
            for i, at in enumerate(split.results):
                if at is not None:
                    dim, repeats = at
                    word = f"f{number}"
                    results[i][dim] = word if repeats == 1 else f"({word} q{number}_{i}!)"
        left = ", ".join(" ".join(words[name]) for name in self.op.operands)
        return f"{left} -> {', '.join(' '.join(one) for one in results)}"


def _resized(arg: Arg, sizes: Mapping[int, int]) -> Arg:
    if isinstance(arg, tuple):
        return tuple(_resized(a, sizes) for a in arg)
    if isinstance(arg, int) and not isinstance(arg, bool) and arg >= _SMALLEST_NAMED:
        return sizes.get(arg, arg)
    return arg


def _some(
    picks: Iterator[tuple[Place | None, ...]], most: int
) -> Iterator[tuple[Place | None, ...]]:
    for pick, _ in zip(picks, range(most), strict=False):
        yield pick
