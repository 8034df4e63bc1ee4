"""Derives the rule of an operator by running it on a whole input and on two tiles of it.

EasyDist's idea (ShardCombine): where the tiles' results put together, by concatenation or by sum,
give the whole's result, that split is a factor of the operator. Gradients are compared too. Sizes
are small, uneven and distinct, so that dimensions do not pass for each other; where the operator
takes only the sizes it has, those. One failure in any sample (`samples`), at any of two sets of
sizes and three places of the cut, rejects a split: what an operator does may depend on its data.

Arguments that are numbers are part of the call, and a rule is for one call. Deviations: results
that recombine as a maximum are not used, since no placement says so, and operators are not tested
for letting partial sums through.
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
from shardwright.tracing.discovery.trial import Call, Cut, Trial

# Twice a prime each, so that sizes divide no other; and smaller ones, for many dimensions.
_SIZES = ((6, 10, 14, 22, 26, 34, 38, 46), (3, 4, 5, 6, 7, 8, 9, 10))
_LARGEST = 2**16  # elements of operands in an experiment
_LARGEST_ABOVE = 2**21  # where small sizes have to be above a number
_PATIENCE = 60  # seconds for one operator
_HARSH_PATIENCE = 10  # seconds more, for values that it may die of

Finding = tuple[Trial, list[Cut]] | CaptureError | None  # None: the call does not run
Search = Callable[[Call, bool], Finding]  # of a call, and whether autograd works


def discover(op: Op, graph: Graph, least: int = 0) -> str | None:
    """Index notation of a call, or None where nothing can be split or nothing can be run.

    Each trial runs in a process of its own: a kernel that is given sizes it
    does not expect may take the process with it, and then others are tried.
    Raises `CaptureError` for an operator that answers differently when asked again. Sizes up to
    `least` stay as they are and others stay above it: the operator may compare them with numbers.
    """
    return tried(op, graph, _splits, least)


def tried(op: Op, graph: Graph, search: Search, least: int = 0) -> str | None:
    """The notation that `search` finds at the first sizes and precision at which the call runs.

    Raises the `CaptureError` that it finds instead; None where nothing can be run.
    """
    described = {name: graph.tensor[name] for name in op.operands}
    dims = [len(graph.tensor[name].shape) for name in op.outputs]
    end = time.monotonic() + _PATIENCE
    for sizes in _trials(tuple(described.values()), least):
        for wide in (torch.float64, torch.float32):
            call = Call(op, described, sizes, wide, dims, least)
            found = _in_a_process(end - time.monotonic(), search, call)
            if isinstance(found, CaptureError):
                raise found
            if found is not None:
                return found or None
    return None


def _in_a_process(seconds: float, search: Search, call: Call) -> str | CaptureError | None:
    """The notation that `search` finds; None if the process died or took too long."""
    context = multiprocessing.get_context("fork")  # which knows the user's operators
    answer, ask = context.Pipe(duplex=False)
    child = context.Process(target=_send_answers, args=(ask, search, call), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which it does not use
        child.start()
    ask.close()
    found, gradients_left = _received(answer, seconds, (None, False))
    if found and isinstance(found, str) and not gradients_left:
        found, _ = _received(answer, _HARSH_PATIENCE, (found, False))
    child.kill()
    child.join()
    if not gradients_left:
        return found
    # All calls were made there and did no harm, so they and their gradients may be made here.
    with torch.random.fork_rng(devices=()):
        try:
            return _notation(search(call, True))
        except Exception:  # a user's backward pass, which would have ended the process there
            return None


def _received(
    answer: Any, seconds: float, otherwise: tuple[str | CaptureError | None, bool]
) -> tuple[str | CaptureError | None, bool]:
    """The next answer, or `otherwise` where the process died or takes too long."""
    try:
        return answer.recv() if answer.poll(max(0, seconds)) else otherwise
    except EOFError:  # it died
        return otherwise


def _send_answers(ask: Any, search: Search, call: Call) -> None:
    """Send the notation that `search` finds, and whether gradients are still to be compared.

    Then what is left of it under samples that native code may die of, if it gets that far.
    """
    torch.set_num_threads(1)  # those of the parent are not there
    faulthandler.disable()  # a crash here is an answer
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # last words
        differentiates = _differentiates()
        found = search(call, differentiates)
        ask.send((_notation(found), isinstance(found, tuple) and not differentiates))
        if isinstance(found, tuple) and found[1] and differentiates:
            trial, cuts = found
            with torch.inference_mode(False), torch.enable_grad():
                left = [cut for cut in cuts if trial.withstands(cut)]
            ask.send((_notation((trial, left)), False))


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


def _notation(found: Finding) -> str | CaptureError | None:
    """The text of a finding, empty if nothing can be split, None if the call does not run."""
    return (found[0].text(found[1]) if found[1] else "") if isinstance(found, tuple) else found


def running(call: Call, differentiates: bool) -> Trial | None:
    """The call in the first domain in which it runs."""
    for domain in domains_of(call.op.kind):
        trial = Trial(call, domain, differentiates)
        if trial.runs():
            return trial
    return None


def _splits(call: Call, differentiates: bool) -> Finding:
    """What recombines at these sizes, and at others too, where the operator runs at others."""
    try:
        with torch.inference_mode(False), torch.enable_grad():  # whatever the caller is in
            trial = running(call, differentiates)
            if trial is None:
                return None
            cuts = trial.cuts()
            for sizes in _trials(tuple(call.described.values()), call.least):
                if cuts and sizes != call.sizes:
                    again = Trial(replace(call, sizes=sizes), trial.domain, differentiates)
                    if again.runs():
                        cuts = [cut for cut in cuts if again.recombines(cut.places) == cut]
                        break
            return trial, cuts
    except CaptureError as e:
        return e


def _trials(tensors: Sequence[Tensor], least: int = 0) -> Iterator[dict[int, int]]:
    """Small sizes for the sizes there are; then those there are, if they are small enough.

    Sizes up to `least` stay as they are, and small sizes are larger than it.
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
    """Further sizes above `least`, of which none divides another."""
    return [least + least % 2 + 2 * n for n in range(1, 9)] if least > 1 else []


def _elements(tensors: Sequence[Tensor], sizes: Mapping[int, int]) -> int:
    return sum(prod(sizes.get(size, size) for size in tensor.shape) for tensor in tensors)
