"""Case files as their authors write them: what is read, and the one line that every mistake becomes."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from corral.e2e import read
from corral.e2e.case import Case
from corral.e2e.document import read_document
from corral.e2e.placeholders import fill, names_in
from corral.e2e.read import SHIPPED, Found, all_cases, case_files, find_cases, project_root, read_cases
from corral.e2e.schema import schema
from corral.errors import ConfigError
from tests.test_cli import corral

DOCS = Path(__file__).parents[2] / "docs"
MINIMAL = "name: mine\nsummary: what it shows\nscript: train.sh\n"


def written(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(text)
    return file


def refused(folder: Path, text: str) -> str:
    """The whole message, without the place of the file."""
    file = written(folder, text)
    with pytest.raises(ConfigError) as raised:
        read_cases(file)
    assert "\n" not in str(raised.value)
    return str(raised.value).replace(str(file), "FILE")


# What is read --------------------------------------------------------------------------------------------------------


def test_a_small_file_and_what_is_taken_when_nothing_is_said(tmp_path):
    (case,) = read_cases(written(tmp_path, MINIMAL))
    assert (case.name, case.tiers, case.source, case.paths) == ("mine", ["pr"], ".", [])
    assert (case.topology.nodes, case.topology.devices_per_node, case.topology.world) == (1, 1, 1)
    assert (case.expect.status, case.expect.exit_code, case.parity, case.rollouts) == ("SUCCEEDED", None, None, None)
    assert (case.deadlines.idle, case.deadlines.hang) == (None, None)


@pytest.mark.parametrize("text", ["1e-9", "1.0e-9", "1E-9", "1.e-9", "+1e-9", "0.000000001"])
def test_small_numbers_as_people_write_them(tmp_path, text):
    (case,) = read_cases(written(tmp_path, f"{MINIMAL}args: ['lr=1e-9']\nparity: {{args: [], rtol: {text}}}"))
    assert case.parity is not None
    assert case.parity.rtol == 1e-9


def test_all_that_comes_with_corral_is_read_and_unique():
    names = [found.case.name for found in all_cases(Path("/none"))]
    assert sorted(names) == names
    assert set(names) >= {"hang-detection", "one-node-eight", "smollm2-gsm8k", "two-node-grpo-sp", "two-node-ppo"}
    assert all(found.shipped and (project_root(found) / found.case.source).is_dir() for found in all_cases())


# Mistakes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "case FILE: expected a mapping of keys such as name, found list"),
        ("", "case FILE: expected a mapping of keys such as name, found NoneType"),
        ("7: seven", "case FILE: key 7 is no text; quote it"),
        ("summary: s\nscript: t.sh", "case FILE: name is missing"),
        ("name: mine\nsummary: s", "case FILE: it: give either script or command"),
        (MINIMAL + "command: [a]", "case FILE: it: give either script or command"),
        (MINIMAL + "deadline: 3", "case FILE, line 4: unknown key 'deadline'; the nearest is 'deadlines'"),
        (MINIMAL + "matrx: {}", "case FILE, line 4: unknown key 'matrx'; the nearest is 'matrix'"),
        (
            MINIMAL + "topology:\n  devices_per_node: 4\n  node: 2",
            "case FILE, line 6: topology: unknown key 'node'; the nearest is 'nodes'",
        ),
        (
            MINIMAL + "topology: {zzz: 2}",
            "case FILE, line 4: topology: unknown key 'zzz'; known are nodes, devices_per_node, kind, head",
        ),
        (
            MINIMAL + 'topology:\n  nodes: "4"',
            "case FILE, line 5: topology.nodes: should be a valid integer, found str '4'",
        ),
        (
            MINIMAL + "topology: {nodes: 0}",
            "case FILE, line 4: topology.nodes: should be greater than or equal to 1, found int '0'",
        ),
        (
            MINIMAL + "topology: {kind: tpu}",
            "case FILE, line 4: topology.kind: should be 'auto', 'cpu', 'gpu' or 'npu', found str 'tpu'",
        ),
        (
            MINIMAL + "args:\n- a=1\n- 2",
            "case FILE, line 6: args.1: should be a valid string, found int '2'",
        ),
        (MINIMAL + "env: {A: 1}", "case FILE, line 4: env.A: should be a valid string, found int '1'"),
        (
            MINIMAL + "needs: {model: {mke: [a]}}",
            "case FILE, line 4: needs.model: unknown key 'mke'; the nearest is 'make'",
        ),
        (MINIMAL + "needs: {model: {}}", "case FILE, line 4: needs.model: give either make or path"),
        (
            MINIMAL + "needs: {model: {make: [a]}}",
            "case FILE, line 4: needs.model: make has to say where to write, with {out}",
        ),
        (
            MINIMAL + "needs: {rollouts: {path: /a}}",
            "case FILE: it: needs: 'rollouts' is the name of something else; choose another",
        ),
        (
            MINIMAL + "expect:\n  metrics:\n    within: {loss: [2, 1]}",
            "case FILE, line 5: expect.metrics: within loss: [2, 1] has to be [lowest, highest]",
        ),
        (
            MINIMAL + "expect:\n  metrics:\n    trend: {loss: up}",
            "case FILE, line 6: expect.metrics.trend.loss: should be 'rises' or 'falls', found str 'up'",
        ),
        (
            MINIMAL + "expect: {forbidden: ['(']}",
            "case FILE, line 4: expect.forbidden.0: '(' is not a regular expression: "
            "missing ), unterminated subpattern at position 0, found str '('",
        ),
        (MINIMAL + "script: other.sh", "case FILE, line 4: script is given twice"),
        (MINIMAL + "env:\n  A: b\n  C: d\n  A: e", "case FILE, line 7: env.A is given twice"),
        (MINIMAL + "matrix: [1]", "case FILE, line 4: matrix: has to be name: [value, ...], such as sp: [1, 2]"),
        (MINIMAL + "matrix: {sp: 2}", "case FILE, line 4: matrix: sp has to be a list of values, such as [1, 2]"),
        (MINIMAL + "matrix: {sp: []}", "case FILE, line 4: matrix: sp has to be a list of values, such as [1, 2]"),
        (
            MINIMAL + "matrix: {sp: [[1]]}",
            "case FILE, line 4: matrix: sp has to be a list of texts, numbers or true and false",
        ),
        (
            MINIMAL + "matrix: {S-P: [1]}",
            "case FILE, line 4: matrix: 'S-P' is no name; use small letters, digits and _",
        ),
        (
            MINIMAL + "matrix: {out: [1]}",
            "case FILE, line 4: matrix: {out} stands for something else already; choose another name",
        ),
        (
            MINIMAL + "matrix: {sp: [1, 1]}",
            "case FILE: matrix: two combinations are called 'mine-sp-1'; tell them apart in name",
        ),
    ],
)
def test_a_mistake_is_one_line_with_its_place(tmp_path, text, said):
    assert refused(tmp_path, text) == said


BOMB = "".join(f"{'bcdefghi'[k]}: &{'bcdefghi'[k]} [{', '.join(['*' + 'abcdefgh'[k]] * 10)}]\n" for k in range(8))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"a: &a [x]\n{BOMB}", "FILE has over 20000 keys and items, with what its aliases repeat"),
        ("#" * (2 << 20), "FILE has over 1 MiB; a case is a page of text"),
        (f"topology: {{nodes: {'9' * 5000}}}", "FILE is not YAML: Exceeds the limit"),
        ("env: {A: 2020-99-99}", "FILE is not YAML: month must be in 1..12"),
        ('source: "a\\0b"', "line 4: source holds a NUL byte"),
        ("expect: {forbidden: ['a{99999999999}']}", "is not a regular expression: the repetition number is too large"),
        (f"expect: {{forbidden: ['{'(' * 5000}{')' * 5000}']}}", "is not a regular expression: maximum recursion"),
        ("expect: {plan: {a: 2020-01-01}}", "expect.plan.a: input was not a valid JSON value"),
        ("parity: {args: [], rtol: .inf}", "parity.rtol: should be a finite number"),
        ("parity: {args: [], ignore: ['']}", "parity.ignore.0: string should have at least 1 character"),
        ("expect: {metrics: {baseline: {a: {atol: .inf}}}}", "should be a finite number"),
        (f"matrix: {{a: {list(range(17))}, b: {list(range(16))}}}", "matrix: 272 combinations, the limit is 256"),
    ],
)
def test_what_would_hang_crash_or_prove_nothing(tmp_path, text, said):
    assert said in refused(tmp_path, MINIMAL + text)


def test_what_is_no_yaml(tmp_path):
    assert refused(tmp_path, "a: [1").startswith("case FILE is not YAML: while parsing a flow sequence")
    assert refused(tmp_path, "a: !!python/object:os.system {}").startswith("case FILE is not YAML: could not determine")
    assert refused(tmp_path, "[" * 700).startswith("case FILE is not YAML: ")
    (tmp_path / "mine.yaml").write_bytes(b"name: \xff")
    with pytest.raises(ConfigError, match=r"mine\.yaml is not UTF-8: byte 6"):
        read_cases(tmp_path / "mine.yaml")
    with pytest.raises(ConfigError, match=r"cannot read case .*: Is a directory"):
        read_cases(tmp_path)


@pytest.mark.parametrize("name", ["", "Mine", "my case", "-mine", "a" * 64, "a/b", "../up"])
def test_a_name_is_part_of_paths_and_labels(tmp_path, name):
    assert "name: " in refused(tmp_path, MINIMAL.replace("name: mine", f"name: {json.dumps(name)}"))


# The matrix ----------------------------------------------------------------------------------------------------------

MATRIX = """name: sp
summary: sequence parallel {sp} with {algo}
matrix: {sp: [1, 2], algo: [grpo, gae], fast: [true]}
topology: {nodes: 1, devices_per_node: "{sp}"}
script: train.sh
args: ["sp={sp}", "algo={algo}", "fast={fast}", "other={other}"]
expect:
  plan: {"actor.sp": "{sp}", fast: "{fast}"}
"""


def test_one_case_for_each_combination_and_numbers_stay_numbers(tmp_path):
    cases = read_cases(written(tmp_path, MATRIX))
    assert [case.name for case in cases] == [
        f"sp-sp-{sp}-algo-{algo}-fast-true" for sp in (1, 2) for algo in ("grpo", "gae")
    ]
    last = cases[-1]
    assert last.topology.devices_per_node == 2
    assert last.expect.plan == {"actor.sp": 2, "fast": True}
    assert last.args == ["sp=2", "algo=gae", "fast=true", "other={other}"]
    assert last.summary == "sequence parallel 2 with gae"


def test_a_name_may_say_itself_where_the_values_go(tmp_path):
    text = MATRIX.replace("name: sp", "name: '{algo}-with-sp{sp}'")
    assert [case.name for case in read_cases(written(tmp_path, text))][:2] == [
        "grpo-with-sp1-fast-true",
        "gae-with-sp1-fast-true",
    ]


def test_values_that_no_name_can_hold_are_written_otherwise(tmp_path):
    text = MINIMAL + "matrix: {lr: [1.0e-5, 0.5], base_model: [Qwen/Qwen3]}"
    names = [case.name for case in read_cases(written(tmp_path, text))]
    assert names == ["mine-lr-1e-05-base-model-qwen-qwen3", "mine-lr-0.5-base-model-qwen-qwen3"]


def test_a_matrix_may_be_chosen_whole_or_in_part(tmp_path):
    written(tmp_path / "e2e", MATRIX, "split.yaml")
    project = tmp_path / "e2e"
    assert len(find_cases(["split"], project=project)) == 4
    assert [found.case.name for found in find_cases(["sp-sp-1-algo-gae-fast-true"], project=project)] == [
        "sp-sp-1-algo-gae-fast-true"
    ]


# Choosing ------------------------------------------------------------------------------------------------------------


def test_names_files_and_tiers(tmp_path):
    file = written(tmp_path, MINIMAL + "tiers: [weekly, nightly]")
    assert [found.case.name for found in find_cases([str(file)])] == ["mine"]
    assert [found.case.name for found in find_cases([], "weekly", tmp_path)] == ["mine"]
    assert {"mine", "two-node-ppo"} <= {found.case.name for found in find_cases([], "nightly", tmp_path)}
    assert len(find_cases(["two-node-ppo", "two-node-ppo"])) == 1
    with pytest.raises(ConfigError, match="none of these cases has the tier 'pr'; there are nightly, weekly"):
        find_cases([str(file)], "pr")
    with pytest.raises(ConfigError, match="no case has the tier 'yearly'; there are nightly, pr, weekly"):
        find_cases([], "yearly", tmp_path)
    with pytest.raises(ConfigError, match="no case is called 'two-nod-ppo'; the nearest is 'two-node-ppo'; "):
        find_cases(["two-nod-ppo"])


@pytest.mark.parametrize("names", [[], ["two-node-ppo"], ["mine.yaml"]])
def test_a_working_folder_that_is_gone(tmp_path, monkeypatch, names):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigError, match="the working folder does not exist any more"):
        find_cases(names)


def test_two_cases_of_one_name(tmp_path):
    written(tmp_path, MINIMAL, "a.yaml")
    written(tmp_path, MINIMAL, "b.yaml")
    with pytest.raises(ConfigError, match=r"b\.yaml: case 'mine' is also in .*a\.yaml; rename one"):
        all_cases(tmp_path)


def test_where_the_source_of_a_case_is_looked_for(tmp_path, monkeypatch):
    file = written(tmp_path / "project/e2e", MINIMAL)
    found = Found(read_cases(file)[0], file)
    assert project_root(found) == tmp_path / "project"
    assert project_root(Found(found.case, tmp_path / "other/mine.yaml")) == tmp_path / "other"
    (tmp_path / "project/.git").write_text("gitdir: elsewhere")  # as in a linked work tree
    assert project_root(found) == tmp_path / "project"
    shipped = find_cases(["two-node-ppo"])[0]
    assert project_root(shipped) == SHIPPED.parents[2]


def test_the_source_of_an_installed_corral(tmp_path, monkeypatch):
    """As pip lays it out: the package in site-packages, the examples below share/corral."""
    cases = tmp_path / "lib/python3.11/site-packages/corral/e2e/cases"
    file = written(cases, MINIMAL)
    monkeypatch.setattr(read, "SHIPPED", cases)
    (tmp_path / "share/corral/examples").mkdir(parents=True)
    monkeypatch.setattr(sysconfig, "get_path", lambda name, *scheme: str(tmp_path / ("user" if scheme else "")))
    found = Found(read_cases(file)[0], file)
    assert found.shipped
    assert project_root(found) == tmp_path / "share/corral"
    (tmp_path / "share").rename(tmp_path / "moved")
    (tmp_path / "user/share/corral").mkdir(parents=True)
    assert project_root(found) == tmp_path / "user/share/corral"


# Placeholders --------------------------------------------------------------------------------------------------------


def test_placeholders():
    values = {"model": "/m", "run_dir": "/r"}
    assert fill("a={model} b={run_dir}/x c={other} d=${model} e={Model} {}", values) == (
        "a=/m b=/r/x c={other} d=${model} e={Model} {}"
    )
    assert names_in('{a} ${b} {"c": 1} {c} {env.X} {a}') == ["a", "c", "a"]


@given(st.text(alphabet="{}$abc_ ", max_size=20))
def test_a_text_without_placeholders_stays_as_it_is(text):
    assert fill(text, {}) == text
    if not names_in(text):
        assert fill(text, dict.fromkeys("abc", "X")) == text


# The schema ----------------------------------------------------------------------------------------------------------


def documents() -> list[Any]:
    found = [read_document(file).content for file in case_files(Path("/none"))]
    return [*found, yaml.safe_load(MATRIX)]


def test_the_committed_schema_is_current():
    done = corral("e2e", "schema")
    assert done.returncode == 0, done.stderr
    assert (DOCS / "e2e-case.schema.json").read_text() == done.stdout, "corral e2e schema > docs/e2e-case.schema.json"


def test_shipped_cases_and_a_matrix_fit_the_schema():
    jsonschema.Draft202012Validator.check_schema(schema())
    for document in documents():
        jsonschema.validate(document, schema(), cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    "change",
    [
        {"topology": {"nodes": "2"}},
        {"topology": {"nodes": 0}},
        {"topology": {"node": 2}},
        {"tiers": []},
        {"needs": {"Model": {"path": "/a"}}},
        {"env": {"A": 1}},
        {"matrix": {"sp": []}},
        {"expect": {"metrics": {"within": {"a": [1]}}}},
        {"expect": {"status": "DONE"}},
        {"retries": 9},
        {"unknown": 1},
    ],
)
def test_the_schema_and_the_reader_refuse_the_same(tmp_path, change):
    document = {**yaml.safe_load(MINIMAL), **change}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema(), cls=jsonschema.Draft202012Validator)
    refused(tmp_path, yaml.safe_dump(document))


def test_a_case_comes_back_from_json():
    """As a run folder keeps it."""
    for found in all_cases(Path("/none")):
        assert Case.model_validate_json(found.case.model_dump_json()) == found.case
