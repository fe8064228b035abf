"""What a profile gives to a job: its environment, kind and deadlines, on every backend; the job's own words win."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from corral.cli import build_parser
from corral.errors import ConfigError
from corral.job.protocol.states import JobState
from corral.job.protocol.submit import SubmitRequest
from corral.job.service.errors import Refusal
from corral.job.service.launch import agent_spec
from corral.job.service.options import settings_of
from corral.job.service.settings import Kubernetes, Nodes, Profile, Settings
from corral.job.service.submission import check_secrets, node_profile, with_defaults
from tests.job.core.cases import job
from tests.job.service.running import running

DIGEST = "0" * 64
LAB = """
extends: cpu
env: {HF_HOME: /models, OMP_NUM_THREADS: "2", RAY_worker_niceness: "5"}
timeouts: {start: 50, hang: 70}
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "lab.yaml").write_text(LAB)
    return Settings(tmp_path / "data", nodes=Nodes(profiles_dir=tmp_path))


def request(**fields: object) -> SubmitRequest:
    return SubmitRequest.model_validate({"script": "a.sh", "bundle": DIGEST, **fields})


def spelled(asked: SubmitRequest, settings: Settings) -> SubmitRequest:
    return with_defaults(asked, settings.profile, node_profile(asked, settings))


def spec(settings: Settings, **fields: object):
    asked = spelled(request(**fields), settings)
    running_job = replace(job(JobState.PROVISIONING), request=asked)
    return agent_spec(running_job, settings, "token", None)


@pytest.mark.parametrize("backend", ["local", "ray", "kuberay"])
def test_the_jobs_environment_wins_over_the_profiles(settings, backend):
    settings = replace(settings, backend=backend)
    found = spec(settings, profile="lab", env={"OMP_NUM_THREADS": "7", "B": "c"})
    assert found.env == {"HF_HOME": "/models", "OMP_NUM_THREADS": "7", "RAY_worker_niceness": "5", "B": "c"}
    assert found.kind == "cpu"


def test_without_a_name_only_backends_that_make_nodes_have_a_profile(settings):
    assert spec(settings, env={"B": "c"}).env == {"B": "c"}
    assert spec(settings, env={"B": "c"}).kind == "auto"
    kuberay = replace(settings, backend="kuberay", kubernetes=Kubernetes(profile="lab"))
    assert spec(kuberay).env["HF_HOME"] == "/models"
    assert spelled(request(), kuberay).profile == "lab", "later settings change nothing of this job"


def test_deadlines_hold_where_the_request_has_none(settings):
    found = spelled(request(profile="lab", timeouts={"hang": None, "run": 9}), settings).timeouts
    assert (found.start, found.run, found.hang, found.idle) == (50, 9, None, None)
    assert found.queue == request().timeouts.queue
    usual = spelled(request(), settings).timeouts
    assert usual == request().timeouts


@pytest.mark.parametrize(
    ("fields", "usual", "kind"),
    [
        ({"profile": "gpu"}, "auto", "gpu"),
        ({"profile": "gpu"}, "npu", "gpu"),  # a profile that is named says more than the service's default
        ({"profile": "gpu", "resources": {"kind": "gpu"}}, "auto", "gpu"),
        ({}, "gpu", "gpu"),
        ({"resources": {"kind": "npu"}}, "gpu", "npu"),
    ],
)
def test_the_kind_of_devices(settings, fields, usual, kind):
    settings = replace(settings, profile=Profile(kind=usual))
    assert spelled(request(**fields), settings).resources.kind == kind


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"profile": "nope"}, "'nope' is not known here; there are ascend-a2, ascend-a3, cpu, gpu, lab"),
        ({"profile": "lab", "resources": {"kind": "npu"}}, "profile lab is of kind cpu, and the job asks for npu"),
    ],
)
def test_a_profile_that_does_not_fit_is_422(settings, fields, said):
    with pytest.raises(Refusal) as refused:
        spelled(request(**fields), settings)
    assert (refused.value.status, refused.value.line.count("\n")) == (422, 0)
    assert said in refused.value.line


def test_a_profile_that_goes_away_fails_the_job_and_not_the_service(settings, tmp_path):
    asked = spelled(request(profile="lab"), settings)
    (tmp_path / "lab.yaml").unlink()
    with pytest.raises(ConfigError, match="'lab' is not known here"):
        agent_spec(replace(job(JobState.PROVISIONING), request=asked), settings, "token", None)


def test_secrets_of_the_cluster_are_not_the_services(settings, tmp_path):
    (tmp_path / "OURS").write_text("x\n")
    where = replace(
        settings, backend="kuberay", secrets_dir=tmp_path, kubernetes=Kubernetes(secrets={"HF_TOKEN": "hf/token"})
    )
    check_secrets(["HF_TOKEN", "OURS"], where)
    assert spec(where, secrets=["HF_TOKEN", "OURS"]).secrets == {"OURS": "x"}
    with pytest.raises(Refusal, match="'OTHER' is not among those"):
        check_secrets(["OTHER"], where)
    with pytest.raises(Refusal, match="'HF_TOKEN' is not among those"):
        check_secrets(["HF_TOKEN"], replace(where, backend="local"))


def test_over_http(tmp_path):
    (tmp_path / "lab.yaml").write_text(LAB)
    with running(tmp_path / "data", nodes=Nodes(profiles_dir=tmp_path)) as service:
        body = {"script": "run.sh", "bundle": service.bundle(), "profile": "lab"}
        first = service.http.post("/api/v1/rayjobs", json=body, headers={"Idempotency-Key": "k"})
        again = service.http.post("/api/v1/rayjobs", json=body, headers={"Idempotency-Key": "k"})
        assert (first.status_code, again.status_code) == (201, 200)
        stored = service.store.get(first.json()["job_id"]).request
        assert (stored.profile, stored.resources.kind, stored.timeouts.start) == ("lab", "cpu", 50)
        answer = service.http.post("/api/v1/rayjobs", json=body | {"profile": "nope"})
        assert answer.status_code == 422
        assert "there are ascend-a2" in answer.json()["error"]


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        ("colour: red\n", [], "colour is no key of a profile"),
        ("extends: cpu\n", ["--backend", "kuberay"], None),
        (None, [], "profiles folder .* does not exist"),
    ],
)
def test_a_service_looks_at_its_profiles_when_it_starts(content, options, said, tmp_path):
    folder = tmp_path / "profiles"
    if content is not None:
        folder.mkdir()
        (folder / "lab.yaml").write_text(content)
    args = build_parser().parse_args(["serve", "--data-dir", str(tmp_path), "--profiles-dir", str(folder), *options])
    if said is None:
        assert settings_of(args).nodes.profiles_dir == folder
    else:
        with pytest.raises(ConfigError, match=said):
            settings_of(args)


def test_a_default_profile_that_is_none_keeps_a_service_from_starting(tmp_path):
    config = tmp_path / "service.yaml"
    config.write_text("backend: kuberay\nkubernetes: {profile: nope}\n")
    args = build_parser().parse_args(["serve", "--data-dir", str(tmp_path), "--config", str(config)])
    with pytest.raises(ConfigError, match="'nope' is not known here"):
        settings_of(args)
