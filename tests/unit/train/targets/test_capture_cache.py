"""Captures of configs are read from the user's cache, unless others may have written them."""

import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardwright.cli import main
from shardwright.cli.planning import capturing
from shardwright.train.targets import user_cache
from shardwright.train.targets.capture_cache import capture_key, keep_capture, kept_capture
from shardwright.train.targets.target_text import Target, parse_target
from shardwright.train.targets.user_cache import UserCache, digest_of

CONFIG = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"],
    "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 32,
}  # fmt: skip


@pytest.fixture
def target(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SHARDWRIGHT_NO_CACHE", raising=False)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return Target(str(file), 4, 8)


def entries(name: str = "captures") -> list[Path]:
    return sorted(UserCache.of_user(name).folder.glob("*"))


def key(target: Target, **options) -> str:
    parsed = parse_target(target.text, target.batch, target.seq, target.settings)
    return capture_key(parsed, options, None, fast_halves=())


def test_a_second_capture_is_read_and_equals_the_first(target, monkeypatch):
    first = capturing.capture(target)
    monkeypatch.setitem(sys.modules, "transformers", None)  # importing it raises
    second = capturing.capture(target)
    assert second.graph == first.graph and second.graph.fingerprint == first.graph.fingerprint
    names = "optimizer", "precision", "weight_bytes"
    assert [getattr(second, n) for n in names] == [getattr(first, n) for n in names]
    assert len(entries()) == 1 and entries()[0].stat().st_mode & 0o777 == 0o600
    monkeypatch.delitem(sys.modules, "transformers")
    assert second.job.name == "gpt2"


def test_entries_that_cannot_be_trusted_are_made_anew(target):
    graph = capturing.capture(target).graph
    (entry,) = entries()
    whole = entry.read_text()
    digest, _, content = whole.partition("\n")
    changed = content.replace("GPT2", "GPT3") if "GPT2" in content else content[:-1] + " }"
    fields = json.loads(content)
    lies = json.loads(fields["graph"])
    lies["values"][0][1] = ["16"]  # a shape of texts
    unknown = {**json.loads(fields["graph"]), "outputs": ["nothing"]}
    forged = [
        {**fields, "graph": json.dumps(lies)},
        {**fields, "graph": json.dumps(unknown)},
        {**fields, "graph": "[" * 100_000},
        {**fields, "graph": 3},
        {**fields, "key": "another"},
        {**fields, "weight_bytes": -1},
        {"key": fields["key"]},
        [],
    ]
    digested = [json.dumps(one) for one in forged]
    texts = [f"{digest_of(one)}\n{one}" for one in digested]
    for text in ("", "{}", whole[:-9], f"{digest}\n{changed}", *texts):
        entry.write_text(text)
        assert kept_capture(key(target)) is None, text[:200]
    assert capturing.capture(target).graph == graph
    assert kept_capture(key(target)).graph == graph  # the entry was replaced


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_entries_that_others_may_have_written_are_ignored(target):
    capturing.capture(target)
    (entry,) = entries()
    cache = UserCache.of_user("captures")
    assert kept_capture(key(target)) is not None
    for path, mode in ((entry, 0o622), (cache.folder, 0o777)):
        before = path.stat().st_mode & 0o777
        path.chmod(mode)
        assert kept_capture(key(target)) is None
        path.chmod(before)
    moved = entry.rename(entry.with_suffix(".moved"))
    entry.symlink_to(moved)
    assert kept_capture(key(target)) is None


def test_the_key_depends_on_all_that_a_capture_depends_on(target, monkeypatch):
    file = Path(target.text)
    keys = [key(target), key(target, precision="bf16")]
    for batch, seq, settings in ((8, 8, ()), (4, 16, ()), (4, 8, ("n_layer=3",))):
        keys.append(key(Target(target.text, batch, seq, settings)))
    file.write_text(json.dumps({**CONFIG, "n_head": 4}))
    keys.append(key(target))
    for part in ("transformers-9.9.dist-info", "models/gpt2/modeling_gpt2.py 1 2"):
        monkeypatch.setattr(user_cache, "_parts_of_installation", lambda part=part: [part])
        user_cache.installed.cache_clear()
        keys.append(key(target))
    user_cache.installed.cache_clear()
    assert len(set(keys)) == len(keys)


def test_the_oldest_entries_are_removed_and_unwritable_folders_left(target, monkeypatch, tmp_path):
    monkeypatch.setattr(user_cache, "_MOST_ENTRIES", 2)
    known, cache = capturing.capture(target), UserCache.of_user("captures")
    kept = kept_capture(key(target))
    for number in range(3):
        keep_capture(f"{number}", kept)
        os.utime(cache.file(f"{number}"), (number, number))
    keep_capture("last", kept)
    assert len(entries()) == 2 and kept_capture("last").graph == known.graph
    (tmp_path / "file").write_text("")
    UserCache(tmp_path / "file").keep("key", "text")  # no folder can be made here


def test_commands_do_without_the_cache_where_they_are_asked_to(target):
    asked = ["plan", target.text, "--batch", "4", "--seq", "8", "--machine", "2xcpu", "--json"]
    run = CliRunner().invoke(main, [*asked, "--no-cache"])
    assert run.exit_code == 0, run.output
    assert entries() == entries("traces") == []
    plans = []
    for _ in range(2):
        found = CliRunner().invoke(main, asked)
        assert len(entries()) == len(entries("traces")) == 1
        plans.append(json.loads(found.stdout)["plan"])
    assert plans[0] == plans[1] == json.loads(run.stdout)["plan"]
