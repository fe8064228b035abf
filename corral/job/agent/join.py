"""`python -m corral.job.agent.join`: the entrypoint inside a job on nodes that do not see the service's disk.

It is told what to do in CORRAL_AGENT_BOARDING and CORRAL_AGENT_TOKEN, makes the folder of the attempt, fetches from the
service what may not be told there (secrets) or does not fit (the source), and then is the agent of every other job. A
second start of the same attempt does what a second agent does: it delivers what the first one left, and runs nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import MutableMapping
from pathlib import Path
from types import FrameType

from corral.errors import ConfigError, CorralError, InfraError
from corral.job.agent.attempt import Attempt, make_private
from corral.job.agent.link import Backoff, Link, Unanswered
from corral.job.agent.run import run
from corral.job.protocol.agent import BOARDING, TOKEN, AgentSpec, Boarding, EndRecord, Join, Joined, Misfit
from corral.job.protocol.frames import frame

PREFIX = "CORRAL_AGENT_"
RAY_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray hands the job's environment on to all workers of a driver in this
BUNDLE = "bundle.tar.gz"
LARGEST_BUNDLE = 4 << 30  # bytes
TELL_BOUND = 10.0  # seconds of trying to tell the service that this job cannot start
_FINAL = frozenset({400, 403, 409, 410, 413, 422})  # another try gets the same answer
_OVER = 410  # another attempt may do better
_SUBMISSION = re.compile(r"[a-z0-9-]{1,80}")


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _stopped)
    started, token = time.time(), os.environ.get(TOKEN, "")
    try:
        boarding = boarding_of(os.environ)
        folder = Path(boarding.root) / boarding.spec.submission_id
        attempt = Attempt(folder, boarding.spec)
    except Misfit as error:
        return _cannot_start(_as_far_as_known(error, token), error, started)
    except CorralError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    try:
        make_private(folder)
    except InfraError as error:
        return _cannot_start(attempt, error, started)
    if (end := attempt.read_end()) and not (folder / "spec.json").exists():
        _tell(attempt, end)  # it was all said already, and nobody is left who knows the secrets
        return end.exit_code if end.exit_code is not None else InfraError.exit_code
    try:
        board(boarding, folder)
    except CorralError as error:
        code = _cannot_start(attempt, error, started)
        shutil.rmtree(folder, ignore_errors=True)
        return code
    try:
        return run(folder, away=True)
    except CorralError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _stopped(number: int, frame: FrameType | None) -> None:
    raise InfraError("stopped before the command started")


def boarding_of(environ: MutableMapping[str, str]) -> Boarding:
    """What this agent is told, taken out of the environment so that the job does not see it. The spec has the token,
    and the secrets that the cluster has put into the environment.

    Raises InfraError and ConfigError as Boarding.decode.
    """
    text, token = environ.get(BOARDING, ""), environ.get(TOKEN, "")
    clean(environ)
    if not text or not token:
        raise InfraError(f"{BOARDING} and {TOKEN} have to be set; the job service sets them")
    boarding = Boarding.decode(text)
    if not _SUBMISSION.fullmatch(boarding.spec.submission_id):
        raise InfraError(f"{BOARDING} names no submission")
    secrets = {name: environ[name] for name in boarding.secret_env if name in environ}
    return boarding.model_copy(update={"spec": boarding.spec.model_copy(update={"token": token, "secrets": secrets})})


def clean(environ: MutableMapping[str, str]) -> None:
    """Take out what is for the agent alone."""
    for name in [name for name in environ if name.startswith(PREFIX)]:
        del environ[name]
    try:
        config = json.loads(environ.get(RAY_CONFIG, ""))
        variables = config["runtime_env"]["env_vars"]
        for name in [name for name in variables if name.startswith(PREFIX)]:
            del variables[name]
    except (ValueError, KeyError, TypeError):
        return
    environ[RAY_CONFIG] = json.dumps(config)


def board(boarding: Boarding, folder: Path) -> None:
    """Fill the folder of the attempt with its spec.json and bundle, unless an earlier start has.

    Raises InfraError, and ConfigError when the service refuses the agent for good.
    """
    if (folder / "spec.json").exists():
        return
    spec = boarding.spec
    missing = [name for name in boarding.secret_env if name not in spec.secrets]
    if missing:
        raise ConfigError(
            f"secret {missing[0]} is not in the environment of the nodes; the cluster has to put it there"
        )
    if boarding.join:
        deadline = time.monotonic() + boarding.patience
        link = Link(Attempt(folder, spec))
        joined = _join(link, boarding, deadline)
        if spec.bundle is not None:
            _fetch_bundle(link, boarding, folder, deadline)
            spec = spec.model_copy(update={"bundle_path": str(folder / BUNDLE)})
        spec = spec.model_copy(update={"secrets": {**joined.secrets, **spec.secrets}})
    _write(folder / "spec.json", spec)


def _write(path: Path, spec: AgentSpec) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(spec.model_dump_json() + "\n")
        temporary.replace(path)
    except OSError as error:
        raise InfraError(f"cannot write {path}: {error.strerror}") from None


# The service ----------------------------------------------------------------------------------------------------------


def _join(link: Link, boarding: Boarding, deadline: float) -> Joined:
    body = Join(attempt=boarding.spec.attempt).model_dump_json().encode()

    def ask() -> Joined:
        status, answer = link.call("POST", "join", body)
        if status in _FINAL:
            raise _refused(status, answer)
        if status != 200:
            raise Unanswered(f"status {status}", status)
        try:
            return Joined.model_validate_json(answer)
        except ValueError:  # without the values
            raise Unanswered("the answer holds no secrets", status) from None

    backoff, last = Backoff(threading.Event()), "no try"
    while time.monotonic() < deadline:
        try:
            return ask()
        except Unanswered as problem:
            last = str(problem)
        backoff.wait()
    raise _unreachable(boarding, last)


def _fetch_bundle(link: Link, boarding: Boarding, folder: Path, deadline: float) -> None:
    backoff, last = Backoff(threading.Event()), "no try"
    while time.monotonic() < deadline:
        digest, partial = hashlib.sha256(), folder / f".{BUNDLE}"
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                for piece in link.download(f"bundle?attempt={boarding.spec.attempt}", LARGEST_BUNDLE):
                    digest.update(piece)
                    file.write(piece)
            if digest.hexdigest() == boarding.spec.bundle:
                partial.replace(folder / BUNDLE)
                return
            last = f"its digest is {digest.hexdigest()[:12]}…, not {(boarding.spec.bundle or '')[:12]}…"
        except Unanswered as problem:
            if problem.status in _FINAL:
                raise _refused(problem.status or 0, b"") from None
            last = str(problem)
        except OSError as error:
            raise InfraError(f"cannot write the source bundle into {folder}: {error.strerror}") from None
        backoff.wait()
    raise _unreachable(boarding, f"the source bundle did not arrive whole: {last}")


def _unreachable(boarding: Boarding, last: str) -> InfraError:
    url, needed = boarding.spec.service_url, "secrets" if boarding.spec.bundle is None else "the source bundle"
    return InfraError(
        f"cannot reach the service at {url} from the cluster within {boarding.patience:g} s, and the job needs "
        f"{needed} from it; set public_url to an address that the nodes reach (last: {last})"
    )


def _refused(status: int, answer: bytes) -> CorralError:
    try:
        said = str(json.loads(answer)["error"])
    except (ValueError, KeyError, TypeError):
        said = f"status {status}"
    line = f"the service does not let this agent join: {said}"
    return InfraError(line) if status == _OVER else ConfigError(line)


def _as_far_as_known(error: Misfit, token: str) -> Attempt | None:
    """Of a boarding that is not understood, what it takes to report that."""
    try:
        spec = AgentSpec.model_validate(
            {name: value for name, value in error.boarding["spec"].items() if name in AgentSpec.model_fields}
        )
    except (KeyError, TypeError, AttributeError, ValueError):
        return None
    return Attempt(Path("/nonexistent"), spec.model_copy(update={"token": token}))


def _cannot_start(attempt: Attempt | None, error: CorralError, started: float) -> int:
    """Say so where the service finds it, and to the service; the exit code."""
    failure = " ".join(str(error).split())
    print(f"corral: {failure}", flush=True)
    if attempt is not None:
        spec = attempt.spec
        record = EndRecord(
            job_id=spec.job_id,
            attempt=spec.attempt,
            exit_code=None,
            failure=failure,
            kind="config" if isinstance(error, ConfigError) else "infra",
            bundle=spec.bundle,
            started=started,
            ended=time.time(),
        )
        _tell(attempt, record.sealed())
    return error.exit_code


def _tell(attempt: Attempt, record: EndRecord) -> None:
    print(frame(record), flush=True)
    link, backoff, until = Link(attempt), Backoff(threading.Event()), time.monotonic() + TELL_BOUND
    while time.monotonic() < until:
        try:
            status, _ = link.call("POST", "end", record.model_dump_json().encode())
        except Unanswered:
            status = 0
        if status in (200, 204) or status in _FINAL:
            break
        backoff.wait()
    link.close()


if __name__ == "__main__":
    sys.exit(main())
