"""What is sent for a case: its source, its words, its limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from corral.e2e.case import Case
from corral.e2e.read import Found
from corral.e2e.submission import ROLLOUTS, Places, request_of, source_of, with_metrics
from corral.errors import ConfigError

BASE: dict[str, Any] = {"name": "small", "summary": "s", "script": "run.sh"}


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    (tmp_path / "e2e").mkdir()
    for name in ("run.sh", "src/a.py", "src/b/c.py", "srcs/d.py", "README"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)

    def make(**changes: Any) -> Found:
        return Found(Case.model_validate({**BASE, **changes}), tmp_path / "e2e/small.yaml")

    return make


def test_paths_choose_files_and_folders_of_the_source(found):
    everything = source_of(found(), Places({})).listing.paths
    assert {"run.sh", "src/a.py", "src/b/c.py", "srcs/d.py", "README"} <= set(everything)
    chosen = source_of(found(paths=["run.sh", "src/"]), Places({})).listing.paths
    assert chosen == ["run.sh", "src/a.py", "src/b/c.py"]


def test_recorded_generations_go_along_without_their_manifest(found, tmp_path):
    recorded = tmp_path / "cache/rollouts"
    (recorded / "a/1").mkdir(parents=True)
    (recorded / "a/1/tokens").write_text("1")
    (recorded / ".corral-manifest.json").write_text("{}")
    case = found(env={"DUMP": "{rollouts}"}, rollouts={"steps": [1]})
    source = source_of(case, Places({}, recorded))
    assert source.listing.placed == {f"{ROLLOUTS}/a/1/tokens": recorded / "a/1/tokens"}
    assert request_of(case, "main", Places({}, recorded), source).env == {"DUMP": ROLLOUTS}
    assert request_of(case, "main", Places({}), source).env == {"DUMP": "{run_dir}/rollouts"}


def test_the_reference_is_the_same_command_with_what_parity_says(found, tmp_path):
    case = found(
        args=["x={data}"],
        env={"A": "1", "B": "{data}/b", "C": "${HOME}"},
        needs={"data": {"path": "/data"}},
        topology={"nodes": 2, "devices_per_node": 4, "kind": "cpu"},
        parity={"args": ["y={data}"], "env": {"A": "2"}, "devices_per_node": 2},
    )
    places = Places({"data": Path("/data")})
    source = source_of(case, places)
    main, reference = (request_of(case, role, places, source) for role in ("main", "reference"))
    assert (main.script, main.args) == ("run.sh", ["x=/data"])
    assert (reference.script, reference.args) == ("run.sh", ["x=/data", "y=/data"])
    assert main.env == {"A": "1", "B": "/data/b", "C": "${HOME}"}
    assert reference.env == {**main.env, "A": "2"}
    assert (reference.resources.nodes, reference.resources.accelerators_per_node) == (1, 2)
    assert reference.resources.kind == "cpu"
    assert (main.name_suffix, reference.name_suffix) == ("small", "small-reference")


def test_a_head_of_its_own_is_asked_for_where_the_case_says_so_and_for_the_reference_never(found):
    parity = {"args": []}
    for head, layout in (("shared", None), ("separate", "separate")):
        case = found(topology={"nodes": 2, "head": head}, parity=parity)
        source = source_of(case, Places({}))
        main, reference = (request_of(case, role, Places({}), source) for role in ("main", "reference"))
        assert (main.layout.head if main.layout else None) == layout
        assert reference.layout is None


def test_a_long_name_stays_a_name(found):
    case = found(name="a" * 52 + ".b-c", parity={"args": []})
    source = source_of(case, Places({}))
    assert request_of(case, "reference", Places({}), source).name_suffix == "a" * 52 + ".-reference"


def test_what_no_service_takes_is_said_in_one_line(found):
    case = found(env={"LD_PRELOAD": "x"})
    with pytest.raises(ConfigError, match="case small: env LD_PRELOAD is refused"):
        request_of(case, "main", Places({}), source_of(case, Places({})))


@pytest.mark.parametrize("text", ["loss", "=1", "loss=high", "loss=nan", "loss=-inf"])
def test_an_expectation_on_the_command_line_is_a_number(found, text):
    assert with_metrics(found(), ["a=b=2", "c=1e-3"]).case.expect.metrics.within == {"a=b": [2, 2], "c": [1e-3, 1e-3]}
    with pytest.raises(ConfigError, match="expected NAME=NUMBER"):
        with_metrics(found(), [text])
