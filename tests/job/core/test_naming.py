"""One request, one job."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.errors import ConfigError
from corral.job.core.naming import idempotency_key, job_id
from corral.job.protocol import names
from tests.job.core.cases import job, request

RUN = {"repository": "a/b", "github_run_id": "123", "github_run_attempt": 1, "name_suffix": "ppo"}


def test_the_same_ci_run_gives_the_same_key_and_any_other_another():
    key = idempotency_key(request(**RUN))
    assert idempotency_key(request(**RUN, env={"A": "1"})) == key
    changed = [{"repository": "a/c"}, {"github_run_id": "124"}, {"github_run_attempt": 2}, {"name_suffix": "grpo"}]
    keys = {idempotency_key(request(**RUN | change)) for change in changed}
    assert len(keys | {key}) == 5


def test_a_header_wins_and_never_meets_a_run():
    key = idempotency_key(request(**RUN))
    assert idempotency_key(request(**RUN), "mine") == "key:mine"
    assert idempotency_key(request(**RUN), key) != key


def test_outside_ci_every_submit_is_a_new_job():
    assert idempotency_key(request()) != idempotency_key(request())
    assert idempotency_key(request(), random=lambda: "x") == "once:x"


@pytest.mark.parametrize("header", ["", "a b", "a\n", "ä", "x" * 201])
def test_a_strange_header_is_refused(header):
    with pytest.raises(ConfigError, match="Idempotency-Key"):
        idempotency_key(request(), header)


@given(owner=st.text(), key=st.text(), other=st.text())
def test_the_name_of_a_job_is_short_and_a_function_of_owner_and_key(owner, key, other):
    name = job_id(owner, key)
    assert names.JOB_ID.fullmatch(name)
    assert job_id(owner, key) == name
    assert other == owner or job_id(other, key) != name
    assert re.fullmatch(r"[a-z][a-z0-9-]{0,46}", job(job_id=name).submission_id)


def test_owner_and_key_do_not_run_into_each_other():
    assert job_id("ab", "c") != job_id("a", "bc")
