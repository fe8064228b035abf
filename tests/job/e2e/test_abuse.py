"""Jobs that do not play by the rules, and cancels at every moment: the right end comes, and nothing is left."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.job.e2e.faults import Place, in_order, place, until

# Daemons with sessions of their own that ignore SIGTERM: one keeps the output open, one closes it, one drops the
# environment as well.
DAEMONS = """
trap "" TERM INT HUP
setsid bash -c 'trap "" TERM INT HUP; (while :; do sleep 0.2; done) & wait' &
setsid bash -c 'trap "" TERM INT HUP; exec <&- >&- 2>&-; (while :; do sleep 0.2; done) & wait' &
bare='trap "" TERM INT HUP; echo $$ > "$0"; while :; do sleep 0.2; done'
setsid env -i "$(command -v bash)" -c "$bare" "$GATES/bare" &
until [ -s "$GATES/bare" ]; do sleep 0.05; done
echo "daemons run"
"""


@pytest.fixture(scope="module")
def at():
    with place("--devices", "2") as it:
        it.script("leaves.sh", DAEMONS + 'echo "the end"; exec >&- 2>&-; exit 0')
        it.script("stays.sh", DAEMONS + 'exec <&- >&- 2>&-; touch "$GATES/stays"; while :; do sleep 0.2; done')
        it.script("long.sh", 'echo began; touch "$GATES/$1"; sleep 600')
        it.script("short.sh", "echo began; sleep 0.3; echo ended")
        it.script("spoils.sh", SPOILS)
        yield it


def bare_is_gone(at: Place) -> None:
    pid = (at.gates / "bare").read_text().strip()

    def gone() -> bool:
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                return str(at.gates).encode() not in file.read()
        except OSError:
            return True

    until(gone, "the process without an environment is gone", 10.0)
    (at.gates / "bare").unlink()


@pytest.mark.slow
def test_daemons_of_a_job_that_ends(at):
    client = at.submit(script="leaves.sh")
    assert client.done() == 0
    assert client.lines == ["daemons run", "the end"]
    at.service.nothing_left(client.job_id)
    bare_is_gone(at)


@pytest.mark.slow
def test_a_job_that_ignores_every_signal(at):
    client = at.submit(script="stays.sh")
    at.reached("stays")
    assert at.client("cancel", client.job_id).done() == 0
    at.service.nothing_left(client.job_id, 20.0)
    assert client.done() == 130
    bare_is_gone(at)


# What Corral keeps in the attempt's folder belongs to the user that the job runs as.
SPOILS = """
attempt="$(dirname "$CORRAL_RUN_DIR")"
echo before
while [ ! -e "$attempt/host.json" ]; do sleep 0.05; done
cd /
case "$1" in
    garbage) for name in end.json spec.json service.json host.json; do echo '{"half": ' > "$attempt/$name"; done;;
    folders) cd "$attempt"; rm -f *.json; mkdir end.json spec.json service.json host.json; cd /;;
    pipes) cd "$attempt"; rm -f *.json; mkfifo end.json spec.json service.json host.json; cd /;;
    end) echo '{"exit_code": 0}' > "$attempt/end.json";;
    run) rm -rf "$CORRAL_RUN_DIR";;
    links) rm -rf "$CORRAL_RUN_DIR"; ln -s / "$CORRAL_RUN_DIR";;
    all) rm -rf "$attempt";;
esac
sleep 1
echo after
exit 3
"""


SPOILT = ("folders", "pipes", "end", "run", "links", "all")


@pytest.mark.parametrize("what", ["garbage", *(pytest.param(what, marks=pytest.mark.slow) for what in SPOILT)])
def test_a_job_that_spoils_its_folder(at, what):
    """Its verdict is its own all the same, in about the time it takes anyway."""
    client = at.submit(script="spoils.sh", arguments=(what,))
    assert client.done(45.0) == 3, client.err
    assert client.verdict.startswith("FAILED (user)")
    if what != "all":  # then its output is gone too
        assert client.lines == ["before", "after"]
    at.service.nothing_left(client.job_id)


@pytest.mark.slow
def test_a_job_that_floods_while_it_is_cancelled(at):
    at.script("floods.sh", 'trap "" TERM; touch "$GATES/floods"; i=0; while :; do echo "flood $i"; i=$((i+1)); done')
    client = at.submit(script="floods.sh")
    at.reached("floods")
    client.printed("flood 10000\n")
    assert at.client("cancel", client.job_id).done() == 0
    at.service.nothing_left(client.job_id, 20.0)
    assert client.done() == 130
    lines = client.lines
    in_order(lines[:-1], "flood", len(lines) - 1)  # the last one may be cut


# Cancels ------------------------------------------------------------------------------------------------------------


def cancelled(at: Place, job_id: str) -> None:
    """By the command, which is idempotent."""
    for _ in range(2):
        assert at.client("cancel", job_id).done() == 0


@pytest.mark.slow
def test_a_cancel_while_it_waits_runs_and_is_over(at):
    holder = at.submit("--devices", "1", "--nodes", "2", script="long.sh", arguments=("holder",))
    until(lambda: at.service.state(holder.job_id) not in ("ACCEPTED", "QUEUED"), "it holds both devices")
    waiting = at.submit(script="long.sh", arguments=("never",))
    until(lambda: at.service.state(waiting.job_id) == "QUEUED", "the other one waits")
    cancelled(at, waiting.job_id)
    assert waiting.done() == 130
    assert "PROVISIONING" not in waiting.err
    assert not (at.gates / "never").exists()
    assert at.service.state(holder.job_id) in ("PROVISIONING", "PREFLIGHT", "RUNNING")
    cancelled(at, holder.job_id)
    assert holder.done() == 130
    at.service.nothing_left(holder.job_id)
    cancelled(at, holder.job_id)  # over: nothing changes
    assert at.service.events(holder.job_id)[-1]["status"] == "CANCELLED"


def cancel_at_random(at: Place, seed: int) -> None:
    client = at.submit(script="short.sh")
    job = client.job_id
    time.sleep(random.Random(seed).uniform(0.0, 3.0))  # the moment is the fault
    cancelled(at, job)
    code = client.done(30.0)
    status = at.service.events(job)[-1]["status"]
    assert (status, code) in {("CANCELLED", 130), ("SUCCEEDED", 0)}
    if status == "SUCCEEDED":
        assert client.lines == ["began", "ended"]
    at.service.nothing_left(job)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_a_cancel_at_a_random_moment(at, seed):
    cancel_at_random(at, seed)


@pytest.mark.slow
def test_a_cancel_after_the_verdict_changes_nothing(at):
    """While its output, which takes a while to store, is collected."""
    at.script("much.sh", "seq -f 'much %.0f' 0 99999")
    client = at.submit("--detach", script="much.sh")
    assert client.done() == 0
    job = client.out.strip()
    until(lambda: (at.service.attempt(job) / "end.json").exists(), "the command ends")
    until(lambda: at.service.state(job) not in ("PREFLIGHT", "RUNNING"), "the verdict is fixed")
    cancelled(at, job)
    watch = at.client("watch", job)
    assert watch.done() == 0
    in_order(watch.lines, "much", 100_000)


def bundle_of(at: Place) -> str:
    """The digest of the source, which the service has from here on."""
    client = at.submit("--dry-run", script="short.sh")
    assert client.done() == 0
    kept = [path.name for path in (at.service.data / "bundles").rglob("*.tar.gz")]
    newest = max(kept, key=lambda name: (at.service.data / "bundles" / name[:2] / name).stat().st_mtime)
    return newest.removesuffix(".tar.gz")


# Many ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_clean_up_of_a_workflow_twice(at):
    run = {
        "GITHUB_ACTIONS": "true", "GITHUB_REPOSITORY": "acme/rl", "GITHUB_SHA": "a" * 40, "GITHUB_REF_NAME": "main",
        "GITHUB_RUN_ID": "4711", "GITHUB_RUN_ATTEMPT": "2",
    }  # fmt: skip
    clients = [at.submit("--name", name, script="long.sh", arguments=(name,), **run) for name in ("one", "two")]
    for name in ("one", "two"):
        at.reached(name)
    other = at.submit("--detach", "--name", "other", script="long.sh", arguments=("three",))
    assert other.done() == 0
    for _ in range(2):
        assert at.client("cleanup", "--workflow", "4711", "--attempt", "2").done() == 0
    assert [client.done() for client in clients] == [130, 130]
    until(
        lambda: set(at.service.processes()) == set(at.service.processes(other.out.strip())), "only the other one runs"
    )
    assert at.service.state(other.out.strip()) in ("QUEUED", "PROVISIONING", "PREFLIGHT", "RUNNING")
    cancelled(at, other.out.strip())


@pytest.mark.slow
def test_the_same_submission_many_times_at_once(at):
    body = {"script": "short.sh", "bundle": bundle_of(at)}
    headers = {"Idempotency-Key": "once"}

    def post(number: int) -> tuple[int, str]:
        answer = at.service.http.post("/api/v1/rayjobs", json=body, headers=headers)
        return answer.status_code, answer.json()["job_id"]

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(post, range(32)))
    assert sorted(code for code, _ in answers) == [200] * 31 + [201]
    (job,) = {job for _, job in answers}
    other = at.service.http.post("/api/v1/rayjobs", json=body | {"args": ["x"]}, headers=headers)
    assert other.status_code == 409
    assert job in other.text
    watch = at.client("watch", job)
    assert watch.done() == 0
    assert watch.lines == ["began", "ended"]


@pytest.mark.slow
def test_five_hundred_jobs_that_wait(at):
    """The service answers meanwhile, a restart keeps all of them, and one clean-up ends them."""
    bundle = bundle_of(at)
    holder = at.submit("--nodes", "2", script="long.sh", arguments=("holds",))
    until(lambda: at.service.state(holder.job_id) not in ("ACCEPTED", "QUEUED"), "it holds both devices")
    body = {"script": "short.sh", "bundle": bundle, "github_run_id": "500", "repository": "acme/many"}
    for number in range(500):
        answer = at.service.http.post("/api/v1/rayjobs", json=body | {"name_suffix": f"n{number}"})
        assert answer.status_code == 201, answer.text
    at.service.kill()
    at.service.start()
    asked = time.monotonic()
    assert at.service.http.get("/readyz").status_code == 200
    assert time.monotonic() - asked < 5.0
    assert at.service.http.get("/metrics").status_code == 200
    assert at.client("cleanup", "--workflow", "500").done(120.0) == 0
    listed = at.service.http.get("/api/v1/rayjobs", params={"run_id": "500", "state": "CANCELLED", "limit": "500"})
    assert len(listed.json()["jobs"]) == 500
    cancelled(at, holder.job_id)
    assert holder.done() == 130
