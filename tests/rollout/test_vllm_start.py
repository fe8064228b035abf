"""Starting the real vllm: what it refuses is one line of the user's, and the process stays as it was."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from corral.errors import ConfigError
from corral.rollout.vllm import stream_seed
from tests.rollout.vllm_engines import Truth, close_all, needs_vllm, start, vllm_plan, write


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Truth]:
    yield write(tmp_path_factory.mktemp("model"))
    close_all()


@needs_vllm
def test_the_random_state_of_the_process_stays(truth: Truth) -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    wanted = [random.random(), np.random.rand(), torch.rand(()).item()]
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    start(truth)
    assert [random.random(), np.random.rand(), torch.rand(()).item()] == wanted


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown option": (
        {"engine_kwargs": {"swap_spaces": 4, "block_sise": 16}},
        r"engine_kwargs\.vllm\.\w+: vllm has no such option; the nearest is",
    ),
    "nearest": ({"engine_kwargs": {"block_sise": 16}}, r"vllm\.block_sise: .*the nearest is 'block_size'"),
    "value": ({"engine_kwargs": {"block_size": "many"}}, "vllm does not start: .*valid integer"),
    "longer than the model": ({"max_model_len": 4096}, "vllm does not start: .*max_model_len.*4096"),
    "no room for one sample": ({"cache_bytes": 1 << 10}, "vllm does not start: .*"),
}


@needs_vllm
@pytest.mark.parametrize(("changes", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_options_that_do_not_fit_are_one_line(truth: Truth, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        start(truth, vllm_plan(vllm=changes))
    assert "\n" not in str(refused.value)


def test_the_module_does_not_need_vllm_until_it_starts() -> None:
    code = "import sys; sys.modules['vllm'] = None; import corral.workers.worker"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_without_vllm_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text("raise ImportError('libcudart.so.12 is not there')\n")
    code = (
        "from pathlib import Path\n"
        "from tests.rollout.vllm_engines import start, write, vllm_plan\n"
        "from corral.errors import ConfigError\n"
        "try:\n"
        f"    start(write(Path({str(tmp_path / 'model')!r})))\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    env = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == (
        "rollout.name=vllm: vllm cannot be imported: libcudart.so.12 is not there; see docs/vllm.md\n"
    ), done.stderr


def test_streams_are_keyed_by_all_four_numbers() -> None:
    keys = [(seed, step, row, index) for seed in (0, 1) for step in (1, 2) for row in (0, 7) for index in (0, 3)]
    seeds = {stream_seed(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert {stream_seed(*key) for key in keys} == seeds
