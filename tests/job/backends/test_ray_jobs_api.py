"""The client of Ray's Jobs API against a stand-in for the dashboard that answers as Ray does, odd answers included."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from corral.errors import ConfigError, InfraError
from corral.job.backends.ray_jobs import api as ray_api
from corral.job.backends.ray_jobs.api import JobsApi, RayNode, Submission
from corral.job.backends.ray_jobs.backend import token_of
from tests.job.backends.ray_jobs.dashboard import Close, Dashboard, Job, node

T = TypeVar("T")
OURS = {"corral_service": "me"}
ASKED = Submission("rj-0123456789ab-a1", "python3 -m x", {"A": "1"}, OURS)
NAME = ASKED.submission_id


def with_api(what: Callable[[JobsApi, Dashboard], Awaitable[T]], dashboard: Dashboard, **options: object) -> T:
    async def life() -> T:
        async with dashboard:
            api = JobsApi(dashboard.address, **options)
            try:
                return await what(api, dashboard)
            finally:
                await api.close()

    return asyncio.run(life())


def test_a_job_is_submitted_once():
    async def life(api, dashboard):
        await asyncio.gather(*(api.submit(ASKED) for _ in range(3)))
        await api.submit(ASKED)
        job = dashboard.jobs[NAME]
        assert (job.entrypoint, job.env, job.metadata) == ("python3 -m x", {"A": "1"}, OURS)
        assert len(dashboard.jobs) == 1

    with_api(life, Dashboard())


def test_an_id_that_came_up_meanwhile_is_adopted():
    """Ray answers the second of two submissions with a 500 around an inner 400."""

    async def life(api, dashboard):
        await api.submit(ASKED)
        assert dashboard.count("POST /api/jobs/") == 1

    dashboard = Dashboard(jobs={NAME: Job(metadata=OURS)}, hidden={NAME})
    with_api(life, dashboard)
    assert list(dashboard.jobs) == [NAME]


def test_the_job_of_another_service_is_not_ours():
    with pytest.raises(ConfigError, match="this service did not start"):
        with_api(lambda api, _: api.submit(ASKED), Dashboard(jobs={NAME: Job(metadata={"corral_service": "other"})}))


ANSWERS = [
    (
        (400, "Traceback\n  x\nTypeError: metadata values must be strings\n"),
        ConfigError,
        "refuses the job: TypeError: m",
    ),
    ((500, "Traceback\n  x\nRuntimeError: No available agent to submit job\n"), InfraError, "No available agent"),
    ((503, "upstream connect error"), InfraError, "answers 503: upstream connect error"),
    ((401, "Unauthorized"), InfraError, r"asks for a token.*ray\.token_file"),
    ((403, "Forbidden"), InfraError, r"asks for a token.*ray\.token_file"),
]


@pytest.mark.parametrize(("answer", "error", "said"), ANSWERS)
def test_what_a_refused_submission_means(answer, error, said):
    with pytest.raises(error, match=said):
        with_api(lambda api, _: api.submit(ASKED), Dashboard(answers=[("POST .*", answer)]))


BAD = [
    (404, "<html>default backend - 404</html>"),
    (404, ""),
    (500, "Traceback\nException: GCS is away\n"),
    (502, "Bad Gateway"),
    (200, "<html>please log in</html>"),
    (200, '{"submission_id": null}'),
    None,
]


@pytest.mark.parametrize("answer", BAD, ids=str)
def test_an_answer_that_is_not_ray_s_says_nothing_about_the_job(answer, monkeypatch):
    """A 404 of a proxy in front of a dashboard that died would else be the end of a job that is well."""
    monkeypatch.setattr(ray_api, "ANSWER", 0.3)
    with pytest.raises(InfraError, match=r"127\.0\.0\.1"):
        with_api(lambda api, _: api.get(NAME), Dashboard(jobs={NAME: Job()}, answers=[("GET .*", answer)]))


def test_only_ray_s_own_word_makes_a_job_unknown():
    assert with_api(lambda api, _: api.get(NAME), Dashboard()) is None


def test_a_dashboard_that_is_not_there():
    with pytest.raises(InfraError, match="does not answer"):
        asyncio.run(JobsApi("http://127.0.0.1:9").get(NAME))


def test_stop_and_delete_are_idempotent():
    async def life(api, dashboard):
        with pytest.raises(InfraError, match="non-terminal"):
            await api.delete(NAME)
        for _ in range(2):
            await api.stop(NAME)
        assert (await api.get(NAME)).status == "STOPPED"
        for _ in range(2):
            await api.delete(NAME)
            await api.stop(NAME)
        assert await api.get(NAME) is None

    with_api(life, Dashboard(jobs={NAME: Job()}))


def test_what_a_job_and_its_nodes_are():
    killed = Job("FAILED", "it died", "JOB_ENTRYPOINT_COMMAND_ERROR", -9, OURS)

    async def life(api, dashboard):
        (job,) = await api.jobs()  # the driver that nobody submitted is not among them
        assert job == await api.get(NAME)
        assert (job.status, job.exit_code, job.error_type, job.over) == ("FAILED", 137, killed.error_type, True)
        assert (job.start, job.end, job.metadata) == (1000.0, 2000.0, OURS)
        assert await api.nodes() == [
            RayNode("id-h", "h", True, {"memory": 1e9, "node:h": 1.0, "CPU": 2.0}, "10.0.0.1", True),
            RayNode("id-w", "w", False, {"memory": 1e9, "node:w": 1.0, "NPU": 4.0}, "10.0.0.1"),
        ]
        assert (await api.version())["session_name"] == "session_1"

    nodes = [node("h", head=True, CPU=2), node("w", alive=False, NPU=4)]
    with_api(life, Dashboard(jobs={NAME: killed}, nodes=nodes))


def test_the_token_goes_both_ways_and_is_read_anew(tmp_path: Path):
    file = tmp_path / "token"
    file.write_text("first\n")

    async def life(api, dashboard):
        assert await api.get(NAME) is not None
        assert "".join([piece async for piece in api.tail(NAME)]) == "a line\n"
        dashboard.token = "second"
        with pytest.raises(InfraError, match="asks for a token, or for another one"):
            await api.get(NAME)
        file.write_text("second\n")
        assert await api.logs(NAME) == "a line\n"
        sent = dashboard.headers[-1]
        assert sent["authorization"] == sent["x-ray-authorization"] == "Bearer second"
        file.unlink()
        with pytest.raises(InfraError, match=r"ray\.token_file: .* cannot be read"):
            await api.get(NAME)

    done = Job("SUCCEEDED", exit_code=0, log="a line\n")
    with_api(life, Dashboard(jobs={NAME: done}, token="first"), token=token_of(file, "ray.token_file"))
    with pytest.raises(ConfigError, match="cannot be read"):
        token_of(file, "ray.token_file")
    file.write_text("two\nlines\n")
    with pytest.raises(ConfigError, match="does not hold a token"):
        token_of(file, "ray.token_file")


def test_a_proxy_keeps_its_own_authorization():
    async def life(api, dashboard):
        await api.get(NAME)
        sent = dashboard.headers[-1]
        assert (sent["authorization"], sent["x-ray-authorization"]) == ("Bearer of-the-proxy", "Bearer of-ray")

    with_api(life, Dashboard(), token="of-ray", headers={"Authorization": "Bearer of-the-proxy"})


ENDS = [Close(7, 1000), Close(7, None), Close(7, 1009), Close(7, 1011), Close(0, 1000), Close(0, None)]


@pytest.mark.parametrize("close", ENDS, ids=str)
def test_however_a_socket_ends_it_just_ends(close):
    async def life(api, dashboard):
        return "".join([piece async for piece in api.tail(NAME)])

    job = Job("SUCCEEDED", exit_code=0, log="äöü and some more\n")
    assert with_api(life, Dashboard(jobs={NAME: job}, closes=[close], piece=3)) == job.log[: close.after]


def test_a_socket_that_cannot_be_had_just_ends():
    async def life(api, dashboard):
        unknown = [piece async for piece in api.tail("rj-00000000000a-a1")]
        dashboard.deaf = True
        return [*unknown, *[piece async for piece in api.tail(NAME)]]

    assert with_api(life, Dashboard(jobs={NAME: Job(log="said")})) == []


def test_a_log_that_is_too_long_for_one_answer(monkeypatch):
    monkeypatch.setattr(ray_api, "LARGEST_LOG", 1 << 16)
    with pytest.raises(InfraError, match="has more than"):
        with_api(lambda api, _: api.logs(NAME), Dashboard(jobs={NAME: Job(log="x" * (1 << 17))}))
