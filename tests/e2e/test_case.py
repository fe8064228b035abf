from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml

from corral.e2e.case import case_names, find_case, read_case
from corral.errors import ConfigError
from tests.e2e.cases import DOCUMENT


def read(tmp_path: Path, change) -> object:
    document = copy.deepcopy(DOCUMENT)
    change(document)
    path = tmp_path / "case.yaml"
    path.write_text(yaml.safe_dump(document))
    return read_case(path)


def test_every_case_that_comes_with_corral_can_be_read():
    assert "two-node-ppo" in case_names()
    for name in case_names():
        assert find_case(name).name == name


def test_the_two_node_case_expects_what_the_reference_command_promises():
    case = find_case("two-node-ppo")
    assert (case.topology.nodes, case.topology.devices_per_node) == (2, 4)
    assert case.command == ("examples/run_qwen3_06b_ppo_multinode.sh",)
    assert case.expect.plan["topology.world"] == 8
    assert case.expect.plan["samples_per_step"] == 16
    assert case.expect.rank_logs


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(comand=["x"]), "unknown key 'comand'; the nearest known key is 'command'"),
        (lambda d: d["deadlines"].update(runs=3), "deadlines: unknown key 'runs'; the nearest known key is 'run'"),
        (lambda d: d["expect"].update(exitcode=0), "the nearest known key is 'exit_code'"),
        (lambda d: d["expect"]["metrics"].update(line=1), "the nearest known key is 'lines'"),
        (lambda d: d.update(caches={"data": {"make": ["x", "{out}"], "sed": 1}}), "caches: data: unknown key 'sed'"),
        (lambda d: d.update(caches={"data": {"make": ["x"]}}), "make has to say where to write, with {out}"),
        (lambda d: d.update(caches={"cache": {"make": ["{out}"]}}), "cannot name a cache"),
        (lambda d: d.pop("name"), "name is missing"),
        (lambda d: d.update(name="../up"), "it names a folder"),
        (lambda d: d.update(command=[]), "command is empty"),
        (lambda d: d.update(command="ls"), "command has to be a list of texts, found str 'ls'"),
        (lambda d: d.update(command=["ls", 3]), "command has to be a list of texts (quote them), found int '3'"),
        (lambda d: d.update(env={"A": True}), "env: A has to be text (quote it), found bool 'True'"),
        (lambda d: d.update(topology={"nodes": 0, "devices_per_node": 4}), "nodes has to be at least 1, found 0"),
        (
            lambda d: d.update(topology={"nodes": 2, "devices_per_node": "4"}),
            "devices_per_node has to be a whole number",
        ),
        (lambda d: d["deadlines"].update(run=0), "run has to be a positive number of seconds, found 0"),
        (lambda d: d["deadlines"].update(run=float("nan")), "run has to be a positive number of seconds"),
        (lambda d: d["expect"].update(rank_logs=True), "expect.rank_logs needs a topology"),
        (lambda d: d["expect"]["metrics"].update(within={"a": [2, 1]}), "a has to be [lowest, highest]"),
        (lambda d: d["expect"]["metrics"].update(within={"a": ["1e-3", 1]}), "a has to be [lowest, highest]"),
        (lambda d: d["expect"]["metrics"].update(within={"a": 1}), "a has to be [lowest, highest], found int '1'"),
        (lambda d: d.update(expect=[]), "expect has to be a mapping, found list"),
    ],
)
def test_a_mistake_in_a_case_is_one_line_that_names_the_place(tmp_path, change, said):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, change)
    message = str(caught.value)
    assert said in message
    assert "case.yaml" in message
    assert "\n" not in message


def test_a_file_that_is_no_case(tmp_path):
    with pytest.raises(ConfigError, match="cannot read case"):
        find_case(str(tmp_path / "absent.yaml"))
    (tmp_path / "broken.yaml").write_text("a: [1\nb: {")
    with pytest.raises(ConfigError, match="is not YAML"):
        find_case(str(tmp_path / "broken.yaml"))
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="expected a mapping"):
        find_case(str(tmp_path / "list.yaml"))
    with pytest.raises(ConfigError, match=r"no case is called 'two-node'; there are: .*two-node-ppo"):
        find_case("two-node")
