"""Traces of operator calls are read from the user's cache, and then a command needs no torch."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from shardwright.ir.graph import Op, Ref
from shardwright.ir.op_memory import Seen
from shardwright.train.targets import trace_cache
from shardwright.train.targets.trace_cache import KeptTraces, new_tracer
from shardwright.train.targets.user_cache import UserCache, digest_of

TWO = (Seen((4, 8), (8, 1), "float32", True), Seen((4, 8), (1, 4), "bfloat16", False))
CALLS = [
    (Op("y", "aten.add.Tensor", (Ref("a"), Ref("b")), (), ("y",)), "ab", TWO),
    (Op("y", "aten.gelu.default", (Ref("a"),), (), ("y",)), "a", TWO[:1]),
    (Op("y", "aten.max.dim", (Ref("a"), 1), (), ("y", "i")), "a", TWO[:1]),
    (Op("y", "aten.nonzero.default", (Ref("a"),), (), ("y",)), "a", TWO[:1]),  # not on meta
]
GRADIENTS = [((8, 1),), ((8, 1),), ((1,), None), ((1, 1),)]


def never(**_):
    raise AssertionError("all calls are known")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return UserCache.of_user("traces").folder


def asked(tracer):
    found = []
    for call, strides in zip(CALLS, GRADIENTS, strict=True):
        traced = tracer.call(*call)
        found.append((traced.forward, traced.forward and traced.backward(strides)))
    return found


def test_what_was_traced_is_known_to_the_next_command(folder):
    first = KeptTraces("key", on_cpu=True)
    expected = asked(new_tracer(on_cpu=True))
    assert asked(first) == expected and first.is_new
    assert expected[-1] == (None, None) and all(one for one, _ in expected[:-1])
    first.keep()
    (entry,) = folder.glob("*")
    second = KeptTraces("key", on_cpu=True, make=never)
    assert asked(second) == expected and not second.is_new
    before = entry.stat().st_mtime_ns
    second.keep()  # nothing is new, so nothing is written
    assert entry.stat().st_mtime_ns == before
    more = KeptTraces("key", on_cpu=True)
    more.call(*CALLS[1]).backward(((1, 4),))
    more.keep()
    third = KeptTraces("key", on_cpu=True, make=never)
    assert asked(third) == expected
    third.call(*CALLS[1]).backward(((1, 4),))
    for other in (KeptTraces("other", on_cpu=True), KeptTraces("key", on_cpu=False)):
        assert asked(other) == expected and other.is_new


def test_equal_calls_have_one_digest(monkeypatch):
    texts = []
    monkeypatch.setattr(trace_cache, "digest_of", lambda text: texts.append(text) or text)
    tracer = KeptTraces("key", on_cpu=True)
    texts.clear()
    op, _, given = CALLS[2]
    others = [replace(op, args=(Ref("b"), number)) for number in (1, True, 1.0, 1)]
    calls = [tracer.call(op, "a", given), *(tracer.call(one, "b", given) for one in others)]
    assert calls[0] is calls[1] is calls[4] and len({*map(id, calls)}) == len(texts) == 3


def test_damaged_entries_are_traced_again(folder):
    KeptTraces("key", on_cpu=True).keep()
    assert not folder.exists()  # nothing to write
    made = KeptTraces("key", on_cpu=True)
    expected = asked(made)
    made.keep()
    (entry,) = folder.glob("*")
    whole = entry.read_text()
    content = json.loads(whole.partition("\n")[2])
    name = next(name for name, one in content["calls"].items() if one["forward"][0])
    results, storages, saved, peak = content["calls"][name]["forward"][0]
    forged = [
        [],
        {},
        {**content, "key": "another"},
        {**content, "calls": {name: {}}},
        *(
            {**content, "calls": {**content["calls"], name: {"backward": [], "forward": [lie]}}}
            for lie in (
                [results, storages, saved, -1],
                [results, storages, saved],
                [[[0, ["4"], [1], "float32"]], storages, saved, peak],
                [[[0, [4], [1], "float0"]], storages, saved, peak],
                [results, 3, saved, peak],
            )
        ),
        {**content, "calls": {name: {"forward": [], "backward": [[[[1]], [[0, -2]], []]]}}},
    ]
    texts = [json.dumps(one) for one in forged]
    for text in (whole[:-9], "", *(f"{digest_of(one)}\n{one}" for one in texts)):
        entry.write_text(text)
        again = KeptTraces("key", on_cpu=True)
        assert not again._known, text[:200]
        assert asked(again) == expected


_COMMAND = (
    "import sys; sys.modules.update({}); from shardwright.cli import main; main(sys.argv[1:])"
)


def test_the_second_command_on_a_config_runs_without_torch(tmp_path, monkeypatch):
    monkeypatch.delenv("SHARDWRIGHT_NO_CACHE", raising=False)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64,
        "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = [str(tmp_path / "config.json"), "--batch", "8", "--seq", "16", "--machine", "2xH100"]

    def printed(modules, *command):
        run = subprocess.run(
            [sys.executable, "-c", _COMMAND.format(modules), *command],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert run.returncode == 0, run.stderr
        return run.stdout

    deepspeed = {
        "train_batch_size": 8,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
    }
    (tmp_path / "ds.json").write_text(json.dumps(deepspeed))
    audited = str(tmp_path / "ds.json"), "--model", given[0], "--seq", "16", "--machine", "2xH100"
    commands = ["plan", *given], ["price", *given, "--strategy", "dp_shard=2"], ["audit", *audited]
    first = [printed({}, *command) for command in commands]
    without = {"torch": None}  # importing it raises
    assert [printed(without, *command) for command in commands] == first
