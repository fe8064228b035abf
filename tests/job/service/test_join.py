"""Agents on nodes that do not see the service's disk: what they are given, to whom, and until when; their records."""

from __future__ import annotations

import io
import json
import logging
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from corral import __version__
from corral.job.agent.attempt import Attempt
from corral.job.agent.link import Link
from corral.job.agent.records import pack
from corral.job.backends import folder as files
from corral.job.core.redact import Redactor
from corral.job.protocol.agent import TOKEN, AgentSpec, Boarding
from corral.job.protocol.states import JobState, Status
from corral.job.service.auth import agent_token
from corral.job.service.settings import Limits
from tests.job.agent.joining import Joining
from tests.job.service.running import Running, bundle, running

SECRET = "hunter2-hunter2"


@pytest.fixture
def service(service: Running) -> Running:
    service.runner.backend.remote = True
    return service


def folder_of(service: Running, job_id: str, attempt: int = 1) -> Path:
    return files.attempt_folder(service.service.settings.data_dir, job_id, attempt)


def provision(service: Running, job_id: str) -> None:
    service.move(job_id, JobState.PROVISIONING)
    spec = AgentSpec(
        job_id=job_id,
        attempt=1,
        submission_id=f"{job_id}-a1",
        service_url=service.url,
        token="",
        command=["true"],
        cwd=".",
        nodes=1,
        devices_per_node=1,
        secrets={"PASSWORD": SECRET},
    )
    files.write_spec(folder_of(service, job_id), spec)


def join(service: Running, job_id: str, **fields: Any) -> httpx.Response:
    return service.agent("POST", job_id, "join", {"attempt": 1, "protocol": 1, "version": "0.1.0", **fields})


def put(service: Running, job_id: str, archive: bytes, attempt: int = 1) -> httpx.Response:
    return service.agent("PUT", job_id, "records", params={"attempt": attempt}, content=archive)


def tar(*members: tuple[str, bytes] | tarfile.TarInfo) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                archive.addfile(info, io.BytesIO(member[1]))
    return raw.getvalue()


def left(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Joining --------------------------------------------------------------------------------------------------------------


def test_secrets_are_given_until_the_agent_is_heard(service: Running, caplog: pytest.LogCaptureFixture) -> None:
    job_id = service.submit()
    with caplog.at_level(logging.INFO, "corral.service.join"):
        assert join(service, job_id).status_code == 410  # nothing is started yet
        provision(service, job_id)
        for _ in range(2):  # an answer may be lost
            answer = join(service, job_id)
            assert (answer.status_code, answer.json()) == (200, {"secrets": {"PASSWORD": SECRET}})
        service.move(job_id, JobState.PREFLIGHT)
        answer = join(service, job_id)
    assert answer.status_code == 410
    assert "was heard before" in answer.json()["error"]
    told = [record for record in caplog.records if record.name == "corral.service.join"]
    assert [record.__dict__["secrets"] for record in told] == [["PASSWORD"]] * 2
    assert SECRET not in repr([record.__dict__ for record in told])


def test_who_may_not_join(service: Running) -> None:
    job_id, other = service.submit(), service.submit(name_suffix="other")
    provision(service, job_id)
    assert join(service, job_id, attempt=2).status_code == 410
    answer = join(service, job_id, protocol=2, version="9.9")
    assert answer.status_code == 409
    assert answer.json()["error"].startswith(
        f"the image has corral 9.9 (agent protocol 2), the service {__version__} (1); use an image"
    )
    path = f"/api/v1/agent/{job_id}"
    token = {"Authorization": f"Bearer {'0' * 64}"}
    for request in (
        lambda: service.http.post(f"{path}/join", json={"attempt": 1}, headers=token),
        lambda: service.http.get(f"{path}/bundle", params={"attempt": 1}, headers=token),
        lambda: service.http.put(f"{path}/records", params={"attempt": 1}, content=tar(), headers=token),
        lambda: service.http.post(f"{path}/join", json={"attempt": 1}),
    ):
        assert request().status_code == 401
    provision(service, other)
    service.move(other, JobState.PREFLIGHT, JobState.RUNNING)
    service.end(other, Status.SUCCEEDED)
    for answer in (
        join(service, other),
        service.agent("GET", other, "bundle", params={"attempt": 1}),
        put(service, other, tar()),
    ):
        assert answer.status_code == 410


def test_the_source_is_the_one_of_the_job(service: Running) -> None:
    job_id = service.submit()
    provision(service, job_id)
    answer = service.agent("GET", job_id, "bundle", params={"attempt": 1})
    assert answer.status_code == 200
    assert answer.content == bundle(("run.sh", "examples/train.sh"))[1]
    assert service.agent("GET", job_id, "bundle", params={"attempt": 2}).status_code == 410
    service.service.bundles.path(str(service.store.get(job_id).request.bundle)).unlink()
    assert service.agent("GET", job_id, "bundle", params={"attempt": 1}).status_code == 404


def test_an_agent_joins_a_real_service(service: Running, tmp_path: Path) -> None:
    """From the secrets to the records, over HTTP, with nothing of the service's disk in sight."""
    digest, _ = bundle(("run.sh",))
    job_id = service.submit(bundle=service.bundle(("run.sh",)))
    provision(service, job_id)
    spec = files.read_spec(folder_of(service, job_id))
    assert spec is not None
    go = tmp_path / "go"
    waits = f"while [ ! -e {go} ]; do sleep 0.05; done"  # a command that is over at once may never be said to run
    command = ["bash", "-c", f"bash run.sh; echo $PASSWORD; echo left > $CORRAL_RUN_DIR/left.txt; {waits}; exit 4"]
    asked = {"command": command, "cwd": "source", "bundle": digest, "secrets": {}}
    about = Boarding(spec=spec.model_copy(update=asked), root=str(tmp_path / "root"), join=True)
    token = agent_token(service.service.agent_key, job_id)
    agent = Joining(about, tmp_path / "output", {TOKEN: token})
    try:
        end = time.monotonic() + 30
        while "running" not in {heard.phase for heard in service.runner.heard}:
            assert time.monotonic() < end, agent.said()
            time.sleep(0.02)
        go.touch()
        assert agent.wait() == 4
    finally:
        agent.end()
    assert [record.exit_code for record in service.runner.ended] == [4]
    assert {heard.phase for heard in service.runner.heard} == {"preflight", "running", "collecting"}
    lines = service.http.get(f"/api/v1/rayjobs/{job_id}/logs").text
    assert "run.sh" in lines
    assert "***" in lines
    assert SECRET not in lines + agent.said()
    kept = left(folder_of(service, job_id))
    assert kept["run/left.txt"] == b"left\n"
    assert kept["driver.log"] == b"run.sh\n" + b"*" * len(SECRET) + b"\n"
    assert not agent.folder.exists()
    assert token not in agent.said()


# Records --------------------------------------------------------------------------------------------------------------


def test_records_make_the_round(service: Running, tmp_path: Path) -> None:
    """What the agent packs is what a client gets, whatever the service had of it before."""
    job_id = service.submit()
    service.run(job_id)
    there = tmp_path / "agent"
    (there / "run/logs/node-1").mkdir(parents=True)
    (there / "run/metrics.jsonl").write_text(f"{{}}\n{SECRET}\n")
    (there / "run/logs/node-1/rank-4.log").write_text("all of it\n")
    (there / "driver.log").write_text("raw output\n")
    (there / "end.json").write_text("{}")
    (there / "preflight.json").write_text("[]")
    (there / "run/link").symlink_to("/etc/passwd")
    here = folder_of(service, job_id)
    files.make(here)
    (here / "end.json").write_text('{"of": "the service"}')
    (here / "run/logs/node-1").mkdir(parents=True)
    (here / "run/logs/node-1/rank-4.log").write_bytes(b"\0\0\0 of it\n")  # as fetched, without its beginning
    (here / "driver.log").write_bytes(b"\0\0\0 output\n")
    archive = b"".join(pack(there, Redactor([SECRET])))
    for _ in range(2):  # an agent that saw no answer sends it again
        answer = put(service, job_id, archive)
        assert answer.status_code == 204, answer.text
        assert left(here) == {
            "run/metrics.jsonl": b"{}\n" + b"*" * len(SECRET) + b"\n",
            "run/logs/node-1/rank-4.log": b"all of it\n",
            "driver.log": b"raw output\n",
            "end.json": b'{"of": "the service"}',
            "preflight.json": b"[]",
        }
    answer = service.http.get(f"/api/v1/rayjobs/{job_id}/records")
    with tarfile.open(fileobj=io.BytesIO(answer.content), mode="r:gz") as got:
        assert {"driver.log", "metrics.jsonl", "logs/node-1/rank-4.log"} <= set(got.getnames())
    (here / "driver.log").write_text("raw output, and what came after\n")
    assert put(service, job_id, archive).status_code == 204
    assert (here / "driver.log").read_text() == "raw output, and what came after\n"


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def device(name: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = tarfile.FIFOTYPE
    return info


def test_an_archive_that_is_not_what_it_has_to_be_changes_nothing(tmp_path: Path) -> None:
    refused = [
        (tar(("good", b"x"), ("../outside", b"x")), "../outside"),
        (tar(("/etc/outside", b"x")), "/etc/outside"),
        (tar(link("a", "b"), ("b", b"")), "neither a file nor a folder"),
        (tar(link("out", "../../..")), "leaves it"),
        (tar(("a", b""), link("b", "a", tarfile.LNKTYPE)), "neither a file nor a folder"),
        (tar(device("pipe")), "neither a file, a folder nor a link"),
        (tar(("a", b"1"), ("a", b"2")), "twice"),
        (tar(("a", b"1"), ("a/b", b"2")), "below a link or a file"),
        (tar(("good", b"x"))[:-12], "no gzip-compressed tar archive"),
        (b"not an archive", "no gzip-compressed tar archive"),
        (tar(("zeros", bytes(3 << 20))), "unpacks to more than 2 MiB"),
    ]
    with running(tmp_path / "data", limits=Limits(records=2 << 20)) as service:
        service.runner.backend.remote = True
        job_id = service.submit()
        service.run(job_id)
        for archive, said in refused:
            answer = put(service, job_id, archive)
            assert (said in answer.json()["error"], answer.status_code) == (True, 422), (said, answer.text)
            assert list(folder_of(service, job_id).iterdir()) == [], said
        assert not (tmp_path / "outside").exists()


def test_too_many_bytes_and_a_backend_that_writes_itself(tmp_path: Path) -> None:
    with running(tmp_path / "data", limits=Limits(records=1000)) as service:
        job_id = service.submit()
        service.run(job_id)
        assert put(service, job_id, tar(("a", b"x"))).status_code == 409
        service.runner.backend.remote = True
        assert put(service, job_id, bytes(2000)).status_code == 413
        assert put(service, job_id, tar(("a", b"x")), attempt=2).status_code == 410
        assert list(folder_of(service, job_id).iterdir()) == []


def test_an_agent_is_told_that_its_records_are_too_large(tmp_path: Path) -> None:
    """Also when the service hangs up long before all of them were sent."""
    folder = tmp_path / "attempt"
    (folder / "run").mkdir(parents=True)
    (folder / "run/large.gz").write_bytes(bytes(40 << 20))
    with running(tmp_path / "data", limits=Limits(records=1000)) as service:
        job_id = service.submit()
        provision(service, job_id)
        spec = files.read_spec(folder_of(service, job_id))
        assert spec is not None
        spec = spec.model_copy(update={"token": agent_token(service.service.agent_key, job_id)})
        service.runner.backend.remote = True
        link = Link(Attempt(folder, spec))
        assert [link.upload("records?attempt=1", pack(folder, None)) for _ in range(3)] == [413] * 3


def test_whoever_reads_meanwhile_sees_whole_files(service: Running) -> None:
    job_id = service.submit()
    service.run(job_id)
    content = {f"metrics-{number}": json.dumps(list(range(9000))).encode() for number in range(5)}
    seen: list[bytes] = []
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            seen.extend(left(folder_of(service, job_id) / "run").values())
            over.wait(0.001)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(5):
        assert put(service, job_id, tar(*content.items())).status_code == 204
    over.set()
    reader.join()
    assert left(folder_of(service, job_id) / "run") == content
    assert set(seen) <= set(content.values())
