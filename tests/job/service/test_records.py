"""GET .../records: exactly the regular files of an attempt, whatever a job puts beside them."""

from __future__ import annotations

import base64
import io
import os
import shutil
import tarfile
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from corral.job.agent.records import pack
from corral.job.core.redact import Redactor
from corral.job.service.settings import Limits
from tests.job.service.running import Running, running


def attempt(service: Running, job_id: str, number: int = 1) -> Path:
    folder = service.service.settings.data_dir / "jobs" / job_id / f"attempt-{number}"
    (folder / "run/logs/node-0").mkdir(parents=True)
    (folder / "run/plan.json").write_text("{}")
    (folder / "run/logs/node-0/rank-0.log").write_text("works\n")
    (folder / "driver.log").write_bytes(b"raw \xff\n")
    (folder / "end.json").write_text("{}")
    (folder / "spec.json").write_text('{"token": "secret"}')
    return folder


def unpacked(data: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}


def fetched(service: Running, job_id: str, **query: int) -> dict[str, bytes]:
    answer = service.http.get(f"/api/v1/rayjobs/{job_id}/records", params=query)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/gzip"
    return unpacked(answer.content)


def test_the_run_folder_and_the_files_about_the_attempt(service):
    job = service.submit()
    folder = attempt(service, job)
    (folder / "preflight.json").write_text("[]")
    (folder / "run/driver.log").write_text("not the driver's")
    assert fetched(service, job) == {
        "driver.log": b"raw \xff\n",
        "end.json": b"{}",
        "preflight.json": b"[]",
        "plan.json": b"{}",
        "logs/node-0/rank-0.log": b"works\n",
    }
    attempt(service, job, 2)
    assert "preflight.json" not in fetched(service, job, attempt=2)


def test_what_is_dense_already_goes_as_it_is(service):
    job = service.submit()
    run = attempt(service, job) / "run"
    weights = os.urandom(1 << 20)
    for name in ("a.safetensors", "m/b.safetensors", "z.json"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(weights if "safe" in name else b"{}")
    found = fetched(service, job)
    assert found["a.safetensors"] == found["m/b.safetensors"] == weights
    assert found["z.json"] == b"{}"


def test_links_pipes_and_odd_names_stay_out_and_hold_nothing_up(service, tmp_path):
    job = service.submit()
    run = attempt(service, job) / "run"
    (tmp_path / "outside").write_text("not yours")
    (run / "link").symlink_to(tmp_path / "outside")
    (run / "folder").symlink_to(tmp_path)
    os.mkfifo(run / "pipe")
    (run / "two\nlines").write_text("x")
    (run / "empty").mkdir()
    (run / "end.json").symlink_to(tmp_path / "outside")
    assert sorted(fetched(service, job)) == ["driver.log", "end.json", "logs/node-0/rank-0.log", "plan.json"]


def test_a_link_in_the_place_of_the_run_folder_is_not_followed(service, tmp_path):
    job = service.submit()
    folder = attempt(service, job)
    (tmp_path / "private").write_text("not yours")
    shutil.rmtree(folder / "run")
    (folder / "run").symlink_to(tmp_path)
    assert sorted(fetched(service, job)) == ["driver.log", "end.json"]


def test_a_link_in_the_place_of_the_attempt_is_not_followed(service, tmp_path):
    job = service.submit()
    folder = attempt(service, job)
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    assert service.http.get(f"/api/v1/rayjobs/{job}/records").status_code == 404


def test_what_is_not_there_is_said_in_one_line(service):
    job = service.submit()
    answer = service.http.get(f"/api/v1/rayjobs/{job}/records", params={"attempt": 3})
    assert answer.status_code == 404
    assert answer.json() == {"error": f"there are no records of attempt 3 of {job}; it is at attempt 1"}
    assert service.http.get("/api/v1/rayjobs/rj-000000000000/records").status_code == 404


def test_too_much_is_said_in_one_line(tmp_path):
    with running(tmp_path / "data", limits=Limits(records=1000)) as service:
        job = service.submit()
        folder = attempt(service, job)
        assert "plan.json" in fetched(service, job)
        (folder / "run/big").write_bytes(bytes(2 << 20))
        answer = service.http.get(f"/api/v1/rayjobs/{job}/records")
        assert answer.status_code == 413
        assert "5 files with 2 MiB, the limit is" in answer.json()["error"]


def test_secrets_of_the_job_are_overwritten(tmp_path):
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "KEY").write_text("hunter2-and-more\n")
    with running(tmp_path / "data", secrets_dir=secrets) as service:
        job = service.submit(secrets=["KEY"])
        folder = attempt(service, job)
        (folder / "spec.json").unlink()
        (folder / "driver.log").write_text("key is hunter2-and-more.\n")
        (folder / "run/dump").write_bytes(bytes(300_000) + base64.b64encode(b"xhunter2-and-more"))
        found = fetched(service, job)
        assert found["driver.log"] == b"key is ****************.\n"
        assert len(found["dump"]) == 300_024
        assert b"odW50ZXIyLWFuZC1tb3" not in found["dump"]


@settings(max_examples=25)
@given(before=st.integers(0, 40), secret=st.text("abc*", min_size=4, max_size=12), times=st.integers(1, 3))
def test_a_secret_is_found_across_the_pieces_a_file_is_read_in(before, secret, times):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        content = bytes((1 << 18) - before) + secret.encode() * times + bytes(10)
        (folder / "driver.log").write_bytes(content)
        found = unpacked(b"".join(pack(folder, Redactor([secret]))))["driver.log"]
    assert len(found) == len(content)
    assert secret == "*" * len(secret) or secret.encode() not in found


def test_a_file_that_changes_while_it_is_packed_spoils_nothing(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "driver.log").write_bytes(os.urandom(3 << 20))
    (tmp_path / "end.json").write_text("{}")
    pieces = pack(tmp_path, None)
    first = next(pieces)
    os.truncate(tmp_path / "driver.log", 1 << 20)
    found = unpacked(first + b"".join(pieces))
    assert len(found["driver.log"]) == 3 << 20
    assert found["driver.log"].endswith(bytes(1 << 20))
    assert found["end.json"] == b"{}"
