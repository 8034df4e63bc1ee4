"""A module, run eagerly, beside its captured graph on one device."""

import torch

from shardwright.runtime.verify.module_comparison import ModuleComparison
from shardwright.runtime.verify.module_reference import widened
from shardwright.runtime.verify.verify import one_device, optimizer_of, to_float64
from shardwright.runtime.verify.verify_reference import comparable
from shardwright.tracing.call import flatten
from shardwright.tracing.discovery.discover import capture_with_rules


def compared(model, batch, graph_of=None):
    """The module beside the graph of `graph_of`, which is another model in tests of failures."""
    captured = capture_with_rules(graph_of or model, (), batch)
    tensors = {k: v for k, v in flatten((), batch).items() if isinstance(v, torch.Tensor)}
    payload = {
        "output_keys": list(captured.output_keys),
        "weights": {k: widened(p) for k, p in model.named_parameters()},
        "buffers": {k: widened(b) for k, b in model.named_buffers(remove_duplicate=False)},
        "constants": {k: widened(c) for k, c in captured.constants.items()},
        "batch": {k: widened(v) for k, v in tensors.items()},
    }
    sides = ModuleComparison(model, captured, payload, tensors, optimizer_of("adamw"), one_device)
    return sides.run(comparable(to_float64(captured.graph)))
