"""Joining from nodes that do not see the service's disk: what is fetched, what is kept from the job, what is left."""

from __future__ import annotations

import base64
import io
import json
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from corral import __version__
from corral.job.protocol.agent import BOARDING, PROTOCOL, Heartbeat
from corral.job.protocol.preflight import Preflight
from tests.job.agent.joining import NAME, Joining, boarding, told_to_end, with_source
from tests.job.agent.service import RecordingService
from tests.job.agent.test_agent import until
from tests.job.agent.test_source import tar

SECRET = "hunter2-hunter2"
Join = Callable[..., Joining]


@pytest.fixture
def join(tmp_path: Path, service: RecordingService) -> Iterator[Join]:
    started: list[Joining] = []

    def agent(*command: str, env: dict[str, str] | None = None, **given: Any) -> Joining:
        about = boarding(service, tmp_path / "root", list(command), **given)
        started.append(Joining(about, tmp_path / "output", env))
        return started[-1]

    yield agent
    for one in started:
        one.end()


def names(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as found:
        return {member.name: found.extractfile(member).read() for member in found}


def test_secrets_and_source_come_from_the_service_and_records_go_there(join: Join, service: RecordingService) -> None:
    archive = tar(
        ("run.sh", b"cat data; echo $PASSWORD $OTHER; echo $PASSWORD > $CORRAL_RUN_DIR/x; ls -la ..\n", {}),
        ("data", b"of the source\n", {}),
    )
    service.secrets = {"PASSWORD": SECRET}
    agent = join("bash", "run.sh", env={"OTHER": "four-or-more"}, secret_env=["OTHER"], **with_source(service, archive))
    assert agent.wait() == 0
    assert service.joins == [{"attempt": 1, "protocol": PROTOCOL, "version": __version__}]
    lines = service.lines("driver")
    assert lines[:2] == ["of the source", "*** ***"]
    modes = {line.split()[-1]: line.split()[0] for line in lines[2:]}
    assert (modes["."], modes["spec.json"]) == ("drwx------", "-rw-------")
    assert [end["exit_code"] for end in service.ends] == [0]
    assert not agent.folder.exists()
    left = names(service.records)
    assert set(left) == {"driver.log", "end.json", "x"}
    assert left["x"] == b"*" * len(SECRET) + b"\n"
    assert SECRET not in agent.said()
    assert agent.readable()[:2] == ["of the source", "*** ***"]
    assert [end.exit_code for end in agent.ends()] == [0]
    assert agent.pieces() == []
    assert service.phases() == ["preflight", "running", "collecting"]


def test_what_is_for_the_agent_is_kept_from_the_job(join: Join, service: RecordingService) -> None:
    told = {
        "runtime_env": {"env_vars": {"CORRAL_AGENT_TOKEN": "x", "CORRAL_AGENT_BOARDING": "y", "MINE": "z"}},
        "metadata": {"a": "b"},
    }
    agent = join("bash", "-c", "env", env={"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(told)})
    assert agent.wait() == 0
    seen = dict(line.partition("=")[::2] for line in service.lines("driver"))
    assert json.loads(seen["RAY_JOB_CONFIG_JSON_ENV_VAR"]) == {
        "runtime_env": {"env_vars": {"MINE": "z"}},
        "metadata": {"a": "b"},
    }
    assert not [name for name in seen if name.startswith("CORRAL_AGENT_")]
    assert service.token not in agent.said()


def test_of_a_command_that_never_ran_nobody_hears_that_it_runs_or_is_over(
    join: Join, service: RecordingService
) -> None:
    """The end record takes its time to arrive."""
    tries = iter(range(3))
    service.fault = lambda what: "503" if what == "end" and next(tries) < 2 else None
    asked = Preflight(paths=["absent"])
    agent = join("echo", "never", nodes=1, devices_per_node=1, kind="cpu", preflight=asked)
    assert agent.wait(60) == 78
    assert [end["failure"][:7] for end in service.ends] == ["paths: "]
    assert service.phases() == ["preflight"]
    assert {beat.phase for beat in agent.frames() if isinstance(beat, Heartbeat)} <= {"preflight"}


@pytest.mark.parametrize(
    ("given", "status", "code", "kind", "said"),
    [
        ({"join": True}, 500, 75, "infra", "cannot reach the service at http://127.0.0.1:"),
        ({"join": True}, 409, 78, "config", "the service does not let this agent join: not now"),
        ({"join": True}, 410, 75, "infra", "the service does not let this agent join: not now"),
        ({"secret_env": ["NOT_THERE"]}, 200, 78, "config", "secret NOT_THERE is not in the environment of the nodes"),
        ({"join": True, "bundle": "a" * 64}, 200, 75, "infra", "did not arrive whole: its digest is"),
    ],
)
def test_an_agent_that_cannot_join_says_why(
    given: dict[str, Any], status: int, code: int, kind: str, said: str, join: Join, service: RecordingService
) -> None:
    service.join_status, service.source = status, b"another source"
    agent = join("echo", "never", patience=0.3, **given)
    assert agent.wait() == code
    (record,) = agent.ends()
    assert (record.exit_code, record.kind) == (None, kind)
    assert said in (record.failure or "")
    assert agent.readable() == [f"corral: {record.failure}"]
    assert [end["failure"] for end in service.ends] == [record.failure]
    assert not agent.folder.exists()


def test_a_service_that_is_not_there_is_named(join: Join, service: RecordingService) -> None:
    service.stop()
    agent = join("echo", "never", patience=0.3, join=True)
    until(lambda: agent.ends())
    assert agent.ends()[0].failure == (
        f"cannot reach the service at {service.url} from the cluster within 0.3 s, and the job needs secrets from it; "
        "set public_url to an address that the nodes reach (last: "
        "ConnectionRefusedError: [Errno 111] Connection refused)"
    )


def test_a_service_that_comes_in_time(join: Join, service: RecordingService) -> None:
    service.stop()
    agent = join("echo", "here", patience=30, join=True)
    until(agent.folder.exists)
    service.start()
    assert agent.wait() == 0
    assert service.lines("driver") == ["here"]


@pytest.mark.parametrize("fields", [{"protocol": 2, "version": "9.9.9"}, {"version": "9.9.9", "new": "thing"}])
def test_versions_that_do_not_fit(fields: dict[str, Any], join: Join, service: RecordingService, tmp_path: Path):
    about = boarding(service, tmp_path / "root", ["echo", "never"]).model_dump(mode="json") | fields
    agent = join("true", env={BOARDING: base64.b64encode(zlib.compress(json.dumps(about).encode())).decode()})
    assert agent.wait() == 78
    (record,) = agent.ends()
    assert (record.kind, record.job_id) == ("config", "rj-0123456789ab")
    said = f"the image has corral {__version__} (agent protocol {PROTOCOL}), the service 9.9.9"
    assert (record.failure or "").startswith(said)
    assert len(service.ends) == 1


@pytest.mark.parametrize("text", ["", "AAAA", base64.b64encode(zlib.compress(b"[1]")).decode()])
def test_what_no_service_wrote_is_one_line(text: str, join: Join) -> None:
    agent = join("true", env={BOARDING: text})
    assert agent.wait() == 75
    assert agent.said().startswith("error: CORRAL_AGENT_BOARDING ")
    assert len(agent.said().splitlines()) == 1


def test_a_folder_of_somebody_else_is_not_used(join: Join, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root" / NAME).symlink_to(tmp_path / "elsewhere")
    agent = join("echo", "never")
    assert agent.wait() == 75
    assert "is not a folder of this user alone" in agent.said()
    assert [(end.kind, end.exit_code) for end in agent.ends()] == [("infra", None)]
    assert "is not a folder of this user alone" in (agent.ends()[0].failure or "")
    assert os.listdir(tmp_path / "elsewhere") == []


def test_a_second_start_runs_nothing_again(join: Join, service: RecordingService, tmp_path: Path) -> None:
    """And the command does not outlive its agent: nobody here would end it."""
    agent = join("bash", "-c", f"echo up; echo x >> {tmp_path}/starts; sleep 60 & echo $! $$ > ../pids; wait")
    service.wait_for(lambda: service.lines("driver") == ["up"])
    until((tmp_path / "root/pids").exists)
    until(lambda: len((tmp_path / "root/pids").read_text().split()) == 2)
    agent.end()
    until(lambda: not any(psutil.pid_exists(int(pid)) for pid in (tmp_path / "root/pids").read_text().split()))
    agent.start()
    assert agent.wait() == 75
    assert (tmp_path / "starts").read_text() == "x\n"
    assert [end["failure"] for end in service.ends] == ["the agent of this attempt was lost while its command ran"]
    assert not agent.folder.exists()


def test_source_and_secrets_do_not_outlive_the_command(join: Join, service: RecordingService) -> None:
    """A service that knows the job no more gets nothing, but secrets and source go; a second start says the end."""
    service.secrets = {"PASSWORD": SECRET}
    agent = join(
        "bash",
        "-c",
        "echo up; until test -e ../go; do sleep 0.02; done; echo $PASSWORD; exit 3",
        **with_source(service, tar(("a", b"", {}))),
    )
    service.wait_for(lambda: service.lines("driver") == ["up"])
    service.token = "another"
    (agent.folder / "go").touch()
    assert agent.wait() == 3
    assert not (agent.folder / "source").exists()
    assert not (agent.folder / "spec.json").exists()
    assert not (agent.folder / "bundle.tar.gz").exists()
    assert agent.framed({"driver": 3}) == {"driver": b"*" * len(SECRET) + b"\n"}
    before = len(agent.frames())
    service.token, service.watermarks = "token-of-the-agent", {}
    agent.start()
    assert agent.wait() == 3
    assert [type(found).__name__ for found in agent.frames()[before:]] == ["EndRecord"]
    assert [end["exit_code"] for end in service.ends] == [3]
    assert SECRET not in agent.said()


def test_a_stopped_job_leaves_its_records_too(join: Join, service: RecordingService) -> None:
    """As far as the cluster gives it time for that."""
    script = "echo left > $CORRAL_RUN_DIR/metrics.jsonl; trap 'exit 9' TERM; echo up; while :; do sleep 0.05; done"
    agent = join("bash", "-c", script, env={"RAY_JOB_STOP_WAIT_TIME_S": "20"})
    service.wait_for(lambda: service.lines("driver") == ["up"])
    told_to_end(agent)
    assert agent.wait() == 9
    assert names(service.records)["metrics.jsonl"] == b"left\n"
    assert not agent.folder.exists()
