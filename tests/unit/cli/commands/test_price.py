"""`price` and `strategies`: what they print and write, and mistakes in one line."""

import pytest

from shardwright.plan_io.files import load_plan

HERE = ("--machine", "2xcpu")


def test_price_prints_and_writes_the_plan(target, tmp_path, shardwright_command):
    file = tmp_path / "plan.json"
    given = ("--strategy", "dp_shard=2 zero=2", "--memory-limit", "1GiB", "-o", file)
    result = shardwright_command("price", target, *HERE, *given)
    assert result.exit_code == 0, result.exception
    assert "to spare on 2 devices of 2xcpu" in " ".join(result.stdout.split())
    assert "strategy: dp_shard=2 zero=2" in result.stdout
    plan = load_plan(file)
    assert (str(plan.mesh), plan.micro_batches) == ("dp_shard=2", 1)


def test_price_json_holds_the_plan(target, as_json):
    found = as_json("price", target, *HERE, "--strategy", "dp_replicate=2 zero=0")
    assert (found["mesh"], found["fits"]) == ("dp_replicate=2", True)
    assert found["plan"]["step_seconds"] == found["step_seconds"]


@pytest.mark.parametrize(
    "text, said",
    [
        ("dp=2", "'dp=2' is no word of a strategy"),
        ("dp_shard=4", "the machine has 2; use dp_shard=2"),
        ("dp_shard=2 fp8=rowwise", "fp8=rowwise is not yet priced"),
    ],
)
def test_a_strategy_that_cannot_be_is_one_line(target, shardwright_command, text, said):
    result = shardwright_command("price", target, *HERE, "--strategy", text)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert said in line


def test_strategies_shows_the_best_and_writes_it(target, tmp_path, as_json, shardwright_command):
    file = tmp_path / "plan.json"
    result = shardwright_command("strategies", target, *HERE, "--tp-across-hosts", "-o", file)
    assert result.exit_code == 0, result.exception
    best = load_plan(file).name
    assert f"best: {best}" in result.stdout
    assert as_json("strategies", target, *HERE)["best"]["strategy"] == best


def test_plans_in_8_bits_are_written_as_programs_or_shown_as_priced_only_and_not_run(
    tmp_path, shardwright_command
):
    config, file = tmp_path / "config.json", tmp_path / "plan.json"
    config.write_text(
        '{"model_type": "llama", "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 2,'
        ' "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}'
    )
    model = (config, "--batch", 8, "--seq", 512)
    for recipe, compiled, label in (
        ("rowwise", " compile=regional", "fp8 rowwise as torchao"),
        ("delayed", "", "fp8 delayed by TransformerEngine: priced, not executed here"),
    ):
        given = ("--machine", "2xH100", "--fp8", recipe, "-o", file)
        result = shardwright_command("strategies", *model, *given)
        assert result.exit_code == 0, result.exception
        best = next(line for line in result.stdout.splitlines() if line.startswith("best: "))
        assert f"fp8={recipe}{compiled}" in best
        assert label in " ".join(result.stdout.split())
        program = shardwright_command("program", *model, file)
        if compiled:
            assert program.exit_code == 0, program.exception
            assert "in 8 bits by torchao:rowwise" in program.stdout
            continue
        for refused in (
            program,
            *(shardwright_command(c, *model, file) for c in ("run", "verify")),
        ):
            assert refused.exit_code == 2
            (line,) = refused.stderr.splitlines()
            assert "fp8=TransformerEngine:delayed is priced, not executed here" in line
