"""The architecture: imports go one way, the package is whole, the README's tables are the generated ones."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fxmem
from fxmem.ops import RULES

ROOT = Path(__file__).parent.parent
ORDER = {
    "errors": -1,
    "records": 0,
    "ops": 1,
    "optim": 1,
    "capture": 2,
    "export": 3,
    "render": 2,
    "builtin": 2,
    "passes": 3,
    "measure": 4,
    "pipeline": 4,
    "regions": 5,
    "reporting": 6,
    "api": 7,
    "backend": 7,
    "compiled": 7,
    "targets": 7,
    "": 8,
    "cli": 9,
}


def _room(path: Path) -> str:
    relative = path.relative_to(ROOT)
    if relative.parts[0] == "passes":
        return "passes"
    return "" if relative.name == "__init__.py" and len(relative.parts) == 2 else relative.parts[1].removesuffix(".py")


def _sources() -> list[Path]:
    return [*ROOT.glob("fxmem/**/*.py"), *ROOT.glob("passes/*.py")]


@pytest.mark.parametrize("path", _sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    here = _room(path)
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fxmem":
            names = [f"{node.module}.{a.name}" if node.module == "fxmem" else node.module for a in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names if a.name.split(".")[0] == "fxmem"]
        for name in names:
            there = name.split(".")[1] if "." in name else ""
            if here == "records" and there == "render":
                continue  # printing a report is a two-line function on top of its data
            assert ORDER[there] < ORDER[here] or there == here, f"{path} imports {name}"


def test_passes_is_flat_and_guarded() -> None:
    assert not [p for p in (ROOT / "passes").iterdir() if p.is_dir() and p.name != "__pycache__"]
    done = subprocess.run([sys.executable, "-c", "import passes"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "this folder is the package fxmem.passes" in done.stderr


def test_backend_is_found_by_name() -> None:
    assert "fxmem" in torch._dynamo.list_backends(exclude_tags=())
    entry_points = importlib.metadata.entry_points(group="torch_dynamo_backends", name="fxmem")
    assert next(iter(entry_points)).load() is fxmem.backend.fxmem_backend  # type: ignore[attr-defined]


def test_version() -> None:
    assert importlib.metadata.version("fxmem") == fxmem.__version__


def test_readme_table_of_ops_is_what_the_rules_say() -> None:
    lines = [f"| {r.name} | {r.eager} | {r.needed} |" for r in RULES]
    assert "\n".join(["|---|---|---|", *lines]) in (ROOT / "README.md").read_text()


def test_rules_do_not_overlap() -> None:
    for kind in ("modules", "functions", "methods"):
        keys = [key for rule in RULES for key in getattr(rule, kind)]
        assert len(keys) == len(set(keys))
    assert all(issubclass(ours, stock) for rule in RULES for stock, ours in rule.modules.items())


def test_readme_example_runs() -> None:
    text = (ROOT / "README.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    assert len(code.splitlines()) == 8
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "kept for backward" in done.stdout
    assert "Measurement(kept=" in done.stdout


def test_readme_training_loops_run(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    first = text.split("```python\n")[1].split("```")[0]
    loops = text.split("### Train: ")[1].split("\n### ")[0].split("```python\n")[1:]
    assert len(loops) == 2
    code = "\n".join([first, *(part.split("```")[0] for part in loops)])
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {folder.name for folder in (tmp_path / "out").iterdir()} == {"checkpoint-2", "checkpoint-4"}
    assert (tmp_path / "out" / "checkpoint-4" / "adapter_model.safetensors").exists()


def test_a_checkout_works_where_it_is_not_installed() -> None:
    code = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f)];"
        "import fxmem, fxmem.passes.plan; print(fxmem.passes.plan.__file__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == ROOT / "passes" / "plan.py"
