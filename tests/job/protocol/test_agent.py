"""What an agent says: whole end records, chunks that fit, verdicts and their exit codes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from corral.job.protocol.agent import EndRecord, Heartbeat, LogBatch, LogChunk
from corral.job.protocol.states import TERMINAL, FailureClass, JobState, Status
from corral.job.protocol.verdict import Verdict, client_exit_code

TEXT = st.none() | st.text(st.characters(codec="utf-8"), max_size=30)
RECORDS = st.builds(
    EndRecord,
    job_id=st.just("rj-0123456789ab"),
    attempt=st.integers(1, 6),
    exit_code=st.none() | st.integers(0, 255),
    failure=TEXT,
    kind=st.sampled_from([None, "config", "infra"]),
    failing_rank=st.none() | st.integers(0, 9999),
    first_error=TEXT,
    started=st.floats(0, 4e9),
    ended=st.floats(0, 4e9) | st.integers(0, 10**9),
    sources=st.dictionaries(st.sampled_from(["driver", "node-0/rank-0"]), st.integers(0, 10**15)),
    digest=st.just(""),
)


@given(record=RECORDS)
def test_a_sealed_record_is_whole_after_disk_and_wire(record):
    sealed = record.sealed()
    assert sealed.is_whole()
    assert not record.is_whole()
    assert EndRecord.model_validate_json(sealed.model_dump_json()) == sealed
    assert EndRecord.model_validate_json(sealed.model_dump_json(indent=2)).is_whole()


@given(record=RECORDS, cut=st.floats(0, 1, exclude_max=True))
def test_half_a_record_is_none(record, cut):
    text = record.sealed().model_dump_json()
    with pytest.raises(ValidationError):
        EndRecord.model_validate_json(text[: int(cut * len(text))])


@pytest.mark.parametrize("field", sorted(set(EndRecord.model_fields) - {"digest"}))
def test_a_record_with_any_field_changed_is_not_whole(field):
    record = EndRecord(job_id="rj-0123456789ab", attempt=1, exit_code=3, started=1.0, ended=2.0).sealed()
    other = {
        "job_id": "rj-x",
        "kind": "infra",
        "failure": "x",
        "first_error": "x",
        "bundle": "x",
        "sources": {"driver": 1},
    }
    assert not record.model_copy(update={field: other.get(field, 99)}).is_whole()


def chunk(**fields):
    return {"source": "driver", "start": 0, "end": 6, "lines": ["ab", "cd"], "offsets": [0, 3]} | fields


@pytest.mark.parametrize(
    "fields",
    [
        {"offsets": [0]},
        {"offsets": [0, 3, 6]},
        {"offsets": [3, 0]},
        {"offsets": [0, 7]},
        {"offsets": [-1, 3]},
        {"start": 1},
        {"start": 9},
        {"end": 2},
        {"source": "node-1/rank-5"},
        {"source": "node-1/rank-5", "node": 1, "rank": 4},
        {"source": "node-1/rank-5", "rank": 5},
        {"source": "driver", "node": 0, "rank": 0},
        {"source": "../../etc/passwd"},
        {"source": "node-1/rank-٣", "node": 1, "rank": 3},
        {"source": "driver\n"},
        {"lines": ["ab", "\ud800"]},
        {"lines": ["ab", 3]},
        {"extra": 1},
    ],
)
def test_a_chunk_that_does_not_fit_itself_is_refused(fields):
    with pytest.raises(ValidationError):
        LogChunk.model_validate(chunk(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"lines": [], "offsets": []},
        {"source": "node-1/rank-5", "node": 1, "rank": 5},
        {"lines": ["a\n\0", "é😀"], "offsets": [0, 0]},
    ],
)
def test_a_chunk_that_fits_comes_through_whole(fields):
    batch = LogBatch.model_validate({"attempt": 1, "chunks": [chunk(**fields)]})
    assert LogBatch.model_validate_json(batch.model_dump_json()) == batch


def test_a_batch_and_a_heartbeat_have_bounds():
    with pytest.raises(ValidationError):
        LogBatch.model_validate({"attempt": 1, "chunks": [chunk()] * 65})
    with pytest.raises(ValidationError):
        Heartbeat.model_validate({"attempt": 1, "phase": "dreaming"})
    progress = {"rank": 0, "node": 0, "calls": 1, "state": "idle", "time": 1.0, "pid": 7}
    assert Heartbeat.model_validate({"attempt": 1, "phase": "running", "ranks": [progress]}).ranks[0].calls == 1


USER, CONFIG, INFRA = FailureClass.USER, FailureClass.CONFIG, FailureClass.INFRA


@pytest.mark.parametrize(
    ("status", "failure_class", "code", "exit_code"),
    [
        ("SUCCEEDED", None, 0, 0),
        ("FAILED", USER, 3, 3),
        ("FAILED", USER, 63, 63),
        ("FAILED", USER, 64, 1),  # 64 to 78 and 124 have meanings of their own
        ("FAILED", USER, 78, 1),
        ("FAILED", USER, 124, 1),
        ("FAILED", USER, 128, 1),
        ("FAILED", USER, 139, 139),
        ("FAILED", USER, 192, 192),
        ("FAILED", USER, 193, 1),
        ("FAILED", USER, 255, 1),
        ("FAILED", USER, 0, 1),
        ("FAILED", USER, None, 1),
        ("FAILED", CONFIG, 78, 78),
        ("FAILED", CONFIG, 127, 78),
        ("FAILED", INFRA, 137, 75),
        ("FAILED", INFRA, None, 75),
        ("TIMEOUT", FailureClass.TIMEOUT, None, 124),
        ("TIMEOUT", FailureClass.TIMEOUT, 3, 124),
        ("CANCELLED", FailureClass.CANCEL, None, 130),
        ("CANCELLED", FailureClass.CANCEL, 0, 130),
        ("NOT_FOUND", None, None, 75),
    ],
)
def test_the_exit_code_of_a_client(status, failure_class, code, exit_code):
    verdict = Verdict(status=Status(status), cause="x", message="x", failure_class=failure_class, exit_code=code)
    assert client_exit_code(verdict) == exit_code
    assert client_exit_code(verdict, compat=True) == (0 if status == "SUCCEEDED" else 1)
    assert Verdict.model_validate(json.loads(verdict.model_dump_json())) == verdict


@given(
    status=st.sampled_from([status for status in Status if status is not Status.SUCCEEDED]),
    failure_class=st.none() | st.sampled_from(FailureClass),
    code=st.none() | st.integers(-300, 300),
    compat=st.booleans(),
)
def test_only_success_exits_with_0(status, failure_class, code, compat):
    verdict = Verdict(status=status, cause="x", message="x", failure_class=failure_class, exit_code=code)
    assert 1 <= client_exit_code(verdict, compat) <= 255


def test_every_status_is_a_state_a_job_can_end_in():
    assert {JobState(status) for status in Status} == TERMINAL
