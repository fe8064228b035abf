"""The database behind the store: SQLite in the data folder, or PostgreSQL by URL."""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, select, update
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from corral.errors import ConfigError, InfraError
from corral.job.store.tables import MIGRATIONS, meta

SQLITE = "corral.db"
HOME = "database.id"  # in the data folder: names the database its segments belong to
BUSY_MS = 30_000
CONNECT_SECONDS = 10


class Database:
    """Thread-safe. url: None for SQLite inside data_dir.

    Raises ConfigError for a URL that is none, for a database of a newer Corral or of another data folder, and
    InfraError when it does not answer; here and in all later use. No message ever holds a password.
    """

    def __init__(self, url: str | None, data_dir: Path) -> None:
        self._url = _parse(url, data_dir)
        self._sqlite = self._url.get_backend_name() == "sqlite"
        self._engine = self._make_engine()
        try:
            self._migrate()
            if url is not None:
                self._belongs_to(data_dir)
        except BaseException:
            self._engine.dispose()
            raise

    @contextmanager
    def writing(self, durable: bool = False) -> Iterator[Connection]:
        """A transaction that no other write is beside; committed at the end, undone when an exception leaves it.

        durable: survives a loss of power, too.
        """
        with self._said(), self._engine.connect() as connection:
            if self._sqlite:
                connection.info["begin"] = "BEGIN IMMEDIATE"
                level = "FULL" if durable else "NORMAL"
                if connection.info.get("synchronous") != level:
                    raw = connection.connection.dbapi_connection
                    assert isinstance(raw, sqlite3.Connection)
                    raw.execute(f"PRAGMA synchronous = {level}")  # has no effect inside a transaction
                    connection.info["synchronous"] = level
            with connection.begin():
                yield connection

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection to look with, beside any writes."""
        with self._said(), self._engine.connect() as connection:
            connection.info["begin"] = "BEGIN"
            yield connection

    def close(self) -> None:
        self._engine.dispose()

    @property
    def place(self) -> str:
        """Where it is, for messages: without user, password and options."""
        if self._sqlite:
            return str(self._url.database)
        port = f":{self._url.port}" if self._url.port else ""
        return f"{self._url.host or self._url.query.get('host', 'localhost')}{port}/{self._url.database or ''}"

    def _make_engine(self) -> Engine:
        options: dict[str, Any] = {"hide_parameters": True, "pool_size": 8, "max_overflow": 8}
        if not self._sqlite:
            seconds = self._url.query.get("connect_timeout", CONNECT_SECONDS)
            # A database made in the C locale has no encoding of its own, and text would come back as bytes.
            connect_args = {"connect_timeout": seconds, "client_encoding": "UTF8"}
            options |= {"pool_pre_ping": True, "connect_args": connect_args}
            try:
                return create_engine(self._url, **options)
            except ModuleNotFoundError as error:
                raise ConfigError(f"PostgreSQL needs {error.name}: pip install 'corral[postgres]'") from error
        path = Path(str(self._url.database))
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise InfraError(f"cannot open database {path}: {error.strerror}") from error
        options["connect_args"] = {"timeout": BUSY_MS / 1000, "check_same_thread": False, "isolation_level": None}
        engine = create_engine(self._url, **options)
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine

    def _migrate(self) -> None:
        newest = len(MIGRATIONS)
        with self.writing() as connection:
            schema = 0
            if inspect(connection).has_table(meta.name):
                schema = int(connection.scalar(select(meta.c.value).where(meta.c.key == "schema")) or 0)
            if schema > newest:
                raise ConfigError(
                    f"database {self.place} has schema {schema}, made by a newer Corral; this one knows up to {newest}"
                )
            for step in MIGRATIONS[schema:]:
                step(connection)
            if schema == 0:
                connection.execute(meta.insert(), {"key": "schema", "value": str(newest)})
            elif schema < newest:
                connection.execute(update(meta).where(meta.c.key == "schema").values(value=str(newest)))

    def _belongs_to(self, data_dir: Path) -> None:
        """A database that is elsewhere is tied to the folder that holds the log lines it points to."""
        path = data_dir / HOME
        try:
            ours = path.read_text().strip() if path.exists() else ""
            with self.writing() as connection:
                theirs = connection.scalar(select(meta.c.value).where(meta.c.key == "home"))
                if theirs is None:
                    ours = ours or secrets.token_hex(16)
                    path.touch(mode=0o600)
                    path.write_text(f"{ours}\n")
                    connection.execute(meta.insert(), {"key": "home", "value": ours})
                elif theirs != ours:
                    raise ConfigError(
                        f"database {self.place} belongs to another data folder than {data_dir}, "
                        "which has its log lines; use that folder, or an empty database"
                    )
        except OSError as error:
            raise InfraError(f"cannot use {path}: {error.strerror}") from error

    @contextmanager
    def _said(self) -> Iterator[None]:
        try:
            yield
        except (OperationalError, InterfaceError, PoolTimeout) as error:
            raise InfraError(f"database {self.place}: {self._reason(error)}") from None
        except DBAPIError as error:
            if error.connection_invalidated or type(error) is DatabaseError:  # lost, or a file that is damaged
                raise InfraError(f"database {self.place}: {self._reason(error)}") from None
            # A bug. Servers tell the values of the row, secrets too, in the lines after the first.
            raise RuntimeError(f"database {self.place}: {self._reason(error)}") from None

    def _reason(self, error: Exception) -> str:
        reason = str(getattr(error, "orig", None) or error)
        if self._url.password:
            reason = reason.replace(str(self._url.password), "***")
        return " ".join(reason.strip().split("\n")[0].split())[:300]


def _parse(text: str | None, data_dir: Path) -> URL:
    if text is None:
        return URL.create("sqlite", database=str(data_dir / SQLITE))
    wanted = "give postgresql://user@host/name, or none for SQLite in the data folder"
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise ConfigError(f"the database URL is not one; {wanted}") from None
    if url.drivername in {"postgresql", "postgres", "postgresql+psycopg"}:
        return url.set(drivername="postgresql+psycopg")
    if url.drivername == "sqlite" and url.database and url.database != ":memory:" and not url.query:
        return url
    raise ConfigError(f"the database URL begins with {url.drivername[:40]!r}, which is not supported; {wanted}")


def _prepare_sqlite(connection: sqlite3.Connection, _: object) -> None:
    for pragma in ("journal_mode = WAL", "synchronous = NORMAL", f"busy_timeout = {BUSY_MS}", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql(connection.info.get("begin", "BEGIN"))
