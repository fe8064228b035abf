"""All a service has to remember: jobs, their events, and where their log lines lie.

Every method is one transaction. An event has its number, and is stored, before anyone can read it; a state and its
event are stored together. A line goes into its segment first and counts once the index says so, so a service that is
killed between the two has written some bytes that nobody will ever see.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, delete, func, insert, select, update

from corral.errors import ConfigError
from corral.job.core.clock import Clock
from corral.job.core.machine import allowed
from corral.job.core.record import JobRecord
from corral.job.protocol.agent import LogBatch
from corral.job.protocol.events import EventType, encode
from corral.job.protocol.states import TERMINAL, JobState
from corral.job.protocol.submit import SubmitRequest
from corral.job.store import rows
from corral.job.store.database import Database
from corral.job.store.errors import Ended, KeyConflict, Misfit, Stale, UnknownJob
from corral.job.store.lock import FolderLock
from corral.job.store.reading import Page, Reader, cut, fetch, first_seq
from corral.job.store.segments import ROLL, Segments
from corral.job.store.tables import events, jobs, labels
from corral.job.store.writing import Appender, watermarks

__all__ = ["Ended", "KeyConflict", "Misfit", "Page", "Stale", "Store", "UnknownJob"]

PAGE = 256 << 10


class Store:
    """Thread-safe, and the only one of its data folder.

    url: None for SQLite in data_dir, else postgresql://. log_bytes: most stored output of a job; None: no limit. roll:
    bytes after which a segment gets a successor. Raises ConfigError when the database is not ours to use, InfraError,
    here and in every method, when database or disk refuse. Methods that name a job raise UnknownJob.
    """

    def __init__(
        self, url: str | None, data_dir: Path, clock: Clock, *, log_bytes: int | None = None, roll: int = ROLL
    ) -> None:
        self._clock = clock
        self._log_bytes = log_bytes
        self._turn = threading.RLock()
        self._lock = FolderLock(data_dir)
        self._segments = Segments(data_dir / "jobs", roll)
        try:
            self._database = Database(url, data_dir)
            try:
                self._recover()
            except BaseException:
                self._database.close()
                raise
        except BaseException:
            self._lock.release()
            raise

    def close(self) -> None:
        """Let go of files, connections and the folder."""
        with self._turn:
            self._segments.close()
            self._database.close()
            self._lock.release()

    def create(self, request: SubmitRequest, *, key: str, owner: str, job_id: str) -> tuple[JobRecord, bool]:
        """A new, queued job, or the one that the same request made before. Raises KeyConflict."""
        digest = request.digest()
        with self._writing(durable=True) as connection:
            query = select(jobs).where(((jobs.c.owner == owner) & (jobs.c.key == key)) | (jobs.c.job_id == job_id))
            for row in connection.execute(query).mappings():
                if (row["owner"], row["key"], row["digest"]) != (owner, key, digest):
                    raise KeyConflict(row["job_id"])
                return rows.record(row), False
            now = self._clock.now()
            row_ = rows.new_row(request, digest, key=key, owner=owner, job_id=job_id, now=now, last_seq=2)
            (number,) = connection.execute(insert(jobs), row_).inserted_primary_key or (None,)
            said = {JobState.ACCEPTED: "accepted", JobState.QUEUED: "waits for its devices"}
            for seq, (state, message) in enumerate(said.items(), 1):
                line = encode(seq, now, 1, "status", _status_fields(state, message, "", ""))
                connection.execute(insert(events), {"job": number, "seq": seq, "type": "status", "line": line})
            named = [{"job": number, "name": name, "value": rows.as_json(v)} for name, v in request.labels.items()]
            if named:
                connection.execute(insert(labels), named)
            return rows.record(row_), True

    def get(self, job_id: str) -> JobRecord | None:
        with self._database.reading() as connection:
            row = connection.execute(select(jobs).where(jobs.c.job_id == job_id)).mappings().one_or_none()
        return None if row is None else rows.record(row)

    def jobs(
        self,
        *,
        owner: str | None = None,
        repository: str | None = None,
        state: JobState | None = None,
        run_id: str | None = None,
        run_attempt: int | None = None,
        label: str | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> list[JobRecord]:
        """Newest first. label: `name` or `name=value`. after: id of the last job of the page before.

        Raises ConfigError when there is no job `after`.
        """
        query: Select[Any] = select(jobs).order_by(jobs.c.number.desc()).limit(limit)
        wanted = {"owner": owner, "repository": repository, "run_id": run_id, "run_attempt": run_attempt}
        for name, value in (wanted | {"state": None if state is None else state.value}).items():
            if value is not None:
                query = query.where(jobs.c[name] == value)
        if label is not None:
            name, equals, value = label.partition("=")
            having = select(labels.c.job).where(labels.c.name == name)
            query = query.where(
                jobs.c.number.in_(having.where(labels.c.value == rows.as_json(value)) if equals else having)
            )
        with self._database.reading() as connection:
            if after is not None:
                number = connection.scalar(select(jobs.c.number).where(jobs.c.job_id == after))
                if number is None:
                    raise ConfigError(f"after={after[:64]!r} names no job; list again from the start")
                query = query.where(jobs.c.number < number)
            found = connection.execute(query).mappings().all()
        return [rows.record(row) for row in found]

    def active(self) -> list[JobRecord]:
        """All jobs that are not over, oldest first."""
        going = [state.value for state in JobState if state not in TERMINAL]
        with self._database.reading() as connection:
            query = select(jobs).where(jobs.c.state.in_(going)).order_by(jobs.c.number)
            found = connection.execute(query).mappings().all()
        return [rows.record(row) for row in found]

    def count_active(self) -> int:
        """How many jobs are not over."""
        going = [state.value for state in JobState if state not in TERMINAL]
        with self._database.reading() as connection:
            return connection.scalar(select(func.count()).select_from(jobs).where(jobs.c.state.in_(going))) or 0

    def transition(
        self,
        job: JobRecord,
        to: JobState,
        *,
        message: str,
        rayjob_status: str = "",
        job_deployment_status: str = "",
        **changes: Any,
    ) -> JobRecord:
        """Move a job as it was when this was decided, and say so: `status`, and `final` when it is over then.

        changes: admitted, running, finished, verdict, attempt. Raises Stale when the job has moved since. ValueError:
        the machine has no such transition, or the end has another verdict.
        """
        if not allowed(job.state, to):
            raise ValueError(f"job {job.job_id}: {job.state} is not followed by {to}")
        verdict = changes.get("verdict", job.verdict)
        if to in TERMINAL and (verdict is None or verdict.status.value != to.value):
            raise ValueError(f"job {job.job_id}: {to} with verdict {verdict and verdict.status}")
        with self._writing(durable=True) as connection:
            now = self._clock.now()
            row = dict(self._row(connection, job.job_id))
            if (row["state"], row["version"]) != (job.state.value, job.version):
                raise Stale(f"job {job.job_id} is {row['state']} (version {row['version']}) by now, not {job.state}")
            values = rows.changed(changes)
            values |= {"state": to.value, "version": job.version + 1, "state_since": now}
            if to in TERMINAL:
                values["finished"] = changes.get("finished") or now
            appender = Appender(connection, self._segments, job.job_id, now)
            attempt = values.get("attempt", job.attempt)
            appender.event("status", _status_fields(to, message, rayjob_status, job_deployment_status), attempt)
            if to in TERMINAL:
                assert verdict is not None
                appender.event("final", rows.final_fields(verdict), attempt)
                self._segments.finish(job.job_id, row["segment"])
            values["last_seq"] = appender.last_seq
            connection.execute(update(jobs).where(jobs.c.number == row["number"]).values(values))
            return rows.record(row | values)

    def append(self, job_id: str, kind: EventType, fields: dict[str, Any], attempt: int) -> int:
        """Append an event that is no log line, status or final; its seq. Raises Ended."""
        if kind in ("log", "status", "final"):
            raise ValueError(f"{kind} events are not appended by themselves")
        with self._writing() as connection:
            appender = Appender(connection, self._segments, job_id, self._clock.now())
            seq = appender.event(kind, fields, attempt)
            appender.close()
            return seq

    def append_logs(self, job_id: str, batch: LogBatch) -> dict[str, int]:
        """Store all lines of a batch that are not stored yet, or none; the watermarks after it.

        Raises Misfit when a chunk does not begin where the stored bytes of its source end, Ended, and ConfigError for
        an attempt that never was. Above `log_bytes` there is one warning for an attempt, and
        lines are dropped.
        """
        with self._writing() as connection:
            appender = Appender(connection, self._segments, job_id, self._clock.now())
            marks = appender.logs(batch, self._log_bytes)
            appender.close()
            return marks

    def watermarks(self, job_id: str, attempt: int) -> dict[str, int]:
        """Byte of each source up to which it is stored."""
        with self._database.reading() as connection:
            number = connection.scalar(select(jobs.c.number).where(jobs.c.job_id == job_id))
            if number is None:
                raise UnknownJob(job_id)
            return watermarks(connection, number, attempt)

    def request_cancel(self, job_id: str, cause: str) -> JobRecord:
        """Ask for the end of a job. The first cause stays, and a job that is over does not change."""
        return self._touch(job_id, lambda job: {} if job.cancel is not None else {"cancel": cause})

    def renew_lease(self, job_id: str) -> JobRecord:
        """A client of the job was heard."""
        now = self._clock.now()
        return self._touch(
            job_id, lambda job: {} if job.request.lease is None else {"lease_until": now + job.request.lease}
        )

    def read(
        self,
        job_id: str,
        after_seq: int,
        *,
        types: frozenset[str],
        ranks: frozenset[int] | None = None,
        max_bytes: int = PAGE,
    ) -> Page:
        """Events after a seq, as they are sent: as many as fit into max_bytes, and at least one if there is one.

        ranks: log lines of these only, so none of the driver. Lines that the disk lost are there, and say so.
        """
        with self._database.reading() as connection:
            reader = Reader(connection, job_id, after_seq)
            items, next_seq = reader.plan(types, ranks, max_bytes)
        data, damaged = fetch(self._segments, job_id, items, after_seq)
        if damaged and self.get(job_id) is None:
            raise UnknownJob(job_id)  # removed meanwhile
        if len(data) > max_bytes and len(items) == 1:
            data, count = cut(data, max_bytes)
            next_seq = max(first_seq(items[0]), after_seq + 1) + count - 1
        return Page(data, next_seq, reader.over and next_seq >= reader.head)

    def remove(self, job_id: str) -> None:
        """Forget a job that is over: its events, its log lines, its name. ValueError when it is not over."""
        with self._writing() as connection:
            row = self._row(connection, job_id)
            if JobState(row["state"]) not in TERMINAL:
                raise ValueError(f"job {job_id} is {row['state']}; only a job that is over is removed")
            connection.execute(delete(jobs).where(jobs.c.number == row["number"]))
        with self._turn:
            self._segments.remove(job_id)

    def _touch(self, job_id: str, changes: Callable[[JobRecord], dict[str, Any]]) -> JobRecord:
        """Change a job without moving it, unless it is over."""
        with self._writing(durable=True) as connection:
            row = dict(self._row(connection, job_id))
            job = rows.record(row)
            values = {} if job.terminal else changes(job)
            if values:
                connection.execute(update(jobs).where(jobs.c.number == row["number"]).values(values))
            return rows.record(row | values)

    def _row(self, connection: Connection, job_id: str) -> RowMapping:
        """The row of a job, held until the end of the transaction."""
        query = select(jobs).where(jobs.c.job_id == job_id).with_for_update()
        row = connection.execute(query).mappings().one_or_none()
        if row is None:
            raise UnknownJob(job_id)
        return row

    @contextmanager
    def _writing(self, durable: bool = False) -> Iterator[Connection]:
        with self._turn, self._database.writing(durable) as connection:
            yield connection

    def _recover(self) -> None:
        """After a start: cut off what was written and never indexed, and say what the disk lost."""
        for job in self.active():
            with self._writing() as connection:
                appender = Appender(connection, self._segments, job.job_id, self._clock.now())
                appender.recover()
                appender.close()
            self._segments.forget(job.job_id)


def _status_fields(state: JobState, message: str, rayjob: str, deployment: str) -> dict[str, Any]:
    return {
        "status": state.value,
        "message": message,
        "rayjob_status": rayjob,
        "job_deployment_status": deployment,
    }
