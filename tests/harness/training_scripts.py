"""Training scripts of the kinds that people have, as small as they can be.

Each is a function of `wrap`, which makes the module that is trained of a model and an example call:
the model itself, or what `sw.parallelize` makes of it. It returns the losses that it saw and the
modules that it trained. The lines are those of a script for one device.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from tests.harness.ranks import whole
from tests.harness.training_models import (
    MLP,
    ActorCritic,
    Adapted,
    Adversarial,
    Attention,
    Contrastive,
    Convolutional,
    Distilled,
    Focal,
    Language,
    Masked,
    Normalised,
    Quantised,
    StateSpace,
    Warmed,
)

BATCH, STEPS = 8, 3


def numbers(*shape, count=STEPS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(count)]


def integers(below, *shape, count=STEPS):
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, below, shape, generator=generator) for _ in range(count)]


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)


def built(kind, *arguments):
    torch.manual_seed(0)
    return kind(*arguments).double()


def difference_of(script, wrap):
    """How far losses, weights, gradients and buffers of a script with `wrap` are from those alone.

    Raises `AssertionError` where a gradient or buffer is there in one of them only.
    """
    losses, models = script(lambda model, args: model)
    ours, modules = script(wrap)
    found = [abs(a - b) for a, b in zip(losses, ours, strict=True)]
    for model, module in zip(models, modules, strict=True):
        for name, p in model.named_parameters():
            parallel = module.get_parameter(name)
            found.append(_apart(p, parallel))
            assert (p.grad is None) == (parallel.grad is None), f"gradient of {name}"
            if p.grad is not None:
                found.append(_apart(p.grad, parallel.grad))
        found += [_apart(b, module.get_buffer(name)) for name, b in model.named_buffers()]
    return max(found)


def _apart(one, other):
    one, other = whole(one), whole(other)
    assert one.shape == other.shape, f"{tuple(one.shape)} and {tuple(other.shape)}"
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0


def train(wrap, model, batches, optimizer=adam):
    """The usual loop, for models that return their loss."""
    module = wrap(model, batches[0])
    steps, losses = optimizer(module.parameters()), []
    for batch in batches:
        steps.zero_grad()
        loss = module(*batch)
        loss.backward()
        steps.step()
        losses.append(loss.item())
    return losses, [module]


def gan(wrap):
    """Two models and optimizers in turn; the other one's weights are frozen meanwhile."""
    real, noise = numbers(BATCH, 8), numbers(BATCH, 8, count=2 * STEPS)[STEPS:]
    generator = wrap(built(MLP, 8, 8), (noise[0],))
    critic = wrap(built(MLP, 8, 1), (generator(noise[0]),))  # its gradient is wanted
    of_generator, of_critic, losses = adam(generator.parameters()), adam(critic.parameters()), []
    for x, z in zip(real, noise, strict=True):
        critic.requires_grad_(True)
        of_critic.zero_grad()
        fake = generator(z).detach()
        loss = F.softplus(-critic(x)).mean() + F.softplus(critic(fake)).mean()
        loss.backward()
        of_critic.step()
        losses.append(loss.item())
        critic.requires_grad_(False)
        of_generator.zero_grad()
        loss = F.softplus(-critic(generator(z))).mean()
        loss.backward()
        of_generator.step()
        losses.append(loss.item())
    return losses, [generator, critic]


def ema_teacher(wrap):
    """A teacher that is a running mean of the student's weights."""
    inputs = numbers(BATCH, 8)
    student = built(MLP)
    teacher = wrap(copy.deepcopy(student), (inputs[0],))
    student = wrap(student, (inputs[0],))
    steps, losses = adam(student.parameters()), []
    for x in inputs:
        with torch.no_grad():
            target = teacher(x)
        steps.zero_grad()
        loss = F.mse_loss(student(x + 0.1), target)
        loss.backward()
        steps.step()
        losses.append(loss.item())
        with torch.no_grad():
            for mean, p in zip(teacher.parameters(), student.parameters(), strict=True):
                mean.mul_(0.9).add_(p, alpha=0.1)
    return losses, [student, teacher]


def averaged_weights(wrap):
    """Stochastic weight averaging keeps a copy of the module."""
    inputs = numbers(BATCH, 8)
    module = wrap(built(MLP), (inputs[0],))
    average = torch.optim.swa_utils.AveragedModel(module)
    steps, losses = adam(module.parameters()), []
    for x in inputs:
        steps.zero_grad()
        loss = module(x).square().mean()
        loss.backward()
        steps.step()
        average.update_parameters(module)
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(average(inputs[0]).square().mean().item())
    return losses, [module]


def actor_critic(wrap):
    """An advantage that is detached, and normalised over the batch; gradients are clipped."""
    batches = list(zip(numbers(BATCH, 8), integers(4, BATCH), numbers(BATCH), strict=True))
    module = wrap(built(ActorCritic), batches[0])
    steps, losses = adam(module.parameters()), []
    for batch in batches:
        steps.zero_grad()
        loss = module(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        steps.step()
        losses.append(loss.item())
    return losses, [module]


def contrastive_queue(wrap):
    return train(
        wrap, built(Contrastive), list(zip(numbers(BATCH, 8), numbers(BATCH, 4), strict=True))
    )


def texts():
    both = integers(32, BATCH, 6, count=2 * STEPS)
    return list(zip(both[:STEPS], both[STEPS:], strict=True))


def tied_by_assignment(wrap):
    return train(wrap, built(Language, True), texts())


def two_optimizers(wrap):
    """Parameters chosen by name, for an optimizer each."""
    batches = texts()
    module = wrap(built(Language), batches[0])
    named = list(module.named_parameters())
    tables = [p for name, p in named if name.startswith("embedding")]
    others = [p for name, p in named if not name.startswith("embedding")]
    both, losses = [torch.optim.SGD(tables, lr=0.1), torch.optim.AdamW(others, lr=1e-2)], []
    for batch in batches:
        for one in both:
            one.zero_grad()
        loss = module(*batch)
        loss.backward()
        for one in both:
            one.step()
        losses.append(loss.item())
    return losses, [module]


def decay_by_ndim(wrap):
    """Weight decay on matrices alone, which a bias split by heads must not be taken for."""

    def optimizer(parameters):
        every = list(parameters)
        groups = [
            {"params": [p for p in every if p.ndim >= 2], "weight_decay": 0.5},
            {"params": [p for p in every if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-2)

    return train(wrap, built(Attention), [(x,) for x in numbers(BATCH, 6, 8)], optimizer)


def counter_in_a_buffer(wrap):
    return train(wrap, built(Warmed), [(x,) for x in numbers(BATCH, 8)])


def masked_loss(wrap):
    masks = [mask.bool() for mask in integers(2, BATCH)]
    return train(
        wrap, built(Masked), list(zip(numbers(BATCH, 8), numbers(BATCH, 4), masks, strict=True))
    )


def vector_quantised(wrap):
    return train(wrap, built(Quantised), [(x,) for x in numbers(BATCH, 8)])


def gradient_reversal(wrap):
    both = integers(2, BATCH, count=2 * STEPS)
    batches = zip(numbers(BATCH, 8), both[:STEPS], both[STEPS:], strict=True)
    return train(wrap, built(Adversarial), list(batches))


def training_and_evaluation_in_turn(wrap):
    batches = list(zip(numbers(BATCH, 3, 6, 6), integers(4, BATCH), strict=True))
    module = wrap(built(Convolutional), batches[0][:1])
    steps, losses = adam(module.parameters()), []
    for x, y in batches:
        module.train()
        steps.zero_grad()
        loss = F.cross_entropy(module(x), y)
        loss.backward()
        steps.step()
        module.eval()
        with torch.no_grad():
            losses += [loss.item(), F.cross_entropy(module(x), y).item()]
    return losses, [module]


def low_rank_adapter(wrap):
    """Frozen weights and an optimizer of the others."""
    return train(
        wrap,
        built(Adapted),
        [(x,) for x in numbers(BATCH, 8)],
        lambda parameters: adam([p for p in parameters if p.requires_grad]),
    )


def spectral_norm(wrap):
    how = nn.utils.parametrizations.spectral_norm
    return train(wrap, built(Normalised, how), [(x,) for x in numbers(BATCH, 8)])


def weight_norm(wrap):
    how = nn.utils.parametrizations.weight_norm
    return train(wrap, built(Normalised, how), [(x,) for x in numbers(BATCH, 8)])


def distillation(wrap):
    return train(wrap, built(Distilled), [(x,) for x in numbers(BATCH, 8)])


def focal_loss(wrap):
    batches = list(zip(numbers(BATCH, 8), integers(4, BATCH), strict=True))
    return train(wrap, built(Focal), batches)


def siamese(wrap):
    """Two calls before one backward pass."""
    pairs = list(zip(numbers(BATCH, 8), numbers(BATCH, 8, count=2 * STEPS)[STEPS:], strict=True))
    module = wrap(built(MLP), pairs[0][:1])
    steps, losses = adam(module.parameters()), []
    for x, y in pairs:
        steps.zero_grad()
        loss = F.mse_loss(module(x), module(y))
        loss.backward()
        steps.step()
        losses.append(loss.item())
    return losses, [module]


def two_backward_passes(wrap):
    """Two losses of one call, one after the other, with `retain_graph`."""
    inputs = numbers(BATCH, 8)
    module = wrap(built(MLP), (inputs[0],))
    steps, losses = adam(module.parameters()), []
    for x in inputs:
        steps.zero_grad()
        y = module(x)
        loss = y.square().mean()
        loss.backward(retain_graph=True)
        y.abs().mean().backward()
        steps.step()
        losses.append(loss.item())
    return losses, [module]


def accumulation(wrap):
    """Gradients of two batches, clipped; a schedule of learning rates."""
    inputs = numbers(BATCH, 8, count=4)
    module = wrap(built(MLP), (inputs[0],))
    steps, losses = adam(module.parameters()), []
    schedule = torch.optim.lr_scheduler.OneCycleLR(steps, 0.1, total_steps=4)
    for i, x in enumerate(inputs):
        loss = module(x).square().mean() / 2
        loss.backward()
        losses.append(loss.item())
        if i % 2:
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            steps.step()
            schedule.step()
            steps.zero_grad()
    return losses, [module]


def closure(wrap):
    """LBFGS calls the module several times a step."""
    (x,) = numbers(BATCH, 8, count=1)
    module = wrap(built(MLP), (x,))
    steps, losses = torch.optim.LBFGS(module.parameters(), max_iter=4), []

    def again():
        steps.zero_grad()
        loss = module(x).square().mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    steps.step(again)
    return losses, [module]


def clipped_weights(wrap):
    """Weights written by the script after each step, as a Wasserstein critic's are."""
    inputs = numbers(BATCH, 8)
    module = wrap(built(MLP), (inputs[0],))
    steps, losses = adam(module.parameters()), []
    for x in inputs:
        steps.zero_grad()
        loss = module(x).square().mean()
        loss.backward()
        steps.step()
        losses.append(loss.item())
        for p in module.parameters():
            p.data.clamp_(-0.2, 0.2)
    return losses, [module]


def compiled_first(wrap):
    model = torch.compile(built(MLP), backend="eager")
    inputs = numbers(BATCH, 8)
    module = wrap(model, (inputs[0],))
    steps, losses = adam(module.parameters()), []
    for x in inputs:
        steps.zero_grad()
        loss = module(x).square().mean()
        loss.backward()
        steps.step()
        losses.append(loss.item())
    return losses, [module]


def gradient_penalty(wrap):
    """The derivative of a critic by its input, as part of the loss (WGAN-GP)."""
    inputs = numbers(BATCH, 8)
    module = wrap(built(MLP, 8, 1), (inputs[0].clone().requires_grad_(),))
    steps, losses = adam(module.parameters()), []
    for x in inputs:
        x = x.clone().requires_grad_()
        scores = module(x)
        (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        loss = scores.mean() + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()
        steps.zero_grad()
        loss.backward()
        steps.step()
        losses.append(loss.item())
    return losses, [module]


def sharpness_aware(wrap):
    """Two forward passes a step, the second at weights that are moved by the first's gradient."""
    inputs = numbers(BATCH, 8)
    module = wrap(built(MLP), (inputs[0],))
    steps, losses = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), []
    for x in inputs:
        module(x).square().mean().backward()
        with torch.no_grad():
            norm = sum(whole(p.grad).square().sum() for p in module.parameters()).sqrt().item()
            moved = [p.grad * (0.05 / norm) for p in module.parameters()]
            for p, step in zip(module.parameters(), moved, strict=True):
                p.add_(step)
        steps.zero_grad()
        loss = module(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for p, step in zip(module.parameters(), moved, strict=True):
                p.sub_(step)
        steps.step()
        steps.zero_grad()
        losses.append(loss.item())
    return losses, [module]


def state_space(wrap):
    """Complex views of a real parameter, which are gathered again for the backward pass."""
    return train(wrap, built(StateSpace), [(x,) for x in numbers(BATCH, 8)])


EXACT = (
    gan,
    gradient_penalty,
    ema_teacher,
    averaged_weights,
    actor_critic,
    contrastive_queue,
    tied_by_assignment,
    two_optimizers,
    decay_by_ndim,
    counter_in_a_buffer,
    masked_loss,
    vector_quantised,
    gradient_reversal,
    training_and_evaluation_in_turn,
    low_rank_adapter,
    spectral_norm,
    weight_norm,
    distillation,
    focal_loss,
    siamese,
    two_backward_passes,
    accumulation,
    closure,
    clipped_weights,
    compiled_first,
    sharpness_aware,
    state_space,
)
