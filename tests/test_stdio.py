"""Commands whose standard streams are closed, full, or read by somebody who leaves."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def shell(line: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `line` in bash, where "$@" is the corral command."""
    return subprocess.run(
        ["bash", "-c", line, "bash", sys.executable, "-m", "corral"],
        capture_output=True, text=True, timeout=60, check=False, env=os.environ | env,
    )  # fmt: skip


@pytest.mark.parametrize("arguments", ["config", "train --help"])
@pytest.mark.parametrize("env", [{"PYTHONUNBUFFERED": ""}, {"PYTHONUNBUFFERED": "1"}])
def test_a_reader_that_leaves_is_no_crash(arguments, env):
    done = shell(f'"$@" {arguments} | true; echo "${{PIPESTATUS[0]}}"', **env)
    assert done.stderr == ""
    # Nothing may have been written before the reader left, only after it; both ends of that race are fine.
    assert done.stdout in ("141\n", "0\n")


@pytest.mark.parametrize("env", [{"PYTHONUNBUFFERED": ""}, {"PYTHONUNBUFFERED": "1"}])
def test_a_full_disk_is_one_line(env):
    done = shell('"$@" config seed > /dev/full', **env)
    assert done.stderr == "error: cannot write to stdout: No space left on device\n"
    assert done.returncode == 75


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_as_the_null_device(closed):
    assert shell(f'"$@" config seed {closed}').returncode == 0
    assert shell(f'"$@" config --no-such-option {closed}').returncode == 78


def test_what_is_printed_never_ends_up_in_another_file(tmp_path):
    """The first file that is opened does not get the number of a closed stdout."""
    code = (
        "import os, sys; from corral.stdio import standard_streams\n"
        "with standard_streams():\n"
        "    file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)\n"
        "    print('printed', flush=True); os.write(1, b'raw'); os.write(2, b'raw')\n"
    )
    path = tmp_path / "file"
    line = f'"{sys.executable}" -c "$0" "{path}" >&- 2>&-'
    assert subprocess.run(["bash", "-c", line, code], timeout=60, check=False).returncode == 0
    assert path.read_bytes() == b""
