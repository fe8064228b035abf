"""`corral serve` as a process: how it starts, what it refuses, how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import pytest

from corral.job.service.serve import reachable
from corral.job.service.settings import Settings
from tests.job.service.running import until


@contextmanager
def serving(*options: object, env: dict[str, str] | None = None):
    """(process, url) of a service that has said where it is."""
    command = [sys.executable, "-m", "corral", "serve", "--port", "0", *map(str, options)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        line = process.stdout.readline()
        assert line.startswith("corral serve: http://"), line + process.stderr.read()
        yield process, line.split()[-1]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=20)


def corral(*options: object, **kwargs):
    command = [sys.executable, "-m", "corral", "serve", *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **kwargs)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    data_dir = tmp_path_factory.mktemp("served") / "data"
    with serving("--data-dir", data_dir) as (process, url):
        yield process, url, data_dir


def test_it_answers_and_is_ready(served):
    _, url, data_dir = served
    assert httpx.get(f"{url}/healthz").json() == {"status": "ok"}
    assert httpx.get(f"{url}/readyz").json() == {"status": "ready"}
    assert httpx.get(f"{url}/version").json()["backend"] == "local"
    assert data_dir.stat().st_mode & 0o077 == 0
    assert (data_dir / "agent.key").stat().st_mode & 0o077 == 0


def test_a_second_service_on_the_same_data_is_refused(served):
    _, _, data_dir = served
    second = corral("--port", 0, "--data-dir", data_dir)
    assert second.returncode == 75
    assert re.fullmatch(r"error: .*data folder.*\n", second.stderr), second.stderr


def test_a_taken_port(served, tmp_path):
    _, url, _ = served
    second = corral("--port", url.rsplit(":", 1)[1], "--data-dir", tmp_path / "data")
    assert second.returncode == 75
    assert re.fullmatch(r"error: port \d+ of 127.0.0.1 is taken.*\n", second.stderr)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host", "0.0.0.0"], "without a token file"),
        (["--host", "192.0.2.1"], "without a token file"),
        (["--token-file", "/nonexistent"], "cannot read the token file"),
        (["--config", "/nonexistent"], "cannot read /nonexistent"),
        (["--source-root", "verl=/x"], "is not /PREFIX=FOLDER"),
        (["--devices", "0"], "devices: "),
        (["--port", "99999"], "port: "),
        (["--scopes", "root"], "give some of"),
        (["--database", "nonsense"], ""),
    ],
)
def test_settings_that_cannot_be_served(tmp_path, options, said):
    done = corral("--port", 0, "--data-dir", tmp_path / "data", *options)
    assert done.returncode == 78, done.stderr
    assert re.fullmatch(r"error: [^\n]+\n", done.stderr)
    assert said in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_0_though_somebody_watches(tmp_path, number):
    with serving("--data-dir", tmp_path / "data", "--devices", 1) as (process, url):
        body = {"github_run_id": "1", "script": "/nowhere.sh"}
        assert httpx.post(f"{url}/api/v1/rayjobs", json=body).status_code == 422
        process.send_signal(number)
        begun = time.monotonic()
        assert process.wait(20) == 0
        assert time.monotonic() - begun < 10
        log = [json.loads(line) for line in process.stderr.read().splitlines()]
    requests = [entry for entry in log if entry["message"] == "request"]
    assert [entry["status"] for entry in requests] == [422]


def test_config_file_and_options_that_win_over_it(tmp_path):
    config = tmp_path / "service.yaml"
    config.write_text("devices: 3\nprofile: {devices_per_node: 2}\nlimits: {queued: 5}\nmax_nodes: 1\n")
    with serving("--data-dir", tmp_path / "data", "--config", config, "--devices", 4) as (_, url):
        assert httpx.get(f"{url}/api/v1/queue").json()["devices"] == 4
    config.write_text("device: 3\n")
    done = corral("--config", config)
    assert done.returncode == 78
    assert "device: " in done.stderr


def test_the_data_folder_of_the_environment(tmp_path):
    with serving(env=os.environ | {"CORRAL_SERVICE_DIR": str(tmp_path / "there")}):
        assert (tmp_path / "there").is_dir()


def test_a_new_token_works_at_once(tmp_path):
    path = tmp_path / "tokens.json"
    made = corral("--new-token", "ci", "--scopes", "read", "--token-file", path)
    clear = made.stdout.strip()
    assert made.returncode == 0
    with serving("--data-dir", tmp_path / "data", "--token-file", path) as (process, url):
        assert httpx.get(f"{url}/version").status_code == 401
        assert httpx.get(f"{url}/version", headers={"Authorization": f"Bearer {clear}"}).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert clear not in process.stderr.read()


def test_a_new_token_without_a_file_prints_its_entry():
    made = corral("--new-token", "ci", "--scopes", "read,cancel", "--repositories", "org/*", "--days", "1")
    clear, entry = made.stdout.splitlines()
    assert clear.startswith("corral_")
    assert json.loads(entry)["scopes"] == ["cancel", "read"]
    assert json.loads(entry)["repositories"] == ["org/*"]
    assert corral("--new-token", "a b").returncode == 78


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::1", "http://[::1]:80"),
        ("::", "http://[::1]:80"),
    ],
)
def test_agents_get_an_address_they_can_use(tmp_path, host, url):
    assert reachable(Settings(tmp_path, host=host, port=80)).url == url
    assert reachable(Settings(tmp_path, host=host, public_url="http://proxy/x/")).url == "http://proxy/x"


def test_ipv6_loopback(tmp_path):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with serving("--data-dir", tmp_path / "data", "--host", "::1") as (_, url):
        until(lambda: httpx.get(f"{url}/healthz").status_code == 200, "it answers")
