import ast
import json
import tomllib
from dataclasses import replace

import pytest

import shardwright as sw
from shardwright.ir.layout import Mesh
from shardwright.report.export import (
    hf_tp_plan,
    parallelize_module,
    patterns,
    split_spec,
    torchtitan,
)
from shardwright.report.styles import NotExpressibleError, Style, styles
from tests.harness import plans

TP = Mesh.parse("tp=2")


@pytest.mark.parametrize("field", ["name", "machine", "fingerprint"])
def test_no_name_in_a_plan_becomes_code(field):
    """It ended the docstring, and what followed ran where the file was imported."""
    name = 'a"""\\"""+EVIL()+"""\\'
    tree = ast.parse(parallelize_module(replace(mlp(), **{field: name})))
    assert not [one for one in ast.walk(tree) if getattr(one, "id", "") == "EVIL"]
    assert name in ast.get_docstring(tree, clean=False)


def layer(name, module, reads, tiling, lies, **kwargs):
    op = plans.op(name, "linear", module, 3, tiling, lies, mesh=TP, **kwargs)
    return replace(op, reads=(*reads, f"{module}.weight"))


def plan(ops, weights, transfers=()):
    """A plan on one axis of two devices."""
    parameters = tuple(plans.parameter(n, lies, mesh=TP) for n, lies in weights.items())
    moves = tuple(plans.moved(*t, 1, 1) for t in transfers)
    base = plans.simple(mesh="tp=2")
    return replace(base, ops=tuple(ops), parameters=parameters, transfers=moves)


def mlp(up="n", middle="tp:S(1)", down="k", weights=("tp:S(0)", "tp:S(1)"), sums=True):
    """Two layers with a function between them, Megatron's way if nothing else is said."""
    relu = replace(
        plans.op("relu", "relu", "act", 4, "d1" if "S" in middle else "-", middle, mesh=TP),
        reads=("up",),
    )
    ops = [
        layer("up", "up", ["x"], up, middle),
        relu,
        layer("down", "down", ["relu"], down, "tp:P" if sums else "tp:R"),
        replace(plans.op("loss", "sum", "", 9, "-", "tp:R", mesh=TP), reads=("down",)),
    ]
    named = {"up.weight": weights[0], "down.weight": weights[1]}
    moved = [("down", "loss", "forward", "all_reduce tp")] if sums else []
    return plan(ops, named, moved)


def test_megatrons_pair_of_layers():
    assert styles(mlp()).modules == {
        "up": Style("colwise", "R", "S(-1)"),
        "down": Style("rowwise", "S(-1)", "R"),
    }


def test_a_plan_of_data_parallelism_names_its_axes():
    found = styles(
        replace(
            plans.simple(weight="S(0)"), ops=(replace(plans.simple().ops[0], reads=("args.0",)),)
        )
    )
    assert (found.axis, found.data, found.modules) == (None, {"dp": "fully_shard"}, {})
    assert "nothing for parallelize_module to do" in parallelize_module(
        replace(plans.simple(), ops=(replace(plans.simple().ops[0], reads=("args.0",)),))
    )


def test_weights_that_are_sharded_and_computed_whole_are_refused():
    wrong = mlp("-", "tp:R", "-", ("tp:S(0)", "tp:R"), sums=False)
    wrong = replace(
        wrong, ops=(*wrong.ops, replace(plans.op("z", "neg", "", 9, "d1", "tp:S(1)", mesh=TP)))
    )
    with pytest.raises(NotExpressibleError, match=r"up\.weight is stored tp:S\(0\), and no module"):
        styles(wrong)


def test_a_redistribution_between_operators_is_refused_with_its_line():
    good = mlp()
    third = replace(plans.op("neg", "neg", "act", 5, "-", "tp:R", mesh=TP), reads=("relu",))
    moves = (*good.transfers, plans.moved("relu", "neg", "forward", "all_gather tp", 1, 1))
    with pytest.raises(
        NotExpressibleError,
        match=r"neg of act \(model_act\.py:5\) has relu redistributed over tp in the middle",
    ):
        styles(replace(good, ops=(*good.ops, third), transfers=moves))


def test_parts_of_a_fused_dimension_are_refused():
    good = mlp()
    fused = replace(good.ops[0], tiling=("n.1",), splits=("heads",))
    with pytest.raises(NotExpressibleError, match="splits heads inside of a fused dimension"):
        styles(replace(good, ops=(fused, *good.ops[1:])))


def test_tied_weights_are_refused():
    good = mlp()
    tied = replace(good.ops[2], reads=("relu", "up.weight"))
    with pytest.raises(NotExpressibleError, match=r"up\.weight is tied"):
        styles(replace(good, ops=(*good.ops[:2], tied, good.ops[3])))


def test_two_axes_of_tensor_parallelism_are_refused():
    two = plans.transformer()
    ops = tuple(replace(op, reads=("x",)) for op in two.ops)
    wide = replace(ops[0], splits=("hidden", "features"))
    with pytest.raises(NotExpressibleError, match="both dp and tp split more than the batch"):
        styles(replace(two, ops=(wide, *ops[1:])))


def test_a_plan_file_without_what_operators_read_is_refused():
    with pytest.raises(NotExpressibleError, match="earlier version"):
        styles(plans.transformer())


def test_one_stage_has_no_split_spec():
    with pytest.raises(NotExpressibleError, match="the plan has one stage"):
        split_spec(plans.simple())


def staged(*cuts):
    plan = plans.transformer()
    mesh = Mesh((("pp", 2), *plan.mesh.axes))
    return replace(plan, mesh=mesh, stages=len(cuts) + 1, schedule="1F1B", cuts=cuts,
                   micro_batches=4)  # fmt: skip


@pytest.mark.parametrize(
    "cut, module", [("linear_0", "blocks.0"), ("linear_1", "blocks.1"), ("down_1", "blocks.1.down")]
)
def test_stages_are_cut_before_modules(cut, module):
    found = json.loads(split_spec(staged(cut)))
    assert found["split_spec"] == {module: "SplitPoint.BEGINNING"}
    assert (found["schedule"], found["n_microbatches"]) == ("1F1B", 4)


def test_a_stage_that_begins_inside_of_a_module_is_refused():
    with pytest.raises(
        NotExpressibleError, match=r"begins with relu in the middle of blocks\.1\.up"
    ):
        split_spec(staged("relu_1"))


def test_torch_cuts_a_model_where_the_plan_does():
    import torch
    from torch.distributed.pipelining import SplitPoint, pipeline

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x):
            return self.down(self.up(x).relu())

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Linear(4, 8)
            self.blocks = torch.nn.ModuleList(Block() for _ in range(3))

        def forward(self, x):
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
            return x

    spec = json.loads(split_spec(staged("linear_2")))["split_spec"]
    model, x = Model(), torch.randn(6, 4)
    split = {name: SplitPoint[point.partition(".")[2]] for name, point in spec.items()}
    pipe = pipeline(model, (x,), split_spec=split)
    assert pipe.num_stages == 2
    names = [n for n, _ in pipe.get_stage_module(1).named_parameters()]
    assert all(name.startswith("blocks.2.") for name in names)
    (result,) = pipe(x)
    assert torch.equal(result, model(x))


def test_the_degrees_are_torchtitans():
    found = tomllib.loads(torchtitan(mlp()))
    assert found["parallelism"] == {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": 1,
        "tensor_parallel_degree": 2,
        "pipeline_parallel_degree": 1,
        "context_parallel_degree": 1,
        "disable_sequence_parallel": True,
    }
    assert found["activation_checkpoint"] == {"mode": "none"}


def test_a_glob_stands_only_for_modules_of_one_style():
    column = Style("colwise", "R", "S(-1)")
    alike = {f"blocks.{i}.up": column for i in range(3)}
    assert patterns(alike, plans.transformer()) == {"blocks.*.up": column}
    fewer = {f"blocks.{i}.up": column for i in range(2)}
    assert patterns(fewer, plans.transformer()) == fewer


@pytest.mark.hf
def test_tensor_parallelism_is_the_plan_that_hugging_face_ships():
    """Of Llama. Qwen3's is compared, and applied, in `tests/ranks/test_exports.py`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    ids = torch.zeros(4, 8, dtype=torch.long)
    graph = sw.capture(model, kwargs={"input_ids": ids, "labels": ids})
    baselines = sw.search(graph, sw.Machine.preset("2xH100")).baselines
    (megatron,) = [b for b in baselines if b.name == "tensor parallel"]
    ours = json.loads(hf_tp_plan(megatron))
    vocabulary = {"embed_tokens": "embedding_rowwise"}  # which Hugging Face leaves whole
    assert ours["base_model_tp_plan"] == config.base_model_tp_plan | vocabulary
    assert ours["_tp_plan"] == type(model)._tp_plan
    (other,) = [b for b in baselines if b.name == "sequence and tensor parallel"]
    with pytest.raises(NotExpressibleError, match="for which Hugging Face has no style"):
        hf_tp_plan(other)
