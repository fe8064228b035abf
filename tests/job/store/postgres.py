"""A PostgreSQL server of our own for a test session: short paths, a socket in the file system, no network."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg

USER, PASSWORD = "corral", "s3cr%t-pass"


def binaries() -> Path | None:
    """Folder of initdb and postgres; None where there are none."""
    on_path = shutil.which("initdb")
    folders = [Path(on_path).resolve().parent] if on_path else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "postgres").exists() and (folder / "initdb").exists()), None)


@dataclass(frozen=True)
class Server:
    socket_dir: Path

    def url(self, database: str, password: str = PASSWORD) -> str:
        return f"postgresql://{USER}:{password.replace('%', '%25')}@/{database}?host={self.socket_dir}"

    def connect(self, database: str = "postgres") -> psycopg.Connection[Any]:
        return psycopg.connect(
            host=str(self.socket_dir), user=USER, password=PASSWORD, dbname=database, autocommit=True
        )

    def new_database(self) -> str:
        """URL of an empty schema, which takes far less time to make than a database."""
        name = f"t{uuid4().hex[:12]}"
        with self.connect() as connection:
            connection.execute(f"CREATE SCHEMA {name}")
        return f"{self.url('postgres')}&options=-csearch_path%3D{name}"

    def end_connections(self) -> None:
        """Of all clients, as a restart of the server does."""
        with self.connect() as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
            )


@contextmanager
def running(folder: Path) -> Iterator[Server]:
    """initdb refuses to run as root, so both run as another user then."""
    work = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
    identity: dict[str, Any] = {}
    if os.geteuid() == 0:
        entry = next(pwd.getpwnam(name) for name in ("postgres", "nobody") if _exists(name))
        identity = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
        os.chown(work, entry.pw_uid, entry.pw_gid)
    secret = work / "pw"
    secret.write_text(PASSWORD)
    secret.chmod(0o644)
    data, log = work / "data", (work / "log").open("wb")
    options = ["-U", USER, "-A", "scram-sha-256", "--pwfile", str(secret), "--no-sync", "-E", "UTF8", "--no-locale"]
    server = None
    try:
        subprocess.run(
            [folder / "initdb", "-D", data, *options], check=True, capture_output=True, cwd="/", timeout=120, **identity
        )
        settings = ["listen_addresses=", "fsync=off", "shared_buffers=16MB", "max_connections=60"]
        command = [folder / "postgres", "-D", data, "-k", work, *(word for one in settings for word in ("-c", one))]
        server = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd="/", **identity)
        _wait(Server(work), server)
        yield Server(work)
    finally:
        if server is not None:
            server.send_signal(signal.SIGQUIT)
            server.wait(30)
        log.close()
        shutil.rmtree(work, ignore_errors=True)


def _exists(name: str) -> bool:
    with suppress(KeyError):
        return bool(pwd.getpwnam(name))
    return False


def _wait(server: Server, process: subprocess.Popen[bytes], timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            server.connect().close()
            return
        except psycopg.OperationalError:
            assert process.poll() is None, "the server ended: see its log"
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
