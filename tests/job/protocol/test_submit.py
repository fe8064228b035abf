"""What a request may look like; what is refused is said in one line, and equal requests have equal digests."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from corral.job.protocol import names
from corral.job.protocol.submit import SubmitRequest

SHA = "a" * 64
BASE = {"script": "/src/train.sh"}
REFERENCE = {  # all fields of the first protocol, as its helper sends them
    "repository": "verl-project/verl",
    "commit_sha": "0f" * 20,
    "branch": "feature/x",
    "github_run_id": "17000000001",
    "github_run_attempt": 1,
    "image": "registry.local:5000/verl/verl-8.5.2:ascend@sha256-x",
    "name_suffix": "e2e-ppo",
    "script": "/src/tests/bootstrap.sh",
    "args": ["--script-path", "/verl/tests/run.sh"],
    "env": {"HF_HOME": "/cache", "lower_case": "x"},
    "worker_replicas": 2,
}


def problems(**fields) -> str:
    with pytest.raises(ValidationError) as caught:
        SubmitRequest.model_validate(BASE | fields)
    return "; ".join(error["msg"] for error in caught.value.errors())


def test_the_first_protocol_is_taken_as_it_is():
    request = SubmitRequest.model_validate_json(json.dumps(REFERENCE))
    assert request.worker_replicas == 2
    assert SubmitRequest.model_validate(REFERENCE | {"github_run_id": 17000000001}).digest() == request.digest()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"repository": "../.."}, "repository="),
        ({"repository": "a/b/c"}, "repository="),
        ({"repository": "a/..", "github_run_id": "x"}, "repository="),
        ({"repository": "a/b\n"}, "repository="),
        ({"commit_sha": "xyz"}, "commit_sha="),
        ({"github_run_id": ".."}, "github_run_id="),
        ({"github_run_id": "1/2"}, "github_run_id="),
        ({"name_suffix": "-x"}, "name_suffix="),
        ({"image": "a b"}, "image="),
        ({"image": "-x"}, "image="),
        ({"branch": "a\x1b[2J"}, "branch holds a control character"),
        ({"labels": {"a b": "x"}}, "label 'a b'"),
        ({"labels": {"a": "x\ny"}}, "label 'a'"),
        ({"labels": {"a": "x" * 257}}, "label 'a'"),
        ({"bundle": "A" * 64, "script": "a.sh"}, "bundle is not the hex"),
        ({"env": {"A": "\ud800"}}, "surrogate"),
        ({"args": ["\udcff"]}, "surrogate"),
        ({"args": ["a\0b"]}, "NUL"),
        ({"args": ["x" * (names.MAX_ARG_BYTES + 1)]}, "is over 16384 bytes"),
        ({"env": {"A": "x" * names.MAX_ENV_BYTES}}, "env has 65537 bytes"),
        ({"secrets": ["LD_PRELOAD"]}, "secret LD_PRELOAD is refused"),
        ({"secrets": ["A"], "env": {"A": "1"}}, "A is in env and in secrets"),
        ({"command": ["a"]}, "either script or command"),
        ({"script": None}, "either script or command"),
        ({"script": None, "command": []}, "command is empty"),
        ({"script": None, "command": ["python"]}, "command needs a bundle"),
        ({"script": "train.sh"}, "is relative; upload a bundle"),
        ({"script": "/src/../etc/passwd"}, "leaves the source"),
        ({"script": "/"}, "is empty"),
        ({"script": "../x.sh", "bundle": SHA}, "leaves the source"),
        ({"script": "/x.sh", "bundle": SHA}, "leaves the source"),
        ({"script": "a\nb.sh", "bundle": SHA}, "control character"),
        ({"script": "a\\b.sh", "bundle": SHA}, "backslash"),
        ({"script": ".", "bundle": SHA}, "is empty"),
        ({"worker_replicas": 2, "resources": {"nodes": 3}}, "worker_replicas=2 and resources.nodes=3 differ"),
    ],
)
def test_what_is_refused_is_said(fields, said):
    found = problems(**fields)
    assert said in found
    assert "\n" not in found


@pytest.mark.parametrize(
    "fields",
    [
        {"unknown": 1},
        {"args": ["x"] * 257},
        {"script": None, "bundle": SHA, "command": ["x"] * 257},
        {"env": {f"A{index}": "" for index in range(257)}},
        {"timeouts": {"run": 0}},
        {"timeouts": {"run": float("nan")}},
        {"timeouts": {"run": float("inf")}},
        {"timeouts": {"walk": 1}},
        {"lease": -1},
        {"retry": {"infra": 6}},
        {"priority": 101},
        {"resources": {"nodes": 0}},
        {"resources": {"kind": "tpu"}},
        {"github_run_attempt": 0},
    ],
)
def test_limits_of_single_fields(fields):
    assert problems(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"script": "a/b c.sh", "bundle": SHA},
        {"script": None, "command": ["python", "-c", "print('\n')"], "bundle": SHA},
        {"env": {"A": "line\nline", "_": "", "PYTHONPATH": "x", "CORRAL_URL": "y"}},
        {"worker_replicas": 2, "resources": {"nodes": 2}},
        {"worker_replicas": 2, "resources": {"accelerators_per_node": 4}},
        {"repository": "a/.github", "branch": "größe/x"},
        {"timeouts": {"run": None, "hang": None}},
    ],
)
def test_what_is_taken(fields):
    request = SubmitRequest.model_validate(BASE | fields)
    again = SubmitRequest.model_validate_json(request.model_dump_json())
    assert request.worker_replicas in (None, again.resources.nodes if again.resources else None)
    assert again == request
    assert again.digest() == request.digest()


@pytest.mark.parametrize(
    "name",
    [
        *("LD_PRELOAD", "LD_LIBRARY_PATH", "DYLD_X", "RAY_ADDRESS", "CORRAL_JOB_ID", "CORRAL_AGENT_X"),
        *("CORRAL_RUN_DIR", "CORRAL_RANK_OUTPUT", "PYTHONSTARTUP", "PYTHONHOME", "PYTHONINSPECT", "BASH_ENV"),
        *("ENV", "IFS", "PS4", "SHELLOPTS", "BASHOPTS", "", "1A", "A-B", "A=B", "A B", "Ä", "A\n", "BASH_FUNC_x%%"),
        "x" * 129,
    ],
)
def test_variables_that_are_not_a_jobs_to_set(name):
    problem = names.env_problem(name, "secret-value")
    assert problem is not None
    assert "secret-value" not in problem
    assert "\n" not in problem


def test_a_nul_byte_in_a_value_is_refused_without_showing_it():
    assert names.env_problem("A", "secret\0value") == "env A holds a NUL byte"
    assert names.env_problem("A", "anything\nelse") is None


@given(path=st.text(max_size=30))
def test_a_path_that_passes_stays_inside(path):
    if names.relative_path_problem(path) is None:
        depth = 0
        for part in path.split("/"):
            depth += {"": 0, ".": 0, "..": -1}.get(part, 1)
            assert depth >= 0
        assert depth > 0
        assert not path.startswith("/")


def test_the_digest_follows_what_runs_and_nothing_else():
    plain = SubmitRequest.model_validate(BASE)
    spelled = {"priority": 0, "timeouts": {"run": 14400}, "retry": {}, "labels": {}, "dry_run": True}
    assert SubmitRequest.model_validate(BASE | spelled).digest() == plain.digest()
    changes = [{"args": ["a"]}, {"env": {"A": "1"}}, {"env": {"A": "2"}}, {"timeouts": {"run": 1}}, {"secrets": ["A"]}]
    changes += [{"resources": {"nodes": 2}}, {"lease": 5}, {"priority": 1}, {"branch": "b"}]
    assert len({SubmitRequest.model_validate(BASE | change).digest() for change in changes} | {plain.digest()}) == 10
    ordered = [
        SubmitRequest.model_validate(BASE | {"env": env}) for env in ({"A": "1", "B": "2"}, {"B": "2", "A": "1"})
    ]
    assert ordered[0].digest() == ordered[1].digest()


def test_the_digest_of_a_stored_request_is_the_same_in_every_version():
    known = "3efc16bf110e45180da9c2cc14b11dcbe6448d64d10d307b4ff3bf91e5156d87"
    assert SubmitRequest.model_validate(REFERENCE).digest() == known
    assert SubmitRequest.model_validate(REFERENCE | {"preflight": None}).digest() == known
    assert SubmitRequest.model_validate(REFERENCE | {"preflight": {}}).digest() != known


@pytest.mark.parametrize(
    "bad", [{"paths": [""]}, {"paths": ["a\nb"]}, {"ports": [0]}, {"shm_mib": -1}, {"clock_skew": 0}, {"other": 1}]
)
def test_checks_that_cannot_be_asked_for(bad):
    with pytest.raises(ValidationError):
        SubmitRequest.model_validate(BASE | {"preflight": bad})
