"""`corral e2e run --env`: what a site adds to the variables of a case's jobs."""

from __future__ import annotations

import yaml

from corral.cli import main
from tests.e2e.small import Project


def test_variables_of_the_site_win_over_those_of_the_case(tmp_path, monkeypatch, capsys):
    project = Project(tmp_path / "project")
    parity = {"args": ["alone"], "env": {"P": "1"}}
    project.case("good", env={"A": "case", "B": "case"}, parity=parity)
    monkeypatch.chdir(project.root)
    given = ["--env", "A=site = x", "--env", "HCCL_SOCKET_IFNAME=eth1", "--env", "EMPTY="]
    assert main(["e2e", "run", "good", "--dry-run", *given]) == 0
    requests = list(yaml.safe_load_all(capsys.readouterr().out))
    assert len(requests) == 2
    for request in requests:
        assert (
            request["env"].items() >= {"A": "site = x", "B": "case", "HCCL_SOCKET_IFNAME": "eth1", "EMPTY": ""}.items()
        )
    assert requests[1]["env"]["P"] == "1"


def test_without_a_value_it_is_refused(tmp_path, monkeypatch, capsys):
    project = Project(tmp_path / "project")
    project.case("good")
    monkeypatch.chdir(project.root)
    assert main(["e2e", "run", "good", "--dry-run", "--env", "A"]) == 78
    assert "--env 'A' has no value" in capsys.readouterr().err
