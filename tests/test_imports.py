"""Imports go downward only, scripts import no scripts, and only modeling/ knows the insides of transformers models."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "self_speculation"
LEVELS = [  # each may import from its own and from earlier ones
    {"config"},
    {"files", "hub", "watch"},
    {"distributed", "modeling", "loading", "adapters", "vocabulary"},
    {"drafters", "nucleus", "sampling", "sources", "stopping", "stats"},
    {"batching", "decoding", "datasets", "metrics", "streaming", "tracing"},
    {"cli", "records", "responses", "scores", "costs", "prediction", "replay", "forecast", "skip_scores", "skip_search",
     "skip_sets", "study", "grid", "prompts", "task_settings", "training"},
    {"auto", "generation", "hf_generate", "peers", "strategies", "trace_page"},
    {"answering", "benchmarking", "correctness", "evaluating", "harness", "searching", "skip_results", "sweeping"},
]  # fmt: skip
SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py"))
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def level(name: str) -> int:
    return next(number for number, names in enumerate(LEVELS) if name in names)


def imported(path: Path) -> set[str]:
    """Parts of the package that a module imports, wherever in the module it does."""
    inside = path.relative_to(PACKAGE).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = list(inside[: len(inside) + 1 - node.level])
            target = base + (node.module.split(".") if node.module else [])
            found |= {target[0]} if target else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("self_speculation."):
            found.add((node.module or "").split(".")[1])
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downward(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    upward = {name for name in imported(path) if level(name) > level(own)}
    assert not upward, f"{path.name} imports {upward} from above"


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_import_no_scripts(script):
    for node in ast.walk(ast.parse((ROOT / f"{script}.py").read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not {name.split(".")[0] for name in names} & set(SCRIPTS)


@pytest.mark.parametrize("path", sorted((PACKAGE / "drafters").glob("*.py")), ids=lambda path: path.name)
def test_drafters_see_the_model_through_one_class(path):
    text = path.read_text(encoding="utf-8")
    assert "transformers import" not in text
    assert "backbone" not in text


def test_every_package_is_installed():
    packages = {".".join(path.parent.relative_to(ROOT).parts) for path in PACKAGE.rglob("__init__.py")}
    (listed,) = re.findall(r"^packages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    assert set(re.findall(r'"(.*?)"', listed)) == packages
