"""`corral serve` as a process: how it starts, what it refuses, how it ends."""

from __future__ import annotations

import argparse
import json
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from corral.cli import build_parser
from corral.errors import ConfigError
from corral.job.service.options import settings_of
from corral.job.service.serve import reachable, serve
from corral.job.service.server import listen
from corral.job.service.settings import Settings
from tests.job.service.running import bundle, until


@contextmanager
def serving(*options: object):
    """(process, url) of a service that has said where it is."""
    command = [sys.executable, "-m", "corral", "serve", "--port", "0", *map(str, options)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith("corral serve: http://"), line + process.stderr.read()
        yield process, line.split()[-1]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=20)


def corral(*options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "corral", "serve", *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


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


def parsed(*options: object) -> argparse.Namespace:
    return build_parser().parse_args(["serve", *map(str, options)])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host", "0.0.0.0"], "without a token file"),
        (["--host", "192.0.2.1"], "without a token file"),
        (["--host", "localhost.example.com"], "without a token file"),
        (["--token-file", "/nonexistent"], "cannot read the token file"),
        (["--config", "/nonexistent"], "cannot read /nonexistent"),
        (["--source-root", "/a/../b=/x"], "has to be an absolute path"),
        (["--secrets-dir", "/nonexistent"], "secrets folder /nonexistent does not exist"),
        (["--devices", "0"], "devices: "),
        (["--port", "99999"], "port: "),
        (["--database", "nonsense"], "nonsense|URL"),
        (["--backend", "ray"], "which Ray cluster is not said"),
        (["--backend", "ray", "--address", "head:8265"], "'head:8265' is not the URL"),
        (["--address", "http://head:8265"], "add --backend ray"),
        (["--backend", "kuberay", "--address", "http://head:8265"], "is of a Ray cluster"),
        (["--backend", "ray", "--address", "http://head:8265", "--kubeconfig", "x"], "is of Kubernetes"),
        (["--namespace", "jobs"], "add --backend kuberay"),
    ],
)
def test_settings_that_cannot_be_served(tmp_path, options, said):
    with pytest.raises(ConfigError, match=said) as refused:
        serve(settings_of(parsed("--port", 0, "--data-dir", tmp_path / "data", *options)))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--source-root", "verl=/x"], "is not /PREFIX=FOLDER"), (["--scopes", "root"], "give some of")],
)
def test_options_that_make_no_sense(options, said):
    with pytest.raises(ConfigError, match=said):
        parsed(*options)


def test_beyond_loopback_without_tokens_is_one_line_and_78(tmp_path):
    done = corral("--host", "0.0.0.0", "--data-dir", tmp_path / "data")
    assert done.returncode == 78
    assert re.fullmatch(r"error: without a token file[^\n]+\n", done.stderr)
    assert not (tmp_path / "data").exists()


def test_jobs_go_on_without_the_service_and_a_watch_is_cut_until_it_is_back(tmp_path):
    (tmp_path / "job.sh").write_text(f"echo begun; until [ -e {tmp_path}/go ]; do sleep 0.1; done; echo done; exit 3")
    options = ("--data-dir", tmp_path / "data", "--source-root", f"/src={tmp_path}")
    with serving(*options) as (process, url):
        job_id = httpx.post(f"{url}/api/v1/rayjobs", json={"script": "/src/job.sh"}).json()["job_id"]
        path = f"/api/v1/rayjobs/{job_id}"
        with httpx.stream("GET", f"{url}{path}/watch", timeout=20) as answer:
            lines = answer.iter_lines()
            until(lambda: "begun" in next(lines), "the job prints")
            process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        assert process.wait(20) == 0
    (tmp_path / "go").touch()
    with serving(*options) as (process, url):
        events = [json.loads(line) for line in httpx.get(f"{url}{path}/watch", timeout=30).text.splitlines() if line]
        assert [event["line"] for event in events if event["type"] == "log"] == ["begun", "done"]
        assert (events[-1]["status"], events[-1]["class"], events[-1]["exit_code"]) == ("FAILED", "user", 3)
        metrics = httpx.get(f"{url}/metrics").text
        assert 'corral_jobs_ended_total{state="FAILED"} 1.0' in metrics


def test_config_file_and_options_that_win_over_it(tmp_path, monkeypatch):
    config = tmp_path / "service.yaml"
    config.write_text(
        "devices: 3\nmax_nodes: 1\nprofile: {devices_per_node: 2, bootstraps: [a.sh]}\nlimits: {queued: 5}\n"
        "source_roots: {/verl: /srv/verl}\n"
    )
    options = ("--config", config, "--devices", 4, "--source-root", "/x=y", "--default-kind", "npu", "--quota", 2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CORRAL_SERVICE_DIR", "there")
    found = settings_of(parsed(*options))
    assert (found.devices, found.max_nodes, found.profile.devices_per_node, found.profile.kind) == (4, 1, 2, "npu")
    assert found.profile.bootstraps == ("a.sh",)
    assert (found.limits.queued, found.limits.active_devices_per_repository) == (5, 2)
    assert found.source_roots == {"/verl": Path("/srv/verl"), "/x": tmp_path / "y"}
    assert found.data_dir == tmp_path / "there"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("device: 3", "service.yaml: device is no setting; did you mean devices"),
        ("ray: {adress: x}", "ray.adress is no setting; did you mean address"),
        ("ray: {where: x}", "ray.where is no setting; there are address, token_file"),
        ("max_nodes: 0", "service.yaml: max_nodes: "),
        ("[]", "mapping"),
        ("a: [", "not YAML"),
        ("profile: 3", "mapping"),
        ("1: 2", "mapping"),
    ],
)
def test_a_config_file_that_does_not_fit(tmp_path, content, said):
    config = tmp_path / "service.yaml"
    config.write_text(content)
    with pytest.raises(ConfigError, match=said):
        settings_of(parsed("--config", config))


def test_a_new_token_works_at_once_and_ctrl_c_ends_with_0_and_a_clean_log(tmp_path, capsys):
    path = tmp_path / "tokens.json"
    args = parsed("--new-token", "ci", "--scopes", "read,submit", "--token-file", path)
    assert args.run(args) == 0
    clear = capsys.readouterr().out.strip()
    headers = {"Authorization": f"Bearer {clear}"}
    with serving("--data-dir", tmp_path / "data", "--token-file", path) as (process, url):
        assert httpx.get(f"{url}/version").status_code == 401
        assert httpx.get(f"{url}/version", headers=headers).status_code == 200
        body = {"script": "/x.sh", "env": {"A": "hunter2"}}
        assert httpx.post(f"{url}/api/v1/rayjobs?hunter3", json=body, headers=headers).status_code == 422
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        log = process.stderr.read()
    requests = [entry for entry in map(json.loads, log.splitlines()) if entry["message"] == "request"]
    assert [(entry.get("caller"), entry["status"]) for entry in requests] == [(None, 401), ("ci", 200), ("ci", 422)]
    assert clear not in log
    assert "hunter" not in log


def test_a_new_token_without_a_file_prints_its_entry(capsys):
    args = parsed("--new-token", "ci", "--scopes", "read,cancel", "--repositories", "org/*", "--days", 1)
    assert args.run(args) == 0
    clear, entry = capsys.readouterr().out.splitlines()
    assert clear.startswith("corral_")
    assert clear not in entry
    assert json.loads(entry)["scopes"] == ["cancel", "read"]
    assert json.loads(entry)["repositories"] == ["org/*"]


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


def test_ipv6_loopback():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with listen("::1", 0) as listener:
        assert listener.getsockname()[0] == "::1"


def test_a_private_service_ends_with_its_caller_and_takes_its_jobs_along(tmp_path):
    command = [sys.executable, "-m", "corral", "serve", "--private", "--port", "0", "--data-dir", tmp_path / "data"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    url = process.stdout.readline().split()[-1]
    digest, content = bundle(("run.sh",))
    httpx.put(f"{url}/api/v1/bundles/{digest}", content=content).raise_for_status()
    words = ["sh", "-c", "echo $$ > $CORRAL_RUN_DIR/pid; exec sleep 600"]
    httpx.post(f"{url}/api/v1/rayjobs", json={"command": words, "bundle": digest}).raise_for_status()
    until(lambda: any(path.read_text() for path in tmp_path.glob("data/jobs/*/attempt-1/run/pid")), "the job runs")
    (pid,) = (int(path.read_text()) for path in tmp_path.glob("data/jobs/*/attempt-1/run/pid"))
    process.stdin.close()
    assert process.wait(60) == 0
    assert not psutil.pid_exists(pid)
    (end,) = tmp_path.glob("data/jobs/*/attempt-1/end.json")
    assert json.loads(end.read_text())["exit_code"] == 143
