"""The Ray Jobs API: REST calls, and the socket that sends a job's output. Nothing of Ray is imported.

What is said here about Ray was read in and tried with Ray 2.60.
"""

from __future__ import annotations

import json
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidURI, WebSocketException

from corral.errors import ConfigError, InfraError
from corral.job.core.classify import one_line

CONNECT, ANSWER = 5.0, 20.0  # seconds until a connection stands, and until an answer is there
LOGS_ANSWER = 60.0  # the same for a whole log, which Ray reads into one answer
LARGEST_LOG = 64 << 20  # bytes of a log that is read in one answer; more is read from the socket only
LARGEST_MESSAGE = 16 << 20  # of the socket; a line of Corral's agent is far smaller
PING = 20.0  # seconds between pings of an idle socket, and until one that does not answer them is given up
MOST_NODES = 10_000

PENDING, RUNNING = "PENDING", "RUNNING"
TERMINAL = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})

log = logging.getLogger("corral.service.ray")


@dataclass(frozen=True)
class Submission:
    """A job to be. entrypoint: shell text. env: of the entrypoint and of all its workers; readable to whoever may read
    the cluster's jobs. cpus: reserved for the entrypoint; 0: it runs on the head and reserves nothing."""

    submission_id: str
    entrypoint: str
    env: Mapping[str, str]
    metadata: Mapping[str, str]
    cpus: float = 0.0


@dataclass(frozen=True)
class RayJob:
    """What Ray says of a job. exit_code: of the entrypoint, 128 + n for signal n; None while it runs and when it was
    stopped. start, end: Unix seconds. entrypoint: as it was submitted. node_id: where it runs; None: not yet."""

    submission_id: str
    status: str
    message: str = ""
    error_type: str | None = None
    exit_code: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    start: float | None = None
    end: float | None = None
    entrypoint: str = ""
    node_id: str | None = None

    @property
    def over(self) -> bool:
        return self.status in TERMINAL


@dataclass(frozen=True)
class RayNode:
    """resources: what it has in total, by Ray's names. head: Ray's head runs there."""

    node_id: str
    name: str
    alive: bool
    resources: Mapping[str, float]
    address: str = ""
    head: bool = False


class JobsApi:
    """The API of one cluster.

    address: URL of its dashboard, or of a proxy, with the path it is under. token: what the cluster asks for, or what
    reads it anew for each call. headers: for a proxy, or what makes them; an Authorization among them wins over ours,
    and Ray then finds its token in X-Ray-Authorization. http: a client that is used for REST instead of one of our
    own; its Authorization is left to it. tls: for https and wss.

    A cluster that does not answer, or not as Ray does, raises InfraError, which says nothing about its jobs.
    """

    def __init__(
        self,
        address: str,
        token: str | Callable[[], str] | None = None,
        *,
        headers: Mapping[str, str] | Callable[[], Mapping[str, str]] | None = None,
        http: httpx.AsyncClient | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.address = address.rstrip("/")
        self._token, self._headers, self._tls = token, headers, tls
        self._foreign = http is not None
        self._http = http or httpx.AsyncClient(verify=tls if tls is not None else True)

    async def close(self) -> None:
        if not self._foreign:
            await self._http.aclose()

    async def version(self) -> dict[str, Any]:
        """ray_version, session_name and others; another session is another start of the head."""
        return dict(_mapping(await self._json("GET", "/api/version")))

    async def submit(self, submission: Submission) -> None:
        """Start the job, unless one of this id is there already: then that is it.

        Raises ConfigError when Ray refuses it, or the id is another's.
        """
        if await self._adopted(submission):
            return
        body: dict[str, Any] = {
            "entrypoint": submission.entrypoint,
            "submission_id": submission.submission_id,
            "runtime_env": {"env_vars": dict(submission.env)},
            "metadata": dict(submission.metadata),
        }
        if submission.cpus:
            body["entrypoint_num_cpus"] = submission.cpus
        answer = await self._call("POST", "/api/jobs/", json=body)
        if answer.status_code == 200:
            return
        # An id that exists is answered with 500, around the text of a 400 of an inner hop.
        if "already exists" in answer.text and await self._adopted(submission):
            return
        if answer.status_code in (400, 413, 422):
            raise ConfigError(f"Ray at {self.address} refuses the job: {_last_line(answer.text)}")
        raise self._trouble("POST /api/jobs/", answer)

    async def get(self, submission_id: str) -> RayJob | None:
        """None: Ray knows no such job (any more)."""
        path = _job(submission_id)
        answer = await self._call("GET", path)
        if self._unknown(answer):
            return None
        found = ray_job(self._parsed("GET", path, answer))
        if found is None:
            raise InfraError(f"Ray at {self.address} says nothing that can be read about {submission_id}")
        return found

    async def jobs(self) -> list[RayJob]:
        """All that were submitted; drivers that were started otherwise are left out."""
        listed = await self._json("GET", "/api/jobs/")
        if not isinstance(listed, list):
            raise InfraError(f"Ray at {self.address} does not list its jobs")
        return [job for one in listed if (job := ray_job(one)) is not None]

    async def stop(self, submission_id: str) -> None:
        """SIGTERM to the entrypoint and all below it, and after the job's RAY_JOB_STOP_WAIT_TIME_S SIGKILL."""
        await self._effect("POST", _job(submission_id, "/stop"))

    async def delete(self, submission_id: str) -> None:
        """Only for a job that is over. One that is not there is left at that."""
        await self._effect("DELETE", _job(submission_id))

    async def logs(self, submission_id: str) -> str:
        """All of the output, "" when there is none, or no such job. Raises InfraError when it is not to be had: one
        invalid byte in it is enough for that, and then Ray never gives it out again."""
        path = _job(submission_id, "/logs")
        try:
            async with self._http.stream(
                "GET", self.address + path, headers=self._all_headers(), timeout=_timeout(LOGS_ANSWER)
            ) as answer:
                content = bytearray()
                async for block in answer.aiter_bytes():
                    content += block
                    if len(content) > LARGEST_LOG:
                        raise InfraError(f"the log of {submission_id} has more than {LARGEST_LOG >> 20} MiB")
        except httpx.HTTPError as error:
            raise self._silent(error) from error
        whole = httpx.Response(answer.status_code, content=bytes(content))
        if self._unknown(whole):
            return ""
        return str(_mapping(self._parsed("GET", path, whole)).get("logs") or "")

    async def tail(self, submission_id: str) -> AsyncIterator[str]:
        """The output from its start, as it comes, cut anywhere. It ends when the socket does, however that came about:
        the end says nothing about the job, nor that this was all."""
        address = "ws" + self.address.removeprefix("http") + _job(submission_id, "/logs/tail")
        try:
            async with connect(
                address,
                additional_headers=self._all_headers(http=False),
                open_timeout=CONNECT,
                ping_interval=PING,
                ping_timeout=PING,
                close_timeout=1.0,
                max_size=LARGEST_MESSAGE,
                compression=None,
                ssl=(self._tls or ssl.create_default_context()) if address.startswith("wss:") else None,
            ) as socket:
                async for message in socket:
                    if isinstance(message, str):
                        yield message
        except (OSError, TimeoutError, WebSocketException, InvalidURI) as error:
            log.debug("the log socket of %s ended: %s", submission_id, error)

    async def nodes(self) -> list[RayNode]:
        listed = await self._json("GET", f"/api/v0/nodes?limit={MOST_NODES}")
        found = _mapping(_mapping(_mapping(listed).get("data")).get("result")).get("result")
        if not isinstance(found, list):
            raise InfraError(f"Ray at {self.address} does not list its nodes")
        return [_node(_mapping(one)) for one in found]

    # Answers --------------------------------------------------------------------------------------------------------

    async def _adopted(self, submission: Submission) -> bool:
        there = await self.get(submission.submission_id)
        if there is None:
            return False
        if there.metadata.get("corral_service") != submission.metadata.get("corral_service"):
            raise ConfigError(
                f"Ray at {self.address} has a job {submission.submission_id} that this service did not start; "
                "another service that uses the cluster was sent the same job, or it was made by hand: delete it there, "
                "or give this service a cluster of its own"
            )
        return True

    async def _effect(self, method: str, path: str) -> None:
        answer = await self._call(method, path)
        if answer.status_code != 200 and not self._unknown(answer):
            raise self._trouble(f"{method} {path}", answer)

    async def _json(self, method: str, path: str) -> Any:
        return self._parsed(method, path, await self._call(method, path))

    async def _call(self, method: str, path: str, **what: Any) -> httpx.Response:
        try:
            return await self._http.request(
                method, self.address + path, headers=self._all_headers(), timeout=_timeout(ANSWER), **what
            )
        except httpx.HTTPError as error:
            raise self._silent(error) from error

    def _parsed(self, method: str, path: str, answer: httpx.Response) -> Any:
        if answer.status_code != 200:
            raise self._trouble(f"{method} {path}", answer)
        try:
            return json.loads(answer.content)
        except ValueError:
            raise InfraError(
                f"{self.address} answers, but not as Ray's dashboard does: {_start(answer.text)}"
            ) from None

    def _unknown(self, answer: httpx.Response) -> bool:
        """Whether Ray itself says that there is no such job; a proxy in front of a dead one says 404 too."""
        return answer.status_code == 404 and "does not exist" in answer.text

    def _trouble(self, call: str, answer: httpx.Response) -> InfraError:
        if answer.status_code in (401, 403):
            return InfraError(
                f"Ray at {self.address} answers {answer.status_code}: it asks for a token, or for another one; "
                "set ray.token_file (kubernetes.token_file) in the service's configuration"
            )
        return InfraError(f"Ray at {self.address}: {call} answers {answer.status_code}: {_last_line(answer.text)}")

    def _silent(self, error: httpx.HTTPError) -> InfraError:
        return InfraError(f"Ray's dashboard at {self.address} does not answer: {error or type(error).__name__}")

    def _all_headers(self, http: bool = True) -> dict[str, str]:
        headers = dict(self._headers() if callable(self._headers) else self._headers or {})
        if token := self._token() if callable(self._token) else self._token:
            headers.setdefault("X-Ray-Authorization", f"Bearer {token}")
            if not (http and self._foreign):
                headers.setdefault("Authorization", f"Bearer {token}")
        return headers


def ray_job(said: Any) -> RayJob | None:
    """A job as Ray describes it; None for what was not submitted or cannot be read."""
    said = _mapping(said)
    name, status = said.get("submission_id"), said.get("status")
    if not isinstance(name, str) or not isinstance(status, str):
        return None
    code = said.get("driver_exit_code")
    metadata = {str(key): str(value) for key, value in _mapping(said.get("metadata")).items()}
    return RayJob(
        submission_id=name,
        status=status,
        message=str(said.get("message") or ""),
        error_type=None if said.get("error_type") is None else str(said["error_type"]),
        exit_code=None if not isinstance(code, int) else code if code >= 0 else 128 - code,
        metadata=metadata,
        start=_seconds(said.get("start_time")),
        end=_seconds(said.get("end_time")),
        entrypoint=str(said.get("entrypoint") or ""),
        node_id=str(said["driver_node_id"]) if said.get("driver_node_id") else None,
    )


def _node(said: Mapping[str, Any]) -> RayNode:
    counted = {
        str(name): float(count)
        for name, count in _mapping(said.get("resources_total")).items()
        if isinstance(count, int | float)
    }
    name, address = str(said.get("node_name") or ""), str(said.get("node_ip") or "")
    return RayNode(
        node_id=str(said.get("node_id") or ""),
        name=name,
        alive=said.get("state") == "ALIVE",
        resources=counted,
        address=address,
        head=bool(said.get("is_head_node")),
    )


def _job(submission_id: str, what: str = "") -> str:
    return f"/api/jobs/{quote(submission_id, safe='')}{what}"


def _timeout(answer: float) -> httpx.Timeout:
    return httpx.Timeout(answer, connect=CONNECT)


def _seconds(milliseconds: Any) -> float | None:
    return milliseconds / 1000 if isinstance(milliseconds, int | float) else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _last_line(text: str) -> str:
    """Ray answers with tracebacks, whose last line says what it was."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return one_line(lines[-1], 300) if lines else "nothing"


def _start(text: str) -> str:
    return one_line(text, 120) or "nothing"
