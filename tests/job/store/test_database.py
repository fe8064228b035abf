"""What a database or a data folder may be, and how it is said when it is not."""

from __future__ import annotations

import os
import secrets
import sqlite3
import stat
import subprocess
import sys
import traceback

import pytest
from sqlalchemy import text

from corral.errors import ConfigError, InfraError
from corral.job.core.clock import Clock
from corral.job.store import database
from corral.job.store.store import Store
from corral.job.store.tables import MIGRATIONS
from tests.job.store import postgres
from tests.job.store.jobs import JOB, batch, chunk, is_gap_free, lines_of, new_job, read_all


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    line = str(error.value)
    assert "\n" not in line
    assert postgres.PASSWORD not in line
    assert postgres.PASSWORD.replace("%", "%25") not in line
    return line


HOLDER = """
import sys
import traceback
from pathlib import Path
from corral.job.core.clock import Clock
from corral.job.store.store import Store
store = Store(None, Path(sys.argv[1]), Clock())
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_service_on_a_folder_is_told_who_is_there(data_dir):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, data_dir], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(InfraError) as refused:
            Store(None, data_dir, Clock())
        assert f"pid {holder.pid};" in one_line(refused)
    finally:
        holder.kill()
        holder.communicate()
    Store(None, data_dir, Clock()).close()


def test_a_store_that_could_not_be_opened_holds_nothing(data_dir):
    (data_dir / "corral.db").write_bytes(b"this is no database" * 100)
    for _ in range(2):
        with pytest.raises(InfraError, match="not a database") as refused:
            Store(None, data_dir, Clock())
        one_line(refused)
    (data_dir / "corral.db").unlink()
    Store(None, data_dir, Clock()).close()


def test_files_are_for_the_owner_only(store, data_dir, url):
    new_job(store)
    store.append_logs(JOB, batch(chunk("driver", 0, ["x"])))
    files = [path for path in data_dir.rglob("*") if path.is_file()]
    assert len(files) >= 2
    assert [path for path in files if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


def test_sqlite_is_tuned_for_one_writer_and_many_readers(data_dir):
    opened = database.Database(None, data_dir)
    with opened.writing() as connection:
        found = {name: connection.execute(text(f"PRAGMA {name}")).scalar() for name in ("journal_mode", "foreign_keys")}
        assert found == {"journal_mode": "wal", "foreign_keys": 1}
        assert connection.execute(text("PRAGMA synchronous")).scalar() == 1
        assert connection.execute(text("PRAGMA busy_timeout")).scalar() == database.BUSY_MS
    with opened.writing(durable=True) as connection:
        assert connection.execute(text("PRAGMA synchronous")).scalar() == 2
    opened.close()


def test_a_database_of_a_newer_corral_is_refused(store, reopen, data_dir, url):
    new_job(store)
    store.close()
    opened = database.Database(url, data_dir)
    with opened.writing() as connection:
        connection.execute(text("UPDATE meta SET value = '99' WHERE key = 'schema'"))
    opened.close()
    with pytest.raises(ConfigError) as refused:
        Store(url, data_dir, Clock())
    assert "schema 99, made by a newer Corral; this one knows up to" in one_line(refused)


def test_an_older_database_is_brought_up_step_by_step(store, reopen, monkeypatch):
    new_job(store)
    store.append_logs(JOB, batch(chunk("driver", 0, ["kept"])))
    steps = []
    more = tuple(lambda connection, n=n: steps.append(n) for n in (2, 3))
    monkeypatch.setattr(database, "MIGRATIONS", MIGRATIONS + more)
    store = reopen()
    assert lines_of(read_all(store), "driver") == ["kept"]
    reopen()
    assert steps == [2, 3], "each step is taken once"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nonsense", "not one"),
        ("postgresql://u:s3cr%25t-pass@host:port/name", "not one"),
        ("mysql://u:s3cr%25t-pass@host/name", "'mysql'"),
        ("sqlite://", "'sqlite'"),
        ("sqlite:///:memory:", "'sqlite'"),
    ],
)
def test_a_wrong_url_is_one_line(data_dir, url, said):
    with pytest.raises(ConfigError) as refused:
        Store(url, data_dir, Clock())
    assert said in one_line(refused)
    assert "postgresql://user@host/name" in str(refused.value)


def test_a_server_that_is_not_there_is_one_line(data_dir):
    with pytest.raises(InfraError) as refused:
        Store("postgresql://ann:s3cr%25t-pass@127.0.0.1:1/name", data_dir, Clock())
    assert one_line(refused).startswith("database 127.0.0.1:1/name: ")
    assert "refused" in str(refused.value)


def test_a_wrong_password_or_name_is_one_line(server, data_dir):
    for url in (server.url("postgres", password=postgres.PASSWORD + "x"), server.url("nowhere")):
        with pytest.raises(InfraError) as refused:
            Store(url, data_dir, Clock())
        assert str(server.socket_dir) in one_line(refused)


def test_a_database_of_another_folder_is_refused(server, data_dir, tmp_path):
    url = server.new_database()
    store = Store(url, data_dir, Clock())
    new_job(store)
    store.close()
    with pytest.raises(ConfigError, match="another data folder") as refused:
        Store(url, tmp_path / "other", Clock())
    one_line(refused)
    Store(url, data_dir, Clock()).close()


def test_a_lost_connection_is_an_infra_error_and_the_next_call_works(server, data_dir, monkeypatch):
    url = server.new_database()
    store = Store(url, data_dir, Clock())
    new_job(store)
    store.append_logs(JOB, batch(chunk("driver", 0, ["a"])))
    server.end_connections()
    store.append_logs(JOB, batch(chunk("driver", 2, ["b"])))
    write = store._segments.write

    def write_and_lose_the_server(*args):
        server.end_connections()
        return write(*args)

    monkeypatch.setattr(store._segments, "write", write_and_lose_the_server)
    with pytest.raises(InfraError) as lost:
        store.append_logs(JOB, batch(chunk("driver", 4, ["longer than what is stored in its place"])))
    one_line(lost)
    monkeypatch.undo()
    store.append_logs(JOB, batch(chunk("driver", 2, ["b"]), chunk("driver", 4, ["c"])))
    told = read_all(store)
    assert is_gap_free(told)
    assert lines_of(told, "driver") == ["a", "b", "c"]
    store.close()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    if os.geteuid() == 0:
        target = tmp_path / "file"
        target.write_text("")
        folder = target / "inside"
    else:
        tmp_path.chmod(0o500)
        folder = tmp_path / "inside"
    with pytest.raises(InfraError) as refused:
        Store(None, folder, Clock())
    assert str(folder) in one_line(refused)


def test_values_never_reach_a_message(store, url, data_dir):
    if url is None:
        with sqlite3.connect(data_dir / "corral.db") as planted:
            planted.execute("CREATE TRIGGER refuse BEFORE INSERT ON jobs BEGIN SELECT RAISE(ABORT, 'planted'); END")
    else:
        with store._database.writing() as connection:
            connection.execute(text("ALTER TABLE jobs ADD CONSTRAINT refuse CHECK (owner <> 'ann')"))
    secret = secrets.token_hex()
    with pytest.raises(RuntimeError, match=r"planted|refuse") as failed:
        new_job(store, env={"TOKEN": secret})
    assert secret not in "".join(traceback.format_exception(failed.value))


def test_a_database_without_an_encoding_keeps_text(server, data_dir):
    name = f"ascii{secrets.token_hex(4)}"
    with server.connect() as connection:
        connection.execute(f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
    store = Store(server.url(name), data_dir, Clock())
    try:
        new_job(store, branch="grün")
        job = store.get(JOB)
        assert job is not None
        assert job.request.branch == "grün"
    finally:
        store.close()
