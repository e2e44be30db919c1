"""The wheel, installed in an environment outside the repository, as a user has it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("wheel")  # one worker builds it

ROOT = Path(__file__).parents[2]
RUN = """\
[model]
name = "llama-tiny"
layers = 2
width = 32
ff = 64

[parallel]
dp = 2
pp = 2

[train]
steps = 2
seq_len = 32
global_batch_size = 4
precision = "float32"

[data]
source = "synthetic"

[log]
dir = "run"
"""
# What the command line has to set by itself, and what would lead back to the repository.
UNSET = {"XLA_FLAGS", "NPROC", "JAX_PLATFORMS", "PYTHONPATH", "VIRTUAL_ENV"}
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in UNSET}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that neither an old build/ nor uncommitted caches get in, and nothing is left behind."""
    folder = tmp_path_factory.mktemp("wheel")
    leave = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=leave)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "-qq", "--no-deps", "-w", str(folder), str(folder / "source")], check=True)
    (path,) = folder.glob("parallax_train-*.whl")
    return path


class Installed:
    """The wheel in a fresh environment, with the dependencies beside it or, to be quick, those of this interpreter.

    A folder on PYTHONPATH has its .pth files ignored: the editable install of the repository is not seen through it.
    """

    def __init__(self, wheel: Path, folder: Path, own_dependencies: bool):
        venv.create(folder / "env", with_pip=False)
        self.bin = folder / "env" / "bin"
        self.folder = folder / "elsewhere"
        self.folder.mkdir()
        self.environment = ENVIRONMENT | ({} if own_dependencies else {"PYTHONPATH": sysconfig.get_path("purelib")})
        how = ["-c", str(ROOT / ".ci/pins.txt")] if own_dependencies else ["--no-deps"]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(self.bin / "python")]
        # pip sees the environment as it is, without PYTHONPATH: it does not take another install for this one.
        subprocess.run([*pip, "install", "-qq", *how, str(wheel)], check=True, env=ENVIRONMENT)

    def run(self, *command: str) -> str:
        """Runs a program of the environment in a folder of its own. Returns what it prints."""
        program, *words = command
        done = subprocess.run(
            [str(self.bin / program), *words], cwd=self.folder, env=self.environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(
    scope="module", params=[pytest.param(False, id="quick"), pytest.param(True, id="empty", marks=pytest.mark.slow)]
)
def installed(wheel: Path, tmp_path_factory, request) -> Installed:
    return Installed(wheel, tmp_path_factory.mktemp("installed"), own_dependencies=request.param)


def test_what_is_in_it(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    here = {path.relative_to(ROOT / "parallax") for path in (ROOT / "parallax").rglob("*.py")}
    here |= {Path(folder, path.name) for folder in ("models", "meshes") for path in (ROOT / folder).glob("*.*")}
    assert {Path(name).relative_to("parallax") for name in names if name.startswith("parallax/")} == here
    assert {"parallax/models/llama.py", "parallax/meshes/h100-sxm.toml"} <= set(names)
    others = {Path(name).parts[0] for name in names} - {"parallax"}
    assert [name.endswith(".dist-info") for name in others] == [True]


def test_it_is_what_runs(installed: Installed):
    where = installed.run("python", "-c", "import parallax.models.llama as llama; print(llama.__file__)")
    assert Path(where.strip()).is_relative_to(installed.bin.parent)


def test_schedule(installed: Installed):
    words = ["schedule", "--kind", "interleaved", "--pp", "4", "--virtual-stages", "2", "--microbatches", "8", "--json"]
    printed = installed.run("parallax", *words)
    assert printed == installed.run("python", "-m", "parallax", *words)
    result = json.loads(printed)
    assert result["bubble"] == result["bubble_formula"] == 3 / 16  # (p - 1) / (v m)


def test_train(installed: Installed):
    (installed.folder / "tiny.toml").write_text(RUN)
    result = json.loads(installed.run("parallax", "train", "tiny.toml", "--json"))
    assert (result["status"], result["step"]) == ("done", 2)
    lines = (installed.folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
