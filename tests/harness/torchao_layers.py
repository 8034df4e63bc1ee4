"""Modules whose linear layers torchao runs in 8 bits, in a process of its own.

    python -m tests.harness.torchao_layers FOLDER CASES RESULTS

The folder is the one that `make` installs torchao into, out of the environment of the suite.
`CASES` has a list of recipe, module, names of layers that stay as they are, input and the gradient
of the result, as `torch.save` writes it. `RESULTS` gets for each the result, the gradient of the
input and those of the parameters by name.
"""

import sys

import torch


def outcome(module, x, grad):
    """The result of a module, and the gradients of its input and of its parameters by name."""
    x = x.detach().requires_grad_()
    found = module(x)
    found.backward(grad)
    return found.detach(), x.grad, {name: p.grad for name, p in module.named_parameters()}


def main(folder, cases, results):
    sys.path.append(folder)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    found = []
    for recipe, module, kept, x, grad in torch.load(cases, weights_only=False):
        converted = convert_to_float8_training(
            module,
            config=Float8LinearConfig.from_recipe_name(recipe),
            module_filter_fn=lambda _, name, kept=kept: name not in kept,
        )
        found.append(outcome(converted, x, grad))
    torch.save(found, results)


if __name__ == "__main__":
    main(*sys.argv[1:])
