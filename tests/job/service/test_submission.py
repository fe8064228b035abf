"""From a request to a command: pure, so asked directly."""

from __future__ import annotations

from pathlib import Path

import pytest

from corral.job.protocol.submit import SubmitRequest
from corral.job.service.errors import Refusal
from corral.job.service.settings import Profile, Settings
from corral.job.service.submission import check_script, resolve_command, with_defaults

DIGEST = "0" * 64
SETTINGS = Settings(
    Path("/data"),
    source_roots={"/verl": Path("/srv/verl"), "/verl/extra": Path("/srv/extra")},
    profile=Profile(bootstraps=("bootstrap.sh",)),
)


def resolved(**fields):
    return resolve_command(SubmitRequest.model_validate(fields), SETTINGS)


@pytest.mark.parametrize(
    ("fields", "command", "cwd", "script"),
    [
        ({"script": "a/b.sh", "args": ["x"], "bundle": DIGEST}, ["bash", "a/b.sh", "x"], "source", "a/b.sh"),
        ({"script": "a.py", "bundle": DIGEST}, ["python", "a.py"], "source", "a.py"),
        ({"script": "-c", "args": ["id"], "bundle": DIGEST}, ["bash", "./-c", "id"], "source", "-c"),
        (
            {"command": ["python", "-m", "x"], "args": ["y"], "bundle": DIGEST},
            ["python", "-m", "x", "y"],
            "source",
            None,
        ),
        ({"script": "/verl/t/r.sh"}, ["bash", "/srv/verl/t/r.sh"], "/srv/verl", "/srv/verl/t/r.sh"),
        ({"script": "/verl/extra/r.sh"}, ["bash", "/srv/extra/r.sh"], "/srv/extra", "/srv/extra/r.sh"),
        (
            {"script": "/anywhere/bootstrap.sh", "args": ["--script-path", "/verl/r.sh", "a", "b"]},
            ["bash", "/srv/verl/r.sh", "a", "b"],
            "/srv/verl",
            "/srv/verl/r.sh",
        ),
        (
            {"script": "/bootstrap.sh", "args": ["a", "--script-path=/verl/r.sh", "b=c d"]},
            ["bash", "/srv/verl/r.sh", "a", "b=c d"],
            "/srv/verl",
            "/srv/verl/r.sh",
        ),
    ],
)
def test_what_is_run(fields, command, cwd, script):
    found = resolved(**fields)
    assert (found.command, found.cwd, found.script) == (command, cwd, script)


@pytest.mark.parametrize(
    "fields",
    [
        {"script": "/verl"},
        {"script": "/verlx/r.sh"},
        {"script": "/etc/passwd"},
        {"script": "/x/bootstrap.sh"},
        {"script": "/x/bootstrap.sh", "args": ["--script-path"]},
        {"script": "/x/bootstrap.sh", "args": ["--script-path", "run.sh"]},
        {"script": "/x/bootstrap.sh", "args": ["--script-path", "/verl/a\\b"]},
        {"script": "/x/bootstrap.sh", "args": ["--script-path", "/etc/passwd"]},
        {"script": "/x/bootstrap.sh", "args": ["--script-path", "/verl/../../etc/passwd"]},
    ],
)
def test_what_is_not_run(fields):
    with pytest.raises(Refusal) as refused:
        resolved(**fields)
    assert refused.value.status == 422


@pytest.mark.parametrize(
    ("fields", "nodes", "devices", "kind"),
    [
        ({}, 1, 4, "npu"),
        ({"worker_replicas": 2}, 2, 4, "npu"),
        ({"resources": {"nodes": 3}}, 3, 4, "npu"),
        ({"resources": {"accelerators_per_node": 2}, "worker_replicas": 5}, 5, 2, "npu"),
        ({"resources": {"nodes": 2, "accelerators_per_node": 1, "kind": "cpu"}, "worker_replicas": 2}, 2, 1, "cpu"),
    ],
)
def test_resources_are_spelled_out(fields, nodes, devices, kind):
    request = SubmitRequest.model_validate({"script": "a", "bundle": DIGEST, **fields})
    full = with_defaults(request, Profile(devices_per_node=4, kind="npu"))
    assert (full.resources.nodes, full.resources.accelerators_per_node, full.resources.kind) == (nodes, devices, kind)


def test_two_ways_to_say_the_same_have_one_digest():
    base = {"script": "a", "bundle": DIGEST}
    old = with_defaults(SubmitRequest.model_validate({**base, "worker_replicas": 2}), Profile())
    new = with_defaults(SubmitRequest.model_validate({**base, "resources": {"nodes": 2}}), Profile())
    assert old.digest() == new.digest()


def test_a_link_out_of_a_source_root_is_refused(tmp_path):
    root, secret = tmp_path / "root", tmp_path / "secret.sh"
    root.mkdir()
    secret.write_text("")
    (root / "link.sh").symlink_to(secret)
    (root / "folder.sh").mkdir()
    settings = Settings(tmp_path, source_roots={"/verl": root})
    for name, said in [("link.sh", "leads out"), ("folder.sh", "does not exist"), ("gone.sh", "does not exist")]:
        found = resolve_command(SubmitRequest(script=f"/verl/{name}"), settings)
        with pytest.raises(Refusal, match=said):
            check_script(found, None)
