"""Tables of the store, and the numbered steps that make them.

Texts that people chose are kept as JSON in ASCII or as bytes, so that every database takes every character.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

metadata = MetaData()

_Number = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows only where the type is INTEGER


def _of_a_job() -> Column[int]:
    return Column("job", _Number, ForeignKey("jobs.number", ondelete="CASCADE"), primary_key=True)


meta = Table("meta", metadata, Column("key", String(64), primary_key=True), Column("value", Text, nullable=False))

# number: order of creation. request, verdict: JSON. last_seq: of the newest event. segment, segment_end: where the next
# log line goes. log_bytes: stored output. capped: the attempt that was told that no more of its output is kept.
jobs = Table(
    "jobs",
    metadata,
    Column("number", _Number, primary_key=True, autoincrement=True),
    Column("job_id", String(64), nullable=False, unique=True),
    Column("key", Text, nullable=False),
    Column("owner", Text, nullable=False),
    Column("request", Text, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("repository", Text, nullable=False),
    Column("run_id", Text, nullable=False),
    Column("run_attempt", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    Column("version", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("created", Double, nullable=False),
    Column("state_since", Double, nullable=False),
    Column("admitted", Double),
    Column("running", Double),
    Column("finished", Double),
    Column("verdict", Text),
    Column("cancel", Text),
    Column("lease_until", Double),
    Column("last_seq", BigInteger, nullable=False),
    Column("segment", Integer, nullable=False),
    Column("segment_end", BigInteger, nullable=False),
    Column("log_bytes", BigInteger, nullable=False),
    Column("capped", Integer, nullable=False),
    UniqueConstraint("owner", "key"),
    Index("jobs_by_state", "state"),
    Index("jobs_by_run", "run_id", "run_attempt"),
    sqlite_autoincrement=True,
)

# value: JSON.
labels = Table(
    "labels",
    metadata,
    _of_a_job(),
    Column("name", String(64), primary_key=True),
    Column("value", Text, nullable=False),
    Index("labels_by_name", "name"),
    sqlite_with_rowid=False,
)

# All events but log lines. line: as it is sent.
events = Table(
    "events",
    metadata,
    _of_a_job(),
    Column("seq", BigInteger, primary_key=True),
    Column("type", String(16), nullable=False),
    Column("line", LargeBinary, nullable=False),
    sqlite_with_rowid=False,
)

# Consecutive log lines of one source, seqs first_seq to last_seq: the bytes [offset, offset + length) of a segment.
# src_start, src_end: bytes of the raw file.
chunks = Table(
    "chunks",
    metadata,
    _of_a_job(),
    Column("last_seq", BigInteger, primary_key=True),
    Column("first_seq", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("source", String(64), nullable=False),
    Column("node", Integer),
    Column("rank", Integer),
    Column("segment", Integer, nullable=False),
    Column("offset", BigInteger, nullable=False),
    Column("length", Integer, nullable=False),
    Column("src_start", BigInteger, nullable=False),
    Column("src_end", BigInteger, nullable=False),
    Column("ts", Double, nullable=False),
    sqlite_with_rowid=False,
)

# Bytes of a raw file up to which its lines are stored.
sources = Table(
    "sources",
    metadata,
    _of_a_job(),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("source", String(64), primary_key=True),
    Column("watermark", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)

# Step n leads from schema n - 1 to schema n. A released step is never changed.
MIGRATIONS: tuple[Callable[[Connection], None], ...] = (metadata.create_all,)
