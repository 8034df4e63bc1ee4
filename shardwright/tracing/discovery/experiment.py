"""Derives the rule of an operator by running it on a whole input and on two tiles of it.

The method is that of EasyDist (ShardCombine): where the concatenation or the sum of the tiles'
results equals the result of the whole input, the split is a factor of the operator. Gradients are
compared too. Distinct sizes are replaced by small distinct sizes, so that no dimension is
mistaken for another; an operator that rejects those is run at its original sizes, if they are small
enough. A split is rejected if it fails for any sample that the operator accepts (`samples`),
because the behaviour of an operator may depend on its data. Samples differ in the position of the
cut, out of three, and are tried at a second set of sizes if the operator accepts one.

Numeric arguments are part of the call, and a rule holds for one call. Differences from EasyDist:
results that recombine as a maximum are not used, because no placement expresses a maximum, and
operators are not tested for linearity in partial sums.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from shardwright.ir.graph import Graph, Op, Tensor
from shardwright.tracing.call import CaptureError
from shardwright.tracing.discovery.samples import domains_of
from shardwright.tracing.discovery.trial import Cut, Trial, TrialCall

# First twice a prime each, so that none divides another; then smaller ones, for many dimensions.
_SIZES = ((6, 10, 14, 22, 26, 34, 38, 46), (3, 4, 5, 6, 7, 8, 9, 10))
_LARGEST = 2**16  # elements of all operands of an experiment
_LARGEST_ABOVE = 2**21  # the same, where sizes must exceed a number
_PATIENCE = 60  # seconds for one operator, at all sizes
_HARSH_PATIENCE = 10  # further seconds, for samples that may crash native code

Finding = tuple[Trial, list[Cut]] | CaptureError | None  # None: the call does not run
Search = Callable[[TrialCall, bool], Finding]  # of a call, and whether autograd works


def discover(op: Op, graph: Graph, least: int = 0) -> str | None:
    """The rule of a call `op` of `graph` in index notation, found by experiment.

    Returns None where nothing can be split, or where the call runs at no sizes that are tried. Each
    trial runs in a process of its own, because a kernel may crash at sizes that it does not expect;
    other sizes are tried then. Sizes up to `least` are unchanged and other sizes stay above it,
    because the operator may compare sizes with numbers. Raises `CaptureError` for an operator that
    is not torch's own and returns different results for equal calls.
    """
    return first_notation(op, graph, _splits, least)


def first_notation(op: Op, graph: Graph, search: Search, least: int = 0) -> str | None:
    """The notation that `search` finds at the first sizes and precision at which the call runs.

    Returns None where the call never runs, and where `search` finds no splits. Raises the
    `CaptureError` that `search` returns. For `least` see `discover`.
    """
    described = {name: graph.tensor[name] for name in op.operands}
    dims = [len(graph.tensor[name].shape) for name in op.outputs]
    end = time.monotonic() + _PATIENCE
    for sizes in _trials(tuple(described.values()), least):
        for wide in (torch.float64, torch.float32):
            call = TrialCall(op, described, sizes, wide, dims, least)
            found = _in_a_process(end - time.monotonic(), search, call)
            if isinstance(found, CaptureError):
                raise found
            if found is not None:
                return found or None
    return None


def _in_a_process(seconds: float, search: Search, call: TrialCall) -> str | CaptureError | None:
    """The notation that `search` finds in a forked process; empty if nothing can be split.

    Returns None if the call does not run, or if the process died or took more than `seconds`.
    """
    context = multiprocessing.get_context(
        "fork"
    )  # a forked process has the user's operators registered
    answer, ask = context.Pipe(duplex=False)
    child = context.Process(target=_send_answers, args=(ask, search, call), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # about threads, which the child does not use
        child.start()
    ask.close()
    found, gradients_left = _received(answer, seconds, (None, False))
    if found and isinstance(found, str) and not gradients_left:
        found, _ = _received(answer, _HARSH_PATIENCE, (found, False))
    child.kill()
    child.join()
    if not gradients_left:
        return found
    # The child made the same calls without a crash; here they are made again, with gradients.
    with torch.random.fork_rng(devices=()):
        try:
            return _notation(search(call, True))
        except Exception:  # a user's backward pass, which would have ended the child process
            return None


def _received(
    answer: Any, seconds: float, otherwise: tuple[str | CaptureError | None, bool]
) -> tuple[str | CaptureError | None, bool]:
    """The next answer of the process, or `otherwise` if it died or takes more than `seconds`."""
    try:
        return answer.recv() if answer.poll(max(0, seconds)) else otherwise
    except EOFError:  # it died
        return otherwise


def _send_answers(ask: Any, search: Search, call: TrialCall) -> None:
    """Send the notation that `search` finds, and whether gradients are still to be compared.

    If splits were found and gradients compared, then send the notation of those that also hold for
    the samples that may crash native code, unless such a crash ends the process.
    """
    torch.set_num_threads(1)  # the parent's threads do not exist here
    faulthandler.disable()  # the parent expects crashes
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # messages of a crash are not shown
        differentiates = _differentiates()
        found = search(call, differentiates)
        ask.send((_notation(found), isinstance(found, tuple) and not differentiates))
        if isinstance(found, tuple) and found[1] and differentiates:
            trial, cuts = found
            with torch.inference_mode(False), torch.enable_grad():
                left = [cut for cut in cuts if trial.passes_harsh_samples(cut)]
            ask.send((_notation((trial, left)), False))


def _differentiates() -> bool:
    """Whether autograd works in this forked process.

    On hosts with accelerators autograd uses threads of the devices, which a fork does not copy, and
    torch raises an error.
    """
    if torch.accelerator.is_available():
        return False
    try:
        with torch.inference_mode(False), torch.enable_grad():
            (torch.zeros(1, requires_grad=True) * 1).backward()
    except RuntimeError:
        return False
    return True


def _notation(found: Finding) -> str | CaptureError | None:
    """The text of a finding, empty if nothing can be split, None if the call does not run."""
    return (found[0].text(found[1]) if found[1] else "") if isinstance(found, tuple) else found


def first_running_trial(call: TrialCall, differentiates: bool) -> Trial | None:
    """The call in the first domain in which it runs; None if there is none."""
    for domain in domains_of(call.op.kind):
        trial = Trial(call, domain, differentiates)
        if trial.runs():
            return trial
    return None


def _splits(call: TrialCall, differentiates: bool) -> Finding:
    """The splits that recombine at the sizes of `call` and at the next sizes that the call accepts.

    Returns None if the call does not run, and the `CaptureError` of an unusable operator.
    """
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
        ):  # also where the caller disabled gradients
            trial = first_running_trial(call, differentiates)
            if trial is None:
                return None
            cuts = trial.cuts()
            for sizes in _trials(tuple(call.described.values()), call.least):
                if cuts and sizes != call.sizes:
                    again = Trial(replace(call, sizes=sizes), trial.domain, differentiates)
                    if again.runs():
                        cuts = [cut for cut in cuts if again.recombines(cut.operand_dims) == cut]
                        break
            return trial, cuts
    except CaptureError as e:
        return e


def _trials(tensors: Sequence[Tensor], least: int = 0) -> Iterator[dict[int, int]]:
    """Maps from the sizes of `tensors` to the sizes of a trial, in the order to try.

    First small sizes replace the given ones, then the given ones are kept, each if the operands
    are small enough. Sizes up to `least` are unchanged, and small sizes are larger than it.
    """
    known = sorted({size for tensor in tensors for size in tensor.shape if size > 1})
    fixed = [size for size in known if size <= least]
    others = [size for size in known if size > least]
    largest = _LARGEST if least < 2 else _LARGEST_ABOVE
    for smallest in _SIZES:
        small = [n for n in (*smallest, *_above(least)) if n > least and n not in fixed]
        if least < 2 and len(known) > len(smallest):
            continue
        sizes = {**dict(zip(others, small, strict=False)), **{n: n for n in fixed}}
        if _elements(tensors, sizes) <= largest:
            yield sizes
    if _elements(tensors, {}) <= largest:
        yield {size: size for size in known}


def _above(least: int) -> list[int]:
    """Eight even sizes above `least`; none of them divides another if `least` is above 12."""
    return [least + least % 2 + 2 * n for n in range(1, 9)] if least > 1 else []


def _elements(tensors: Sequence[Tensor], sizes: Mapping[int, int]) -> int:
    return sum(prod(sizes.get(size, size) for size in tensor.shape) for tensor in tensors)
