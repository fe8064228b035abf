"""The reference script: strict shell, every value one word whatever it contains, the command line to the letter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPT = EXAMPLES / "run_qwen3_06b_ppo_multinode.sh"


def expected(
    home: str,
    *,
    model: str | None = None,
    data: str | None = None,
    enable: str = "False",
    dump_dir: str | None = None,
    steps: str = "[1]",
    action: str = "cache",
) -> list[str]:
    model = f"{home}/.cache/models/Qwen/Qwen3-0.6B" if model is None else model
    data = f"{home}/data/gsm8k" if data is None else data
    dump_dir = f"{home}/.corral/rollout_dump" if dump_dir is None else dump_dir
    return [
        "-m",
        "corral.trainer.main_ppo",
        "algorithm.adv_estimator=gae",
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/test.parquet",
        "data.train_batch_size=16",
        "data.max_prompt_length=512",
        "data.max_response_length=128",
        "data.shuffle=False",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.use_remove_padding=True",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.actor.fsdp_config.param_offload=True",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
        "actor_rollout_ref.actor.use_kl_loss=False",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.8",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
        "actor_rollout_ref.rollout.enable_chunked_prefill=True",
        "actor_rollout_ref.rollout.enforce_eager=False",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.cudagraph_mode=FULL_AND_PIECEWISE",
        "critic.optim.lr=1e-5",
        "critic.model.use_remove_padding=True",
        f"critic.model.path={model}",
        "critic.model.enable_gradient_checkpointing=True",
        "critic.ppo_micro_batch_size_per_gpu=1",
        "critic.ulysses_sequence_parallel_size=2",
        "critic.fsdp.param_offload=True",
        "critic.fsdp.optimizer_offload=True",
        "critic.use_dynamic_bsz=True",
        "trainer.critic_warmup=0",
        'trainer.logger=["console"]',
        "trainer.project_name=verl_ppo_example_gsm8k_qwen3",
        "trainer.experiment_name=qwen3_06b_fsdp_multinode_2x4",
        "trainer.n_gpus_per_node=4",
        "trainer.nnodes=2",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.total_epochs=1",
        "trainer.total_training_steps=1",
        f"skip.rollout.enable={enable}",
        f"skip.rollout.dump_dir={dump_dir}",
        f"skip.rollout.steps={steps}",
        f"skip.rollout.action={action}",
    ]


def run_script(tmp_path: Path, env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run it with a python3 that prints its arguments, NUL-separated, and exits 7."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    stub = stubs / "python3"
    stub.write_text(
        f"#!{sys.executable}\nimport os, sys\nos.write(1, '\\0'.join(sys.argv[1:]).encode())\nsys.exit(7)\n"
    )
    stub.chmod(0o755)
    return subprocess.run(
        [str(SCRIPT), *arguments],
        env={"PATH": f"{stubs}:{os.environ['PATH']}", **env},
        capture_output=True,
        timeout=30,
        check=False,
    )


def test_defaults_are_the_reference_command(tmp_path):
    done = run_script(tmp_path, {"HOME": "/home/some one"})
    assert done.stderr == b""
    assert done.stdout.decode().split("\0") == expected("/home/some one")
    assert done.returncode == 7


def test_every_setting_comes_from_the_environment_as_one_word(tmp_path):
    strange = """/a b/"c"/'d'/$HOME/`e`/*"""
    env = {
        "HOME": "/h",
        "MODEL_PATH": f"{strange}/model",
        "DATA_DIR": f"{strange}/data",
        "SKIP_ENABLE": "True",
        "SKIP_DUMP_DIR": f"{strange}/dump",
        "SKIP_STEPS": "[1, 2]",
        "SKIP_ACTION": "repeat",
    }
    extra = ["trainer.total_training_steps=3", "a=b c", "", "x='[\"y\"]'", "*"]
    done = run_script(tmp_path, env, *extra)
    assert done.stdout.decode().split("\0") == [
        *expected(
            "/h",
            model=f"{strange}/model",
            data=f"{strange}/data",
            enable="True",
            dump_dir=f"{strange}/dump",
            steps="[1, 2]",
            action="repeat",
        ),
        *extra,
    ]


def test_model_id_names_the_default_model_folder(tmp_path):
    done = run_script(tmp_path, {"HOME": "/h", "MODEL_ID": "Qwen/Qwen3 4B"})
    assert done.stdout.decode().split("\0") == expected("/h", model="/h/.cache/models/Qwen/Qwen3 4B")


def test_without_a_home_it_stops_and_says_so(tmp_path):
    done = run_script(tmp_path, {})
    assert done.returncode != 0
    assert b"HOME: unbound variable" in done.stderr
    assert done.stdout == b""


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_strict_shell(script):
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert os.access(script, os.X_OK)
    commands = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert commands[0] == "set -euo pipefail"
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True, check=True).stderr == b""
    assert unquoted(text) == []


def unquoted(text: str) -> list[str]:
    """Expansions outside double quotes, the ones that split and glob."""
    code = "\n".join("" if line.lstrip().startswith("#") else line for line in text.splitlines())
    without_strings = re.sub(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"", "", code)
    return re.findall(r"\$[A-Za-z_{@*(][^\s]*", without_strings)


def test_the_quoting_check_can_fail():
    assert unquoted('a="$B" "${C}"\n# $d\n') == []
    assert unquoted('run $A "${B}" x=${C}/d $@\n') == ["$A", "${C}/d", "$@"]
