"""`corral e2e run` on small real jobs: what it says, how it exits, what it leaves."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from corral.cli import main
from corral.job.protocol.submit import SubmitRequest
from tests.e2e.small import Done, Project, failed, is_gone, read, serving, until, using


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A service that is there already."""
    with serving(tmp_path_factory.mktemp("service") / "data") as it:
        yield it


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


Inside = Callable[..., tuple[int, str, str]]


@pytest.fixture
def inside(project: Project, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Inside:
    """The same command in this process, for what starts nothing: exit code, stdout, stderr."""
    monkeypatch.chdir(project.root)
    monkeypatch.setenv("CORRAL_CACHE", str(project.root.parent / "cache"))
    for name in [name for name in os.environ if name.startswith("GITHUB_")]:
        monkeypatch.delenv(name)

    def call(command: str, *words: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(["e2e", command, *map(str, words), "--runs", str(project.runs)])
        return code, *capfd.readouterr()

    return call


PARITY = {"args": ["alone"], "rtol": 0, "atol": 1e-9}


def test_a_case_on_a_service_of_its_own(project):
    project.case("good", "print('works on', sys.argv[1:]); plan(); metrics()", parity=PARITY, args=["--x=$HOME"])
    done = project.run("good")
    assert done.code == 0, done.out + done.err
    assert done.last.startswith("VERDICT: PASSED good in ")
    assert "works on ['--x=$HOME']\n" in done.out
    assert "works on ['--x=$HOME', 'alone']\n" in done.out
    folder, result = project.folder("good"), project.result("good")
    assert (result["status"], result["exit_code"], result["reason"]) == ("PASSED", 0, "")
    assert sorted(path.name for path in folder.iterdir()) == [
        "case.json", "console.log", "job", "junit.xml", "reference", "report.html", "report.md", "result.json",
    ]  # fmt: skip
    assert sorted(path.name for path in (folder / "job").iterdir()) == [
        "driver.log", "end.json", "metrics.jsonl", "plan.json", "preflight.json",
    ]  # fmt: skip
    for part, args in (("job", ["--x=$HOME"]), ("reference", ["--x=$HOME", "alone"])):
        assert result[part]["command"] == ["python3", "good.py", *args]
        assert [state for state, _ in result[part]["states"]][-2:] == ["CLEANING", "SUCCEEDED"]
        assert result[part]["verdict"]["status"] == "SUCCEEDED"
        assert result[part]["preflight"]
    assert result["parity"]["first"] is None
    assert result["parity"]["compared"]["metrics"] == 1
    assert sorted((folder / "console.log").read_text().splitlines()) == sorted((done.out + done.err).splitlines())
    assert using(project.root.parent) == []


RAISES = "def train():\n    raise ValueError('no data')\ntrain()"
WAYS = {
    "code": ("plan(); metrics(); sys.exit(3)", {}, ("FAILED", 3, "user")),
    "differs": ("plan(); metrics(loss=float('alone' in sys.argv))", {"parity": PARITY}, ("FAILED", 1, None)),
    "expected": ("sys.exit(9)", {"expect": {"status": "FAILED", "exit_code": 9}}, ("PASSED", 0, None)),
    "good": ("plan(); metrics()", {}, ("PASSED", 0, None)),
    "late": ("time.sleep(600)", {"deadlines": {"run": 1, "start": 120}}, ("TIMEOUT", 124, "timeout")),
    "loss": ("plan(world=8); metrics(loss=float('nan'))", {}, ("FAILED", 1, None)),
    "raises": (RAISES, {}, ("FAILED", 1, "user")),
}


@pytest.mark.parametrize("names", [["differs", "late", "raises"], pytest.param(list(WAYS), marks=pytest.mark.slow)])
def test_several_cases_and_each_way_to_fail(project, url, names):
    """The exit code is that of the first that did not pass; the last line tells of all."""
    for name in names:
        program, changes, _ = WAYS[name]
        project.case(name, program, tiers=["mine"], **changes)
    done = project.run("--tier", "mine", "--on", url)
    results = {name: project.result(name) for name in names}
    for name, result in results.items():
        assert (result["status"], result["exit_code"], result["failure_class"]) == WAYS[name][2], name
    if "loss" in names:
        assert failed(results["loss"]) == ["plan topology.world", "loss"]
    differs = results["differs"]
    assert differs["parity"]["first"]["name"] == "loss"
    assert (project.folder("differs") / differs["parity"]["dumped"]).is_dir()
    assert failed(results["raises"])[:2] == ["status", "exit code"]
    first = results["raises"]["checks"][0]
    line = (project.root / "raises.py").read_text().splitlines().index("    raise ValueError('no data')") + 1
    assert (first["file"], first["line"]) == ("raises.py", line)
    assert "ValueError: no data" in results["raises"]["reason"]
    assert results["raises"]["where"] == url
    bad = next(name for name in names if WAYS[name][2][0] != "PASSED")
    assert done.code == WAYS[bad][2][1], done.out
    *rows, verdict = done.out.splitlines()[-len(names) - 1 :]
    assert [row.split()[:2] for row in rows] == [[WAYS[name][2][0], name] for name in names]
    passed = sum(WAYS[name][2][0] == "PASSED" for name in names)
    assert verdict.startswith(f"VERDICT: {WAYS[bad][2][0]} ({passed} of {len(names)} cases passed in ")
    assert f"; first {bad}: {results[bad]['reason']}" in verdict


@pytest.mark.slow
def test_a_reference_that_fails_and_one_that_is_left_out(project, url):
    project.case("broken", "plan(); metrics(); sys.exit('alone' in sys.argv and 4)", parity=PARITY)
    assert project.run("broken", "--on", url).code == 4
    broken = project.result("broken")
    assert failed(broken) == ["reference run"]
    assert (broken["exit_code"], broken["failure_class"], broken["parity"]) == (4, "user", None)
    assert project.run("broken", "--on", url, "--no-parity").code == 0


def test_what_is_recorded_is_replayed_by_the_next_run(project, url, tmp_path):
    """Through the cache: recorded into the run folder, kept after a run that passed, sent with the next source."""
    (tmp_path / "data").mkdir()
    program = """
dump = pathlib.Path(os.environ["DUMP"])
known = (dump / "a/1/tokens").exists()
if not known:
    assert dump == run / "rollouts", dump
    (dump / "a/1").mkdir(parents=True)
    (dump / "a/1/tokens").write_text("1 2 3")
assert (dump / "a/1/tokens").read_text() == "1 2 3"
assert pathlib.Path(os.environ["DATA"]).is_dir()
plan(); metrics(replayed=int(known))
"""
    project.case(
        "records",
        program,
        needs={"data": {"path": str(tmp_path / "data")}},
        env={"DUMP": "{rollouts}", "DATA": "{data}"},
        rollouts={"steps": [1]},
    )
    assert project.run("records", "--on", url, "--metric", "replayed=0").code == 0
    done = project.run("records", "--on", url, "--metric", "replayed=1")
    assert done.code == 0, done.out


def test_what_cannot_run_is_refused_before_anything_starts(project, inside):
    project.case("absent", script="scripts/train.sh")
    project.case("good")
    (project.root / "train.sh").write_text("exit 0\n")
    code, out, _ = inside("run", "absent")
    assert code == 78
    assert "script scripts/train.sh is not in the source" in out.splitlines()[-1]
    result = project.result("absent")
    assert (result["status"], result["failure_class"], result["job"]) == ("FAILED", "config", None)
    assert not (project.folder("absent") / "service").exists()
    (project.root / "e2e/bad.yaml").write_text("name: bad\nnodes: 2\n")
    for words in (["bad"], ["nothing"], [], ["good", "--metric", "loss"], ["good", "--on", "ftp://x"]):
        code, out, err = inside("run", *words)
        assert (code, out, err.count("\n")) == (78, "", 1), words
    assert sorted(path.name for path in project.runs.iterdir()) == [".gitignore", "absent"]


def test_a_service_that_does_not_answer(project):
    project.case("good", needs={"made": {"make": ["no-such-command", "{out}"]}})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        done = project.run("good", "--on", url, "--reconnect-timeout", 0.3)
    assert done.code == 69
    assert f"no answer from the service at {url}" in done.last
    assert "--on" in done.last
    assert project.result("good")["failure_class"] == "infra"


def test_an_address_that_is_empty_is_not_taken_for_another(project, inside):
    project.case("good")
    code, _, err = inside("run", "good", "--on", "")
    assert code == 78
    assert "--on is empty" in err


def test_dry_run_shows_the_requests_and_makes_nothing(project, inside):
    project.case(
        "shown",
        topology={"nodes": 2, "devices_per_node": 4},
        needs={"data": {"make": ["data", "arithmetic", "{out}"]}},
        env={"DATA": "{data}", "DUMP": "{rollouts}/x"},
        rollouts={"steps": [1]},
        retries=2,
        parity=PARITY,
    )
    code, out, _ = inside("run", "shown", "--dry-run")
    assert code == 0
    one, other = (SubmitRequest.model_validate(each) for each in yaml.safe_load_all(out))
    assert (one.resources.nodes, one.resources.accelerators_per_node, one.retry.infra) == (2, 4, 2)
    assert (other.resources.devices, other.args) == (1, ["alone"])
    assert one.bundle == other.bundle
    assert one.env["DUMP"] == "{run_dir}/rollouts/x"
    assert one.env["DATA"].startswith(str(project.root.parent / "cache"))
    assert one.preflight.paths == [one.env["DATA"]]
    assert one.labels == {"e2e.case": "shown", "e2e.role": "main"}
    assert (one.timeouts.queue, one.timeouts.run, one.timeouts.hang) == (60, 120, None)
    assert not (project.root.parent / "cache").exists()
    assert not project.runs.exists()


WAITS = "plan(); metrics(); mark('runs'); print('waiting', flush=True); time.sleep(600)"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_cancels_the_job_and_leaves_nothing(project, number, code):
    project.case("waits", WAITS)
    process = project.start("waits")
    pid = project.marked("runs")
    assert project.result("waits")["status"] == "INTERRUPTED"  # until it has another end
    process.send_signal(number)
    done = Done(process)
    assert done.code == code
    assert done.last.startswith(f"VERDICT: INTERRUPTED waits: {number.name}")
    result = project.result("waits")
    assert (result["status"], result["exit_code"], result["checks"]) == ("INTERRUPTED", code, [])
    assert result["job"]["verdict"]["status"] == "CANCELLED"
    assert (project.folder("waits") / "job/driver.log").read_text() == "waiting\n"
    assert is_gone(pid)
    assert using(project.root.parent) == []
    assert not (project.folder("waits") / "service").exists()


@pytest.mark.slow
def test_a_killed_runner_takes_everything_along(project):
    project.case("waits", WAITS)
    process = project.start("waits")
    pid = project.marked("runs")
    process.kill()
    process.communicate()
    until(lambda: is_gone(pid) and not using(project.root.parent), "everything of the run ends")
    assert project.result("waits")["reason"] == "it was killed before its end"


@pytest.mark.slow
def test_a_second_signal_leaves_at_once_and_the_rest_ends_by_itself(project):
    project.case("waits", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAITS)
    process = project.start("waits")
    pid = project.marked("runs")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "cancel sent" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert Done(process, 10).code == 130
    until(lambda: is_gone(pid) and not using(project.root.parent), "everything of the run ends")


@pytest.mark.slow
def test_a_killed_service_is_said_and_its_job_is_ended(project):
    project.case("waits", WAITS)
    process = project.start("waits", "--reconnect-timeout", 2)
    pid = project.marked("runs")
    (service,) = [one for one in using(project.root.parent) if " serve --private " in one]
    os.kill(int(service.split()[0]), signal.SIGKILL)
    done = Done(process)
    assert done.code == 75
    assert "verdict not obtainable" in done.last
    assert is_gone(pid)
    assert using(project.root.parent) == []


def test_two_runs_at_once_do_not_disturb_each_other(project):
    project.case("one", "plan(); metrics(); print('I am one', flush=True)")
    project.case("two", "plan(); metrics(); print('I am two', flush=True)")
    both = [project.start("one"), project.start("two")]
    for name, done in zip(("one", "two"), map(Done, both), strict=True):
        assert done.code == 0, done.out + done.err
        assert (project.folder(name) / "job/driver.log").read_text() == f"I am {name}\n"
    ports = {project.result(name)["job"]["url"].split("/api")[0] for name in ("one", "two")}
    assert len(ports) == 2


@pytest.mark.slow
def test_without_preparing_a_need_that_is_missing_is_refused_and_one_that_is_there_is_used(project, url):
    project.case("needy", needs={"data": {"make": ["data", "arithmetic", "{out}", "--train", "8", "--test", "4"]}})
    refused = project.run("needy", "--on", url, "--no-prepare")
    assert refused.code == 78
    assert "need data is not in the cache" in refused.last
    assert refused.last.endswith("make it with `corral e2e prepare needy`")
    assert project.run("needy", command="prepare").code == 0
    assert project.run("needy", "--on", url, "--no-prepare", "--runs", project.root / "again").code == 0


@pytest.mark.slow
def test_what_a_run_left_in_the_project_is_no_part_of_the_next(project, url):
    project.case("left", 'assert not os.path.exists("runs"); plan(); metrics()')
    for _ in range(2):
        assert project.run("left", "--on", url, "--runs", "runs/e2e").code == 0
    status = subprocess.run(["git", "status", "--porcelain"], cwd=project.root, capture_output=True, text=True)
    assert "runs" not in status.stdout


@pytest.mark.slow
def test_a_run_that_did_not_pass_keeps_no_recording(project, url):
    program = "(run / 'rollouts/1').mkdir(parents=True); plan(); metrics(loss='none')"
    project.case("records", program, env={"DUMP": "{rollouts}"}, rollouts={"steps": [1]})
    assert project.run("records", "--on", url).code == 1
    assert list((project.root.parent / "cache").glob("e2e/rollouts-*")) == []


@pytest.mark.slow
def test_a_result_is_replayed_as_it_was(project):
    file = project.case("good", "print('attempt', os.environ['N'], flush=True); plan(); metrics()", env={"N": "1"})
    project.case("other", "plan(); metrics(loss=1.0 if 'alone' in sys.argv else 1.5)", parity=PARITY)
    assert project.run("good").code == 0
    first = project.folder("good")
    file.write_text(file.read_text().replace("N: '1'", "N: '2'"))
    done = project.run(first / "result.json", command="replay")
    assert done.code == 0, done.out + done.err
    (second,) = set((project.runs / "good").iterdir()) - {first}
    assert (second / "job/driver.log").read_text() == "attempt 1\n"
    again = read(second)["again"].split()
    assert again[:3] == ["corral", "e2e", "replay"]
    assert Path(again[3]) == second


def test_a_result_that_cannot_be_replayed(project, inside, tmp_path):
    project.case("absent", script="scripts/train.sh")
    assert inside("run", "absent")[0] == 78
    moved = project.folder("absent").rename(tmp_path / "moved")
    (moved / "case.json").write_text((moved / "case.json").read_text().replace("absent", "gone"))
    for damage, said in (
        (lambda: None, "case gone is not here"),
        (lambda: (moved / "case.json").unlink(), "cannot read"),
        (lambda: (moved / "result.json").write_text("{}"), "is no result"),
    ):
        damage()
        code, _, err = inside("replay", moved)
        assert (code, err.count("\n")) == (78, 1), err
        assert said in err


@pytest.mark.slow
def test_secrets_of_a_local_run_come_from_the_environment_and_stay_out_of_its_records(project):
    project.case("secret", "print('it is', os.environ['KEY'], flush=True); plan(); metrics()", secrets=["KEY"])
    done = project.run("secret")
    assert done.code == 78
    assert done.last.endswith("secret KEY is not set; on local it comes from the environment")
    done = project.run("secret", KEY="hunter2-and-more")
    assert done.code == 0
    assert "it is ***\n" in done.out
    folder = max((project.runs / "secret").iterdir())
    held = [path for path in folder.rglob("*") if path.is_file() and b"hunter2-and-more" in path.read_bytes()]
    assert held == []


@pytest.mark.slow
def test_in_github_actions_nothing_a_job_prints_is_a_command(project, url, tmp_path):
    for name in ("summary", "output"):
        (tmp_path / name).write_text("")
    project.case("prints", "print('::error::mine'); sys.exit(3)")
    actions = {
        "GITHUB_ACTIONS": "true",
        "GITHUB_REPOSITORY": "o/r",
        "GITHUB_SHA": "0" * 40,
        "GITHUB_RUN_ID": "7",
        "GITHUB_WORKSPACE": str(project.root),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
        "GITHUB_OUTPUT": str(tmp_path / "output"),
    }
    done = project.run("prints", "--on", url, **actions)
    assert done.code == 3
    obeyed, token = [], None
    for line in done.out.splitlines():
        if token is not None:
            token = None if line == f"::{token}::" else token
        elif line.startswith("::stop-commands::"):
            token = line.removeprefix("::stop-commands::")
        elif line.startswith("::"):
            obeyed.append(line)
    assert not any("::mine" in line for line in obeyed)
    assert any(line.startswith("::error") for line in obeyed)
    assert "prints" in (tmp_path / "summary").read_text()
    assert "FAILED" in (tmp_path / "output").read_text()
    view = json.loads((project.folder("prints") / "result.json").read_text())["job"]
    assert view["verdict"]["exit_code"] == 3


@pytest.mark.slow
def test_the_whole_tier_twice_at_the_same_time(tmp_path):
    """The shipped cases, from one empty cache."""
    shared = Project(tmp_path / "project")
    one = shared.start("--tier", "pr", "--runs", tmp_path / "one")
    other = shared.start("--tier", "pr", "--runs", tmp_path / "other")
    for process in (one, other):
        done = Done(process, 3000)
        assert done.code == 0, done.out[-5000:] + done.err[-5000:]
        assert done.last.startswith("VERDICT: PASSED ")
    assert using(tmp_path) == []
