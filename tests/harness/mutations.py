"""Programs with one instruction deleted, or two swapped, and who notices: a check, or numbers."""

import random
from collections import Counter
from dataclasses import replace

import torch
import torch.distributed as dist

import shardwright as sw
from shardwright.ir.graph import VerifyError
from shardwright.program.step.instructions import (
    Accumulate,
    Backward,
    Free,
    Recv,
    Send,
    Transfer,
    Wait,
    reads,
    writes,
)
from shardwright.program.step.order import check_order
from shardwright.program.step.verify import verify
from shardwright.runtime.executor.call_program import CallProgram
from shardwright.runtime.executor.executor import StepExecutor
from shardwright.runtime.executor.whole_batch import WholeBatch
from tests.harness import models
from tests.harness.ranks import run_ranks

UNEXPLAINED = "unexplained"
TOLERANCE = 1e-9
# Strategies by number of ranks.
SUBJECTS = {
    2: ("dp_shard=2", "dp_shard=2 zero=2 mb=2", "dp_shard=2 mb=3", "tp=2 mb=2"),
    4: (
        "dp_replicate=2 dp_shard=2",
        "dp_shard=2 tp=2 mb=2",
        "pp=2 dp_shard=2 mb=2",
        "pp=2:Interleaved1F1B/v2 dp_shard=2 mb=2",
    ),
}


def subject():
    return models.small_llama(layers=5, hidden=16, heads=2, rows=12, length=6)


def campaign(mutations, seed, subjects):
    """How many changes who noticed, by strategy, and what nobody can explain."""
    model, batch = subject()
    graph = sw.capture(model, (), batch)
    plans = {
        world: {text: sw.price(graph, f"{world}xcpu", text, "sgd") for text in texts}
        for world, texts in subjects.items()
    }
    each = -(-mutations // sum(map(len, plans.values())))
    noticed, unexplained = {}, []
    for world, some in plans.items():
        found, *others = run_ranks(world, _changed, some, each, seed, timeout=1800)
        assert all(other == found for other in others), "ranks see the same"
        for text, verdicts in found.items():
            noticed[text] = dict(Counter(who for who, _ in verdicts))
            unexplained += [f"{text}: {what}" for who, what in verdicts if who == UNEXPLAINED]
    total = sum((Counter(counts) for counts in noticed.values()), Counter())
    return {"noticed": noticed, "together": dict(total), UNEXPLAINED: unexplained}


def _changed(plans, each, seed):
    """Of each plan, who noticed each of its changes: (who, what)."""
    return {text: _of_plan(plan, each, f"{seed} {text}") for text, plan in plans.items()}


def _of_plan(plan, each, seed):
    model, batch = subject()
    module = sw.parallelize(model, plan)
    step = module._sw_program
    program = step.program
    if isinstance(step, WholeBatch):
        leaves = module._sw_holds.leaves(module._sw_graph, _inputs(module, batch))
        program = step.program_for("step", leaves).executor.program
    programs = [None] * dist.get_world_size()
    dist.all_gather_object(programs, program)
    expected = _numbers(module, batch, program)
    assert _equal(expected, _numbers(module, batch, program))
    draw, found = random.Random(seed), []
    while len(found) < each:
        rank = draw.randrange(len(programs))
        what, changed = mutated(programs[rank].instructions, draw)
        if changed is None:
            continue
        others = [*programs]
        others[rank] = replace(programs[rank], instructions=changed)
        who = checked(others, rank)
        if not who:
            mine = others[dist.get_rank()]
            who = "" if _equal(expected, _numbers(module, batch, mine)) else "numbers"
        found.append((who or explained(what), f"rank {rank}: {_text(what)}"))
    return found


def mutated(instructions, draw):
    """One change, and what is left; or None for none. Each kind of instruction is as likely."""
    kind = draw.choice(sorted({type(one).__name__ for one in instructions}))
    at = draw.choice([i for i, one in enumerate(instructions) if type(one).__name__ == kind])
    if draw.random() < 0.5:
        return ("delete", at, instructions), (*instructions[:at], *instructions[at + 1 :])
    same = [i for i, one in enumerate(instructions) if type(one).__name__ == kind]
    other = draw.choice([at + 1, draw.choice(same), draw.randrange(len(instructions))])
    if other == at or other >= len(instructions):
        return None, None
    first, last = sorted((at, other))
    changed = [*instructions]
    changed[first], changed[last] = changed[last], changed[first]
    return (first, last, instructions), tuple(changed)


def checked(programs, rank):
    """Which check refuses the programs."""
    try:
        verify(programs[rank])
    except VerifyError:
        return "verify"
    try:
        check_order(programs)
    except VerifyError:
        return "check_order"
    return ""


def explained(what):
    """Why a change may leave all numbers as they are."""
    first, last, instructions = what
    if first == "delete":
        return "values live longer" if isinstance(instructions[last], Free) else UNEXPLAINED
    between = instructions[first : last + 1]
    one, other = instructions[first], instructions[last]
    if _pass(one, between[1:]) and _pass(other, between[:-1]):
        return "any order"
    return UNEXPLAINED


def _pass(moved, others):
    """Whether an instruction may run before or after all `others`."""
    return all(_independent(moved, other) for other in others)


def _independent(one, other):
    """Whether two instructions may change places: `verify` saw that values are there."""
    if isinstance(one, Free) or isinstance(other, Free):
        return True
    if isinstance(one, Wait) or isinstance(other, Wait):
        # What is waited for is started before, and read behind it.
        return True
    sends = Transfer, Send, Recv
    if isinstance(one, sends) and isinstance(other, sends):
        return one.channel != other.channel or one == other
    mine, theirs = set(writes(one)), set(writes(other))
    if isinstance(one, Accumulate | Backward) and isinstance(other, Accumulate | Backward):
        # Sums in another order: the same up to rounding.
        return mine.isdisjoint(reads(other)) and theirs.isdisjoint(reads(one))
    return not (mine & {*theirs, *reads(other)} or theirs & set(reads(one)))


def _text(what):
    first, last, instructions = what
    if first == "delete":
        return f"delete {last}: {instructions[last]}"
    return f"swap {first} and {last}: {instructions[first]} | {instructions[last]}"


def _inputs(module, batch):
    return {
        key: part.of(batch[module._sw_form.names[key]], key)
        for key, part in module._sw_inputs.items()
    }


def _numbers(module, batch, program):
    """Loss, gradients and new parameters of one step of `program`, of this rank."""
    step = module._sw_program
    before = {name: p.to_local().clone() for name, p in module.named_parameters()}
    module.set_random_state((0, 0))
    if isinstance(step, WholeBatch):
        key = next(key for key in step._call_programs if key[0] == "step")
        call = CallProgram.of(program, step.regions, step.groups, step.names)
        step._call_programs[key] = call
    else:
        groups = step.training_step.groups
        step.training_step = StepExecutor(program, step.regions, groups)
    loss = module.train_step(torch.optim.SGD(module.parameters(), 0.1), batch)
    found = {"loss": loss.detach()}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            gradient, tile = parameter.grad, parameter.to_local()
            found[name] = None if gradient is None else gradient.to_local().clone()
            found[f"{name} after the step"] = tile.clone()
            tile.copy_(before[name])
    return found


def _equal(expected, found):
    """Whether numbers of all ranks are equal up to rounding."""
    worst = 0.0
    for name, x in expected.items():
        y = found[name]
        if (x is None) != (y is None):
            worst = float("inf")
        elif x is not None and x.numel():
            scale = max(float(x.abs().max()), 1e-30)
            difference = float((x - y).abs().max()) / scale
            worst = max(worst, difference if difference == difference else float("inf"))
    found = torch.tensor([worst], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found) <= TOLERANCE
