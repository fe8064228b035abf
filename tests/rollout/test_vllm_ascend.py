"""What the vllm engine asks for on an NPU is what the sources of vllm-ascend have.

It runs only where Ascend's libraries are, so its sources are read. The variable CORRAL_TEST_VLLM_ASCEND names the
archive of them (vllm_ascend-VERSION.tar.gz), or a folder with it.
"""

from __future__ import annotations

import ast
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from corral.platform import NPU
from corral.rollout.vllm import _ASCEND


def _archive() -> Path | None:
    given = Path(os.environ.get("CORRAL_TEST_VLLM_ASCEND") or "/nonexistent")
    found = sorted(given.glob("vllm_ascend-*.tar.gz")) if given.is_dir() else [given]
    return found[-1] if found and found[-1].is_file() else None


pytestmark = pytest.mark.skipif(_archive() is None, reason="needs vllm-ascend's sources in CORRAL_TEST_VLLM_ASCEND")

Source = Callable[[str], str]


@pytest.fixture(scope="module")
def source() -> Source:
    """The text of a file of the package."""
    path = _archive()
    assert path is not None
    with tarfile.open(path) as archive:
        texts = {
            member.name.partition("/vllm_ascend/")[2]: file.read().decode()
            for member in archive
            if member.name.endswith(".py") and (file := archive.extractfile(member)) is not None
        }
    return texts.__getitem__


def find_class(text: str, name: str) -> ast.ClassDef:
    (found,) = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef) and node.name == name]
    return found


def find_function(text: str, within: str, name: str) -> ast.FunctionDef:
    body = find_class(text, within).body
    (found,) = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    return found


def test_the_additional_options_exist(source: Source) -> None:
    text = source("ascend_config.py")
    fields = {
        node.target.id: ast.unparse(node.annotation)
        for node in find_class(text, "AscendConfig").body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert {name: type(value).__name__ for name, value in _ASCEND.items()}.items() <= fields.items()
    assert "if self.weight_nz_mode not in (0, 1, 2):" in text
    wake = ast.unparse(find_function(source("worker/worker.py"), "NPUWorker", "wake_up"))
    assert "FRACTAL_NZ" in wake  # why it is 0: with another value it does not wake up


def test_it_sleeps_at_level_1_and_wakes_up(source: Source) -> None:
    text = source("worker/worker.py")
    sleep = find_function(text, "NPUWorker", "sleep")
    assert ast.unparse(sleep.args) == "self, level: int=1"
    assert "offload_tags=('weights',) if level == 1 else tuple()" in ast.unparse(sleep)
    assert "tags: list[str] | None=None" in ast.unparse(find_function(text, "NPUWorker", "wake_up").args)


def test_ranks_that_are_there_already_are_taken(source: Source) -> None:
    assert re.search(r"distributed_executor_backend not in .*external_launcher", source("worker/worker.py"))


def test_its_log_probs_are_raw(source: Source) -> None:
    """Whatever the option says: so a run at another temperature is refused on an NPU."""
    assert "self.sampler = AscendSampler()" in source("worker/model_runner_v1.py")
    made = find_function(source("sample/sampler.py"), "AscendSampler", "__init__")
    assert [ast.unparse(default) for default in made.args.defaults] == ["DEFAULT_LOGPROBS_MODE"]
    assert re.search(r'^DEFAULT_LOGPROBS_MODE\b.* = "raw_logprobs"$', source("sample/sampler.py"), re.M)


def test_its_memory_pool_takes_no_expandable_segments(source: Source) -> None:
    made = ast.unparse(find_function(source("device_allocator/camem.py"), "CaMemAllocator", "__init__"))
    assert f"os.environ.get('{NPU.allocator}', '')" in made
    assert "assert 'expandable_segments:True' not in conf" in made
