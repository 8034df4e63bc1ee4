"""Models cut into pipelines with any tilings, and what one device makes of them."""

import random

import torch
import torch.nn.functional as F
from torch import nn

from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import Shard
from shardwright.ir.options.numerics import Numerics
from shardwright.ir.pipeline import Pipeline, groups_of, stage_mesh
from shardwright.planner.micro_batch_counts import MicroBatchCounts
from shardwright.program.decisions import Decisions, everything_whole
from shardwright.program.lower.balance import balanced_cuts, operator_work
from shardwright.rules.analysis import analyze
from shardwright.rules.placements import tilings
from shardwright.runtime.module_options import ModuleOptions
from shardwright.runtime.parallel import build
from shardwright.runtime.verify.verify import to_float64
from shardwright.tracing.capture import capture_call
from tests.harness import models
from tests.harness.ranks import whole
from tests.ranks.test_random_tilings import error, some_segments, stored_as

CPU = torch.device("cpu")


class ResNet(nn.Module):
    """Two residual blocks with batch norms, and the loss."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
            )
            for _ in range(2)
        )
        self.head = nn.Linear(6, 5)

    def forward(self, images, classes):
        x = self.stem(images)
        for block in self.blocks:
            x = F.relu(x + block(x))
        return F.cross_entropy(self.head(x.mean((2, 3))), classes)


def resnet():
    torch.manual_seed(0)
    batch = {"images": torch.randn(7, 3, 5, 5), "classes": torch.randint(5, (7,))}
    return ResNet(), batch


class Layers(nn.Module):
    """Residual blocks in which every weight is read once, as zero-bubble schedules want it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8))
            for _ in range(5)
        )
        self.head = nn.Linear(8, 12)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x), labels)


def layers():
    torch.manual_seed(0)
    ids = torch.randint(12, (8,))
    return Layers(), {"ids": ids, "labels": ids.flip(0)}


def t5():
    """Encoder and decoder, the encoder's output skipping to every layer of the decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=23,
        d_model=12,
        d_kv=4,
        d_ff=14,
        num_layers=1,
        num_decoder_layers=2,
        num_heads=3,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    ids = torch.randint(1, 23, (7, 5))
    return T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids.flip(0)[:, :4]}


MODELS = {
    "gpt2": lambda: models.gpt2(layers=2, batch=7),
    "layers": layers,
    "t5": t5,
    "unet": models.unet,
    "resnet": resnet,
    "resnet in pieces": resnet,
    "unet in pieces": lambda: models.unet(batch=7, deeper=2),  # eight stages have parameters
}


class Subject:
    """A model's graph in float64, captured once, and what one device makes of it."""

    def __init__(self, name):
        model, self.batch = models.double(*MODELS[name]())
        self.local = name.endswith("in pieces")
        captured = capture_call(
            model, (), self.batch, Numerics(batch_norm="local" if self.local else "exact")
        )
        self.graph = to_float64(captured.graph)
        self.captured = type(captured)(self.graph, captured.constants, captured.output_keys)
        self.analysis = analyze(self.graph)
        self.weights = dict(model.named_parameters(remove_duplicate=False))
        self.buffers = dict(model.named_buffers(remove_duplicate=False))
        self._known = {}  # what one device makes of it

    def module(self, decisions, device_mesh):
        return build(
            self.captured,
            self.analysis,
            decisions,
            ModuleOptions(self.weights, self.buffers, seed=3),
            device_mesh,
        )

    def serial(self, count):
        """The whole batch at once; with local batch norms its micro-batches, one by one."""
        key = count if self.local else 1
        if key not in self._known:
            self._known[key] = self._trained(count)
        return self._known[key]

    def _trained(self, count):
        decisions = everything_whole(self.graph)
        if self.local:
            decisions = Decisions(
                decisions.mesh, decisions.tilings, decisions.storage, micro_batches=count
            )
        module = self.module(decisions, None)
        losses = []
        for _ in range(2):  # the second step draws other numbers
            loss = module(**self.batch)
            loss.backward()
            losses.append(loss.detach())
        return losses, module

    def pipelined(self, mesh, schedule, stages, count, device_mesh):
        """Two steps of the pipeline, with any tilings; local statistics are of micro-batches."""
        inner, draw = stage_mesh(mesh), random.Random(f"{mesh} {schedule}")
        cuts = balanced_cuts(self.graph, stages, operator_work(self.graph, self.analysis))
        small = MicroBatchCounts(self.graph, self.analysis).analyzed(count)[1]
        chosen = {
            op.name: draw.choice(
                [
                    tiling
                    for tiling, op_layouts in tilings(small.rules[op.name], inner)
                    if not (self.local and "batch_norm" in op.kind and _splits_samples(op_layouts))
                ]
            )
            for op in self.graph.ops
        }
        storage = {
            leaf.name: draw.choice(stored_as(self.analysis.atoms[leaf.name], inner))
            for leaf in self.graph.leaves_of(LeafKind.PARAMETER)
        }
        decisions = Decisions(
            inner,
            chosen,
            storage,
            frozenset(key for key in storage if draw.random() < 0.5),
            some_segments(self.graph, draw) if inner.size > 1 else {},
            count,
            Pipeline(tuple(self.graph.ops[i].name for i in cuts), schedule, groups_of(mesh)),
        )
        module = self.module(decisions, device_mesh)
        return [module.forward_backward(self.batch) for _ in range(2)], module

    def errors(self, mesh, schedule, stages, count, device_mesh):
        """By how much each loss, gradient and buffer is off on this rank."""
        losses, serial = self.serial(count)
        found, pipeline = self.pipelined(mesh, schedule, stages, count, device_mesh)
        errors = {
            f"loss {i}": error(a, b) for i, (a, b) in enumerate(zip(losses, found, strict=True))
        }
        for key, parameter in pipeline.named_parameters():
            gradient = serial.get_parameter(key).grad
            errors[f"gradient of {key}"] = error(gradient, whole(parameter.grad))
        for key, buffer in pipeline.named_buffers():
            if not key.startswith("_sw"):
                errors[f"buffer {key}"] = error(serial.get_buffer(key), buffer)
        return errors


def _splits_samples(op_layouts):
    return any(isinstance(p, Shard) and p.dim == 0 for p in op_layouts.operands[0].placements)
