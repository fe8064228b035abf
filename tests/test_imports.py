"""Who may import whom. The table is the design's; a package that is not in it does not belong to the house."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import corral

ROOT = Path(corral.__file__).parent
HEAVY = frozenset({"torch", "transformers", "ray"})


@dataclass(frozen=True)
class Rule:
    """inside: packages of Corral it may import. never: libraries it must not import, not even inside a function.
    only: when set, the only libraries outside the standard library it may import."""

    inside: frozenset[str]
    never: frozenset[str] = frozenset()
    only: frozenset[str] | None = None


FACTS = Rule(
    frozenset({"config", "platform"}), never=HEAVY, only=frozenset({"pydantic", "omegaconf", "hydra", "httpx", "yaml"})
)
DATA = Rule(frozenset({"data", "rewards", "batch", "config"}), never=frozenset({"ray"}))
ENGINE = Rule(frozenset({"engine", "rollout", "algorithms", "batch", "platform", "config"}), never=frozenset({"ray"}))
LEARNING = frozenset(
    {"config", "platform", "algorithms", "batch", "data", "rewards", "engine", "rollout", "workers", "trainer"}
)

RULES = {
    "arguments": Rule(frozenset(), only=frozenset()),
    "errors": Rule(frozenset(), only=frozenset()),
    "exits": Rule(frozenset(), only=frozenset()),
    "atomic": Rule(frozenset(), only=frozenset()),
    "stdio": Rule(frozenset(), only=frozenset()),
    "findings": Rule(frozenset(), only=frozenset()),
    "manifest": Rule(frozenset(), only=frozenset()),
    "batch": Rule(frozenset(), only=frozenset({"torch"})),
    "config": FACTS,
    "platform": FACTS,
    "algorithms": Rule(frozenset({"algorithms", "batch"}), only=frozenset({"torch"})),
    "data": DATA,
    "rewards": DATA,
    "engine": ENGINE,
    "rollout": ENGINE,
    "workers": Rule(frozenset({"workers", "engine", "rollout", "batch", "algorithms", "config", "platform"})),
    "trainer": Rule(LEARNING),
    "job": Rule(frozenset({"job", "config", "platform"}), never=frozenset({"torch", "transformers"})),
    "e2e": Rule(frozenset({"e2e", "job", "config"}), never=HEAVY),
    "cli": Rule(LEARNING | {"job", "e2e", "cli"}),
}
EVERYWHERE = frozenset({"arguments", "errors", "exits", "atomic", "stdio", "findings", "manifest", "__version__"})
ENTRY_POINTS = frozenset({"__init__.py", "__main__.py"})


def package_of(path: Path, root: Path) -> str:
    """The row of the table a file belongs to: its first folder, or its own name at the top."""
    first = path.relative_to(root).parts[0]
    return "cli" if first in ENTRY_POINTS else first.removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, module, at the top) of every import that runs; `if TYPE_CHECKING:` does not, the top of a class does."""
    yield from _imports(ast.parse(path.read_text(encoding="utf-8")), top=True)


def _imports(node: ast.AST, top: bool) -> Iterator[tuple[int, str, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for name in child.names:
                yield child.lineno, name.name, top
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: imports are absolute"
            assert child.module is not None
            if child.module.split(".")[0] == "corral":
                for name in child.names:
                    yield child.lineno, f"{child.module}.{name.name}", top
            else:
                yield child.lineno, child.module, top
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for other in child.orelse:
                yield from _imports(other, top)
        else:
            yield from _imports(
                child, top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            )


def violations(root: Path) -> list[str]:
    """One line for each import that the table forbids."""
    found = []
    for path in sorted(root.rglob("*.py")):
        package = package_of(path, root)
        name = path.relative_to(root)
        if package not in RULES:
            found.append(f"{name}: package {package!r} is not in the table")
            continue
        for line, module, top in imports(path):
            reason = forbidden(package, path.name, module, top)
            if reason:
                found.append(f"{name}:{line}: {package} imports {module}: {reason}")
    return found


def forbidden(package: str, file: str, module: str, top: bool) -> str | None:
    """Why a file of the package must not import the module; None when it may."""
    rule = RULES[package]
    library, *rest = module.split(".")
    starts_fast = package == "cli" or file == "commands.py"
    if library == "corral":
        inner = rest[0] if rest else "__version__"
        # A command line imports what it needs inside the command that needs it.
        if (
            (package == "cli" or file == "commands.py")
            and top
            and inner not in EVERYWHERE | {"cli"}
            and "commands" not in rest
        ):
            return "only inside the command that needs it"
        return None if inner in EVERYWHERE | rule.inside else "not in its row of the table"
    if library in rule.never:
        return "never here"
    if starts_fast and top and library not in sys.stdlib_module_names:
        return "only inside the command that needs it"
    if rule.only is not None and library not in rule.only and library not in sys.stdlib_module_names:
        return "not among its libraries"
    return None


def test_the_table_holds():
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "source", "said"),
    [
        ("config/a.py", "import torch", "config/a.py:1: config imports torch: never here"),
        ("config/a.py", "def f():\n    from torch import nn", "config/a.py:2: config imports torch: never here"),
        ("config/a.py", "from corral.batch import Batch", "config imports corral.batch.Batch: not in its row"),
        ("config/a.py", "from corral import batch", "config imports corral.batch: not in its row"),
        ("config/a.py", "import numpy", "config imports numpy: not among its libraries"),
        ("algorithms/a.py", "import ray", "algorithms imports ray: not among its libraries"),
        ("algorithms/a.py", "from corral.config.plan import Plan", "algorithms imports corral.config.plan"),
        ("engine/a.py", "try:\n    import ray\nexcept ImportError:\n    pass", "engine/a.py:2: engine imports ray"),
        ("rewards/a.py", "import corral.engine.model", "rewards imports corral.engine.model: not in its row"),
        ("workers/a.py", "from corral.trainer import ppo", "workers imports corral.trainer.ppo: not in its row"),
        ("trainer/a.py", "from corral.e2e import case", "trainer imports corral.e2e.case: not in its row"),
        ("e2e/a.py", "import torch.nn", "e2e imports torch.nn: never here"),
        ("e2e/a.py", "class A:\n    import corral.trainer", "e2e imports corral.trainer"),
        ("job/a.py", "def f():\n    import transformers", "job imports transformers: never here"),
        ("cli.py", "import torch", "cli.py:1: cli imports torch: only inside the command"),
        ("cli.py", "from corral.trainer.run import run", "cli imports corral.trainer.run.run: only inside the command"),
        ("__main__.py", "if True:\n    import yaml", "cli imports yaml: only inside the command"),
        ("data/commands.py", "import pyarrow", "data imports pyarrow: only inside the command"),
        ("data/commands.py", "from corral.data import rows", "data imports corral.data.rows: only inside the command"),
        ("batch.py", "import numpy", "batch imports numpy: not among its libraries"),
        ("errors.py", "import corral.batch", "errors imports corral.batch: not in its row"),
        ("utils/a.py", "", "utils/a.py: package 'utils' is not in the table"),
    ],
)
def test_the_check_finds_a_planted_import(tmp_path, file, source, said):
    planted = tmp_path / file
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text(source)
    (line,) = violations(tmp_path)
    assert said in line


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("config/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor"),
        ("config/a.py", "from omegaconf import OmegaConf\nfrom corral.errors import ConfigError\nimport corral"),
        ("cli.py", "def f():\n    import torch\n    from corral.trainer.run import run"),
        (
            "cli.py",
            "import argparse\nfrom corral.e2e.commands import add_parsers\nfrom corral.data import commands as data",
        ),
        ("e2e/commands.py", "import argparse\ndef f():\n    import yaml\n    from corral.e2e.case import read_case"),
        ("algorithms/a.py", "import torch\nfrom corral.batch import Batch"),
        ("trainer/a.py", "import torch, ray, tqdm\nfrom corral.workers.group import Group"),
    ],
)
def test_the_check_lets_good_imports_pass(tmp_path, file, source):
    planted = tmp_path / file
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text(source)
    assert violations(tmp_path) == []
