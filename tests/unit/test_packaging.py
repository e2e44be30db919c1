"""Where things are imported from, and which way."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import parallax
from parallax.layout import AXES

ROOT = Path(__file__).parents[2]
# A module imports only from lines below its own, or from its own package.
LAYERS = (
    ("__main__",),
    ("cli",),
    ("train",),
    ("aot",),
    ("canonical", "summary"),
    ("start",),
    ("program",),
    ("checkpoint_io",),
    ("checkpoint_command", "data", "metrics", "optimizer", "translate"),
    ("checkpoint",),
    ("pipeline",),
    ("mesh", "model"),
    ("nn",),
    ("sharding",),
    ("plan",),
    ("batch_size", "text", "validate"),
    ("kernels", "rules"),
    ("machine", "model_files"),
    ("layout",),
    ("schedule", "config"),
    ("chunks", "echoes", "environment", "hlo", "output", "shape", "signals", "stages", "version"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
WITHOUT_JAX = (
    *("aot.command", "aot.simulate", "aot.traffic", "aot.warn"),
    *("batch_size", "checkpoint", "checkpoint_command", "chunks", "cli", "config", "echoes", "environment", "hlo"),
    "kernels",
    *("layout", "machine", "output", "plan", "plan.command", "plan.estimate_command", "rules", "schedule", "shape"),
    *("signals", "stages", "text", "translate", "validate", "version"),
)


def imports(path: Path) -> Iterator[str]:
    """Full names of what a file imports, inside functions too; of `from a import b`, `a.b`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files(folder: Path) -> list[Path]:
    """The Python files of a folder and its packages, without the symlinked parallax/models and parallax/meshes"""
    inside = [path for path in folder.rglob("*.py") if path.resolve() == path]
    assert inside
    return inside


def part(name: str) -> str | None:
    """`optimizer` of `parallax.optimizer.ShardedAdamW`; None outside parallax"""
    words = name.split(".")
    return words[1] if words[0] == "parallax" else None


@pytest.mark.parametrize("path", files(ROOT / "parallax"), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path: Path):
    own = path.relative_to(ROOT / "parallax").with_suffix("").parts[0]
    if own == "__init__":
        assert not [name for name in imports(path) if part(name)]
        return
    assert own in LEVEL, f"{own} has no layer yet: add it to LAYERS"
    for name in imports(path):
        other = part(name)
        assert other != "models", f"{name}: the core names no model"
        assert other in (None, own) or LEVEL[other] > LEVEL[own], f"{own} imports {name}, which is not below it"


@pytest.mark.parametrize("path", files(ROOT / "models"), ids=lambda path: path.name)
def test_a_model_file_knows_no_mesh(path: Path):
    assert {part(name) for name in imports(path)} <= {None, "nn", "shape"}
    assert not [name for name in imports(path) if "sharding" in name or "shard_map" in name]
    strings = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
    assert not strings & set(AXES)


def test_no_jax_before_it_is_needed():
    """In a process of its own, since this one has imported it."""
    names = ", ".join(f"parallax.{name}" for name in WITHOUT_JAX)
    code = f"import sys, {names}; print(*sorted({{'jax', 'flax', 'optax', 'orbax', 'grain'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


@pytest.mark.parametrize("name", ["models", "meshes"])
def test_one_folder_one_name(name: str, monkeypatch: pytest.MonkeyPatch):
    module = importlib.import_module(f"parallax.{name}")
    assert module.__file__ and Path(module.__file__).resolve() == ROOT / name / "__init__.py"
    assert (Path(parallax.__file__).parent / name).is_symlink()
    monkeypatch.syspath_prepend(ROOT)
    with pytest.raises(ImportError, match=rf"import parallax\.{name}, not {name}"):
        importlib.import_module(name)
