"""What scripts do to a module between its steps, as training scripts of `training_scripts`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from tests.harness.training_models import MLP, Convolutional
from tests.harness.training_scripts import BATCH, adam, built, integers, numbers


class Scored(nn.Module):
    """An MLP and its loss."""

    def __init__(self):
        super().__init__()
        self.body = MLP()

    def forward(self, x):
        return self.body(x).square().mean()


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.norm, self.body = nn.Dropout(0.5), nn.LayerNorm(8), MLP()

    def forward(self, x):
        return self.body(self.drop(self.norm(x))).square().mean()


class Classified(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Convolutional()

    def forward(self, x, y):
        return F.cross_entropy(self.net(x), y)


class Idle(nn.Module):
    """Layers that the loss does not depend on by a derivative."""

    def __init__(self):
        super().__init__()
        self.a, self.gate, self.sign = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.aside, self.never = nn.Linear(8, 3), nn.Parameter(torch.ones(4))

    def forward(self, x):
        hidden = self.a(x)
        with torch.no_grad():
            gate = self.gate(hidden).softmax(-1)
        loss = (hidden * gate * (self.sign(hidden) > 0)).square().mean()
        return loss + 0 * self.aside(x).detach().sum()


def images():
    return list(zip(numbers(BATCH, 3, 6, 6), integers(4, BATCH), strict=True))


def steps(wrap, model, batches, optimizer=adam, before=None, after=None):
    """A loop with what a script does before it, and after each backward pass."""
    module = wrap(model, batches[0])
    if before is not None:
        before(module)
    chosen, losses = optimizer(module.parameters()), []
    for i, batch in enumerate(batches):
        chosen.zero_grad()
        loss = module(*batch)
        loss.backward()
        if after is not None:
            losses += after(i, module, chosen) or []
        chosen.step()
        losses.append(loss.item())
    return losses, [module]


def vectors(count=3):
    return [(x,) for x in numbers(BATCH, 8, count=count)]


def unfrozen_later(wrap):
    """A layer that is frozen when the plan is made and trained from the third step on."""
    model, batches = built(MLP), vectors(4)
    model.up.requires_grad_(False)
    module = wrap(model, batches[0])
    named = dict(module.named_parameters())
    optimizer = torch.optim.SGD([p for p in named.values() if p.requires_grad], 0.1, momentum=0.9)
    losses = []
    for i, batch in enumerate(batches):
        if i == 2:
            thawed = [p for name, p in named.items() if name.startswith("up")]
            for p in thawed:
                p.requires_grad_(True)
            optimizer.add_param_group({"params": thawed, "lr": 0.01})
        optimizer.zero_grad()
        loss = module(*batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [module]


def without_gradient(wrap):
    """AdamW decays no parameter that has no gradient; one of zeros is another thing."""
    return steps(wrap, built(Idle), vectors(), lambda ps: torch.optim.AdamW(ps, weight_decay=0.5))


def averages_swapped_in(wrap):
    """A shadow of the weights, swapped in by `.data` to evaluate, and out again."""
    module = wrap(built(Scored), vectors()[0])
    optimizer, losses = adam(module.parameters()), []
    shadow = {name: p.data.clone() for name, p in module.named_parameters()}
    for batch in vectors():
        optimizer.zero_grad()
        loss = module(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for name, p in module.named_parameters():
            shadow[name] = 0.1 * p.data + 0.9 * shadow[name]
        kept = {}
        for name, p in module.named_parameters():
            kept[name], p.data = p.data, shadow[name]
        losses.append(module(*batch).item())
        for name, p in module.named_parameters():
            p.data = kept[name]
    for p in module.parameters():
        p.data = p.data - 0.1 * p.grad  # a step by hand
    losses.append(module(*vectors()[0]).item())
    for p in module.parameters():
        p.data = torch.full(p.shape, 0.1, dtype=p.dtype)  # whole, on every rank
    losses.append(module(*vectors()[0]).item())
    return losses, [module]


def weights_as_a_vector(wrap):
    def shrink(_i, module, _optimizer):
        vector = nn.utils.parameters_to_vector(module.parameters())
        nn.utils.vector_to_parameters(vector * 0.9, module.parameters())
        return [float(vector.norm())]

    return steps(wrap, built(Scored), vectors(), after=shrink)


def norms_without_decay(wrap):
    """Groups by the class of a layer, as minGPT and Hugging Face's Trainer make them."""
    model = built(Normed)
    model.drop.p = 0.0
    module = wrap(model, vectors()[0])
    groups = {True: [], False: []}
    for layer in module.modules():
        for name, p in layer.named_parameters(recurse=False):
            groups[isinstance(layer, nn.LayerNorm) or name == "bias"].append(p)
    optimizer = torch.optim.AdamW(
        [{"params": groups[False], "weight_decay": 0.5}, {"params": groups[True]}], lr=0.1
    )
    losses = [len(groups[True])]
    for batch in vectors():
        optimizer.zero_grad()
        loss = module(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [module]


def norms_frozen_by_class(wrap):
    def freeze(module):
        for layer in module.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.eval()

    return steps(wrap, built(Classified), images(), before=freeze)


def dropout_left_out_by_class(wrap):
    def leave_out(module):
        for layer in module.modules():
            if isinstance(layer, nn.Dropout):
                layer.eval()

    return steps(wrap, built(Normed), vectors(), before=leave_out)


def statistics_reset(wrap):
    def reset(i, module, _optimizer):
        for layer in module.modules():
            if i == 0 and isinstance(layer, nn.BatchNorm2d):
                layer.reset_running_stats()

    return steps(wrap, built(Classified), images(), after=reset)


def weights_initialised_anew(wrap):
    """`module.apply` of a function that looks for linear layers."""

    def fill(layer):
        if isinstance(layer, nn.Linear):
            nn.init.constant_(layer.weight, 0.1 / layer.in_features)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    return steps(wrap, built(Scored), vectors(), before=lambda module: module.apply(fill))


def numbers_logged(wrap):
    """Norms, means and counts of weights and gradients, read by `item()`, `float` and `bool`."""

    def log(_i, module, _optimizer):
        found, gradients = [], [p.grad for p in module.parameters()]
        found.append(sum(g.norm().item() ** 2 for g in gradients) ** 0.5)
        found.append(float(torch.stack([g.norm(2) for g in gradients]).norm(2)))
        found.append(float(nn.utils.get_total_norm(gradients)))
        found += [max(g.abs().max().item() for g in gradients), sum(g.mean() for g in gradients)]
        found += [sum(p.std().item() for p in module.parameters())]
        found += [sum(int((g > 0).sum()) for g in gradients)]
        found += [bool((g > g.max() - 1e-12).any()) for g in gradients]
        return [float(x) for x in found]

    return steps(wrap, built(Scored), vectors(), after=log)


def penalties(wrap):
    """Penalties on weights that a script adds to the loss: L1, L2, and how far they have moved."""
    module = wrap(built(Scored), vectors()[0])
    optimizer, losses = adam(module.parameters()), []
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    for batch in vectors():
        optimizer.zero_grad()
        loss = module(*batch)
        for name, p in module.named_parameters():
            loss = loss + 1e-2 * (p.square().sum() + p.abs().sum())
            loss = loss + 10 * (p - start[name]).pow(2).sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, [module]


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def parametrised_after(wrap):
    """A weight that is a function of another, put on when the module was made."""

    def halve(module):
        parametrize.register_parametrization(module.body.up, "weight", Halved())

    return steps(wrap, built(Scored), vectors(), before=halve)


HABITS = (
    unfrozen_later,
    without_gradient,
    averages_swapped_in,
    weights_as_a_vector,
    norms_without_decay,
    norms_frozen_by_class,
    dropout_left_out_by_class,
    statistics_reset,
    weights_initialised_anew,
    numbers_logged,
    penalties,
    parametrised_after,
)
