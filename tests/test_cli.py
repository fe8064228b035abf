"""The command line as a user's shell sees it: output, one line for each error, exit codes, and what gets imported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from corral.config.reference import as_markdown
from corral.config.schema.root import leaves
from tests.config.conftest import write_model

HEAVY = ("torch", "transformers", "ray", "pyarrow", "numpy")


def corral(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "corral", *arguments], capture_output=True, text=True, timeout=60, check=False, cwd=cwd
    )


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def run_keys(tmp_path: Path) -> list[str]:
    write_model(tmp_path / "model")
    (tmp_path / "train.parquet").write_bytes(b"PAR1 rows and footer PAR1")
    return [
        f"data.train_files={tmp_path}/train.parquet",
        f"actor_rollout_ref.model.path={tmp_path}/model",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "trainer.device=cpu",
    ]


def test_help_lists_every_command():
    done = corral("--help")
    assert done.returncode == 0
    for command in ("train", "plan", "config", "data", "model", "cluster", "e2e"):
        assert f"\n    {command} " in done.stdout
    assert corral("--version").stdout.startswith("corral 0.")


def test_plan_text_and_json(run_keys):
    done = corral("plan", *run_keys, "trainer.nnodes=2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 = 2 nodes × 1 logical device, cpu" in done.stdout
    for arguments in (["--json", *run_keys], [*run_keys, "--json"]):
        done = corral("plan", *arguments)
        assert done.returncode == 0
        assert json.loads(done.stdout)["topology"]["world"] == 1


@pytest.mark.parametrize("module", ["corral", "corral.trainer.main_ppo"])
@pytest.mark.parametrize(
    ("wrong", "code", "said"),
    [
        ("trainer.nnode=2", 78, "'trainer.nnodes'"),
        ("+trainer.nnode=2", 78, "'trainer.nnodes'"),
        ("skip.rollout.steps=1", 78, "'skip.rollout.steps=[1]'"),
        ("trainer.experiment_name=a=b", 78, "'trainer.experiment_name=\"a=b\"'"),
        ("data.train_files=/dev/null/absent.parquet", 78, "does not exist"),
    ],
)
def test_a_mistake_is_one_line_and_its_exit_code(run_keys, tmp_path, module, wrong, code, said):
    arguments = ["train"] if module == "corral" else []
    empty = tmp_path / "cwd"
    empty.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments, *run_keys, wrong],
        capture_output=True, text=True, timeout=60, check=False, cwd=empty,
    )  # fmt: skip
    assert done.returncode == code
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr
    assert done.stdout == ""
    assert list(empty.iterdir()) == []


def test_config_lists_keys_that_hold_the_pattern():
    done = corral("config", "ULYSSES")
    assert (done.returncode, done.stderr) == (0, "")
    found = [line.split("  ") for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert found == [
        ["actor_rollout_ref.actor.ulysses_sequence_parallel_size", "int", "1", "[ranks]"],
        ["actor_rollout_ref.ref.ulysses_sequence_parallel_size", "int",
         "${actor_rollout_ref.actor.ulysses_sequence_parallel_size}", "[ranks]"],
        ["critic.ulysses_sequence_parallel_size", "int", "1", "[ranks]"],
    ]  # fmt: skip
    assert "Ranks that share one sequence" in done.stdout


def test_config_json_has_every_key():
    done = corral("config", "--json")
    listed = {item["key"]: item for item in json.loads(done.stdout)}
    assert list(listed) == list(leaves())
    assert listed["data.train_batch_size"] == {
        "key": "data.train_batch_size",
        "type": "int",
        "default": 1024,
        "unit": "prompts",
        "meaning": leaves()["data.train_batch_size"].doc,
        "aliases": [],
    }
    assert "critic.fsdp_config.param_offload" in listed["critic.fsdp.param_offload"]["aliases"]
    assert listed["actor_rollout_ref.actor.clip_ratio_low"]["aliases"] == ["actor_rollout_ref.actor.clip_ratio"]


def test_config_without_a_match_names_the_nearest_key():
    done = corral("config", "train_batchsize")
    assert (done.returncode, done.stdout) == (78, "")
    assert "'data.train_batch_size'" in done.stderr


def test_the_page_of_all_keys_is_current():
    page = Path(__file__).parents[1] / "docs" / "keys.md"
    assert page.read_text(encoding="utf-8") == as_markdown(), "write it again: corral config --markdown > docs/keys.md"
    assert all(f"`{name.rpartition('.')[2]}`" in page.read_text(encoding="utf-8") for name in leaves())


def test_data_that_is_not_data_exits_with_1(run_keys, tmp_path):
    (tmp_path / "train.parquet").write_bytes(b"")
    done = corral("plan", *run_keys)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "invalid choice: 'trian'"),
        ([], "required: COMMAND; see `corral --help`"),
        (["data"], "required: KIND; see `corral data --help`"),
        (["data", "arithmetic", "out", "--seed", "one"], "see `corral data arithmetic --help`"),
        (["cluster", "local", "--nodes", "some"], "'some' is not a whole number of at least 0"),
        (["cluster", "local", "--devices", "two"], "'two' is not a whole number of at least 1"),
        (["cluster", "local", "--port", "70000"], "'70000' is not a port, 1 to 65535"),
        (["cluster", "local", "--start-timeout", "nan"], "'nan' is not a number of seconds above 0"),
    ],
)
def test_wrong_arguments_are_one_line_and_78(tmp_path, arguments, said):
    done = corral(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (78, "", 1)
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_option_among_the_keys():
    assert "is an option" in corral("train", "trainer.nnodes=2", "--help").stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan"],
        ["plan", "--json"],
        ["config"],
        ["config", "--markdown"],
        ["--help"],
        ["data", "--help"],
        ["e2e", "--help"],
        ["e2e", "list"],
    ],
)
def test_light_commands_import_nothing_heavy(run_keys, arguments):
    code = (
        "import sys\nfrom corral.cli import main\n"
        "try:\n    code = main(sys.argv[1:])\nexcept SystemExit as stop:\n    code = stop.code\n"
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)\nsys.exit(code)"
    )
    done = python(code, *arguments, *(run_keys if arguments[0] == "plan" else []))
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_a_refused_run_imports_nothing_heavy(run_keys):
    code = (
        "import sys\nfrom corral.cli import main\ncode = main(sys.argv[1:])\n"
        f"print([name for name in {HEAVY} if name in sys.modules])\nsys.exit(code)"
    )
    done = python(code, "train", *run_keys, "trainer.nnode=2")
    assert (done.returncode, done.stdout) == (78, "[]\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_run_the_clean_up_and_have_their_codes(number, code):
    waiting = (
        "import signal, sys\nfrom corral.exits import run_command\n"
        "def command():\n    try:\n        print('ready', flush=True)\n        while True: signal.pause()\n"
        "    finally:\n        print('clean', flush=True)\n"
        "sys.exit(run_command(command))"
    )
    with subprocess.Popen([sys.executable, "-c", waiting], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (code, b"clean\n")
    assert b"Traceback" not in err


@pytest.mark.parametrize(
    ("error", "code"),
    [("CorralError", 1), ("ConfigError", 78), ("DataError", 1), ("InfraError", 75), ("DeadlineError", 124)],
)
def test_every_error_is_one_line_with_its_code(error, code):
    program = (
        f"import sys\nfrom corral.errors import {error}\nfrom corral.exits import run_command\n"
        f"def command():\n    raise {error}('what,\\n  and how to fix it')\nsys.exit(run_command(command))"
    )
    done = python(program)
    assert (done.returncode, done.stderr) == (code, "error: what, and how to fix it\n")


def test_a_bug_keeps_its_traceback():
    program = "import sys\nfrom corral.exits import run_command\nsys.exit(run_command(lambda: 1 // 0))"
    done = python(program)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
