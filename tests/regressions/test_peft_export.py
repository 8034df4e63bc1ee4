"""The adapters of a PEFT model come back from the folder that `export_pretrained` writes.

A user trained a model with LoRA and wrote it by `--export FOLDER`. The folder held one file with
the names that weights have inside the adapted model, `from_pretrained` reported all of them MISSING
and initialised them anew. The folder now holds the adapters as PEFT itself writes them.
"""

import peft
import pytest
import torch
import transformers

import shardwright as sw
from shardwright.runtime.shape_variants import ShapeVariants
from shardwright.train.checkpoint.export import export_pretrained

pytestmark = pytest.mark.hf


def base():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=37,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def adapted(kind):
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = base()
    if kind == "PeftModel":
        return peft.get_peft_model(model, config)
    model.add_adapter(config)
    return model


@pytest.mark.parametrize("kind", ["PeftModel", "add_adapter"])
def test_adapters_come_back(kind, tmp_path):
    model = adapted(kind)
    ids = torch.randint(37, (2, 5))
    batch = {"input_ids": ids, "labels": ids}
    plan = sw.plan(model, (), batch, machine=sw.Machine.preset("1xcpu"), optimizer="sgd")
    module = ShapeVariants(model, plan, [])
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    assert len(trained) == 4 and all("lora" in name for name in trained)
    before = {name: p.detach().clone() for name, p in trained.items()}
    optimizer = torch.optim.SGD(trained.values(), lr=1.0)
    module.forward_backward(batch)
    optimizer.step()

    export_pretrained(module, model, tmp_path)
    files = {path.name for path in tmp_path.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files
    assert "model.safetensors" not in files
    if kind == "PeftModel":
        back = peft.PeftModel.from_pretrained(base(), tmp_path)
    else:
        back = base()
        back.load_adapter(str(tmp_path))
    found = dict(back.named_parameters())
    for name, value in trained.items():
        assert torch.equal(found[name], value) and not torch.equal(value, before[name]), name
    with torch.no_grad():
        torch.testing.assert_close(back(**batch).loss, module.loss(batch))
