"""The built wheel holds what users need; citation and workflow name what is true."""

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def build_wheel(source, folder):
    """Build the wheel of a source tree with the build backend that is there already."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", folder, str(source)], check=True, timeout=300)
    (found,) = folder.glob("shardwright-*.whl")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


def test_it_holds_every_file_of_the_package(wheel):
    package = ROOT / "shardwright"
    files = {
        str(path.relative_to(ROOT))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "shardwright/py.typed" in files
    with zipfile.ZipFile(wheel) as archive:
        assert files <= set(archive.namelist())


def test_it_is_installed_and_used_from_its_file(wheel, tmp_path):
    """With the dependencies that are there already."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*install, tmp_path / "site", wheel], check=True, timeout=300)
    code = """
import shardwright as sw
print(sw.__file__)
print(sw.Machine.preset("8xH100").name)
from shardwright.cli import main
main(["--help"])
"""
    said = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout.splitlines()
    assert Path(said[0]).is_relative_to(tmp_path / "site")
    assert said[1] == "8xH100"
    assert any("frontier" in line for line in said)


def test_the_sdist_builds_the_same_wheel(wheel, tmp_path):
    """Without a network: the build backend is there already."""
    from hatchling.builders.sdist import SdistBuilder

    (archive,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path))
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    needed = ("README.md", "LICENSE", "CITATION.cff", "SECURITY.md", "docs/pictures/report.png")
    assert [name for name in needed if not (source / name).exists()] == []
    again = build_wheel(source, tmp_path)
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        files = [{i.filename: i.CRC for i in archive.infolist()} for archive in (one, other)]
    assert {n: c for n, c in files[0].items() if "dist-info" not in n}.items() <= files[1].items()


def test_the_citation_names_this_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"]


def test_the_workflow_runs_the_script_of_ci():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert any(".ci/run" in step.get("run", "") for step in workflow["jobs"]["all"]["steps"])


def test_the_lowest_promised_versions_and_the_newest_are_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = (one for one in project["dependencies"] if one.startswith("torch"))
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    job = workflow["jobs"]["versions"]
    assert any(".ci/versions" in step.get("run", "") for step in job["steps"])
    lowest, newest = job["strategy"]["matrix"]["include"]
    assert lowest["torch"] == torch.replace(">=", "==") + ".*"
    assert lowest["python"] == project["requires-python"].removeprefix(">=")
    assert newest["torch"] == "torch"
