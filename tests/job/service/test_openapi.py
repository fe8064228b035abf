"""The OpenAPI document: committed, true, and no request that fits it is answered with 5xx."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from corral.job.protocol.states import Status
from corral.job.service.app import openapi
from tests.job.service.running import running

SNAPSHOT = Path(__file__).parents[3] / "docs" / "openapi.json"


def test_the_committed_document_is_the_generated_one():
    assert json.loads(SNAPSHOT.read_text()) == json.loads(json.dumps(openapi())), (
        "run: corral serve --print-openapi > docs/openapi.json"
    )


def test_every_reference_in_it_leads_somewhere():
    document = openapi()
    text = json.dumps(document)
    names = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert names <= document["components"]["schemas"].keys()


def test_every_operation_tells_its_refusals_in_our_form():
    for path, operations in openapi()["paths"].items():
        for method, operation in operations.items():
            for status, answer in operation["responses"].items():
                if status.startswith("4") and status != "409" and method != "head":
                    schema = answer["content"]["application/json"]["schema"]
                    assert schema == {"$ref": "#/components/schemas/ErrorBody"}, (path, method, status)


def fuzz(tmp_path, examples: int) -> int:
    """Requests made of the document, to a live server with jobs in several states; the number that were sent."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings

    document = openapi()
    sent = 0
    with running(tmp_path / "data", keep_alive=0.05) as service:
        job_id = service.submit()
        service.run(job_id)
        service.lines(job_id, ["a"])
        service.end(job_id, Status.SUCCEEDED)
        schema = schemathesis.openapi.from_dict(document)
        for operation in schema.get_all_operations():

            @settings(
                max_examples=examples,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
                derandomize=True,
            )
            @given(case=operation.ok().as_strategy())
            def check(case):
                nonlocal sent
                if "{job_id}" in case.path and sent % 2:
                    case.path_parameters["job_id"] = job_id
                answer = case.call(base_url=service.url, timeout=20)
                sent += 1
                assert answer.status_code < 500, (case.method, case.formatted_path, answer.status_code, answer.text)

            check()
    return sent


@pytest.mark.parametrize("examples", [2, pytest.param(300, marks=pytest.mark.slow)])
def test_no_request_is_answered_with_5xx(tmp_path, examples):
    assert fuzz(tmp_path, examples) > 20
