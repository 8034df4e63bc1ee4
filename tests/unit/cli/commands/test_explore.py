"""A small model explored through the server of the command."""

import json
import re
import threading
import urllib.request

import click
import pytest

from shardwright.cli.commands.explore import server_of
from shardwright.cli.explore.explorer import Explorer
from shardwright.cli.explore.server import PageServer
from shardwright.cli.explore.sliders import sliders
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.machine.presets import preset
from shardwright.train.targets.target_text import Target
from tests.harness import models


def test_a_target_without_a_job_is_refused_before_there_is_a_page(mistake, tmp_path):
    file = tmp_path / "train.py"
    file.write_text("def job():\n    return None\n")
    assert "returned a NoneType" in mistake("explore", f"{file}:job", "--machine", "2xcpu")


@pytest.mark.hf
def test_plans_follow_the_sliders_and_have_reports(tmp_path):
    file = tmp_path / "config.json"
    model, _ = models.llama()
    file.write_text(json.dumps(model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}))
    target, machine = Target(str(file), batch=4, seq=16), preset("2xH100")
    explorer = Explorer(target, machine, PlanOptions(), "adamw", {})
    server = server_of(explorer.find, sliders(target, machine, None), "a small llama", 0)

    def get(path, **query):
        asked = "".join(f"&{name}={value}" for name, value in query.items())
        address = server.address.replace("/?", f"/{path}?") + asked
        with urllib.request.urlopen(address, timeout=300) as answer:
            return answer.read().decode()

    def plan(**query):
        found = {"state": "planning"}
        while found["state"] == "planning":
            found = json.loads(get("plan", **query))
        return found

    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            assert "a small llama" in get("")
            first = plan()
            assert first["state"] == "done" and first["unit"] == "tokens/s"
            assert "on 2 devices of 2xH100" in first["verdict"]
            assert first["may_fit"] is False
            one, longer = plan(devices=1), plan(devices=1, seq=32)
            assert one["strategy"] == "one device"
            assert longer["bytes"] > one["bytes"]
            assert longer["rate"] * longer["seconds"] == pytest.approx(
                2 * one["rate"] * one["seconds"]
            )
            report = get("report", devices=1, seq=32)
            assert "a small llama: devices 1, batch 4, seq 32" in report
            assert re.search(r'id="frontier"', report)
        finally:
            server.shutdown()
            thread.join()


def test_the_address_is_printed_and_opened(shardwright_command, tmp_path, monkeypatch):
    def interrupted(server):
        served.append(server)
        raise KeyboardInterrupt

    served, opened = [], []
    monkeypatch.setattr(PageServer, "serve_forever", interrupted)
    monkeypatch.setattr(click, "launch", opened.append)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    options = ("--machine", "8xH100", "--batch", "8", "--seq", "64", "--port", "0", "--open")
    result = shardwright_command("explore", str(tmp_path), *options)
    assert result.exit_code == 0, result.output
    assert opened == [served[0].address]
    assert opened[0] in result.stdout and result.stdout.endswith("ended\n")
