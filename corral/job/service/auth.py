"""Who calls: the scopes and repositories of a token, and the derived token of an agent."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request
from fastapi import Path as PathParameter

from corral.errors import ConfigError
from corral.job.core.record import JobRecord
from corral.job.protocol.names import JOB_ID
from corral.job.service.context import service_of
from corral.job.service.errors import Refusal
from corral.job.service.tokens import SCOPES, Scope, Token, TokenFile

KEY_BYTES = 32
_CHALLENGE = {"WWW-Authenticate": "Bearer"}


@dataclass(frozen=True)
class Caller:
    """name: owner of the jobs it submits. token: None when the service asks for none (loopback only)."""

    name: str
    scopes: frozenset[Scope]
    token: Token | None = None

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes or "admin" in self.scopes

    def may_touch(self, repository: str) -> bool:
        return self.token is None or self.token.may_touch(repository)

    def owns(self, job: JobRecord) -> bool:
        """Whether a sweeping call (clean-up of a workflow) of this caller reaches the job."""
        return self.may_touch(job.request.repository) and (job.owner == self.name or "admin" in self.scopes)


LOCAL = Caller("local", frozenset(SCOPES))


def identify(request: Request, tokens: TokenFile | None) -> Caller:
    """The caller of a request. Raises Refusal: 401 without a valid token, 503 while the token file cannot be read."""
    if tokens is None:
        return LOCAL
    clear = bearer(request)
    if clear is None:
        raise Refusal(401, "no token: send `Authorization: Bearer TOKEN` (set CORRAL_TOKEN)", _CHALLENGE)
    try:
        token = tokens.find(clear)
    except ConfigError as error:
        raise Refusal(503, "the service cannot read its token file; its log says why") from error
    if token is None:
        raise Refusal(401, "unknown token", _CHALLENGE)
    if token.expired:
        raise Refusal(401, f"token {token.name} has expired; ask for a new one", _CHALLENGE)
    return Caller(token.name, token.scopes, token)


def bearer(request: Request) -> str | None:
    scheme, _, clear = request.headers.get("authorization", "").partition(" ")
    return clear.strip() if scheme.lower() == "bearer" and clear.strip() else None


def _scope(scope: Scope | None) -> Callable[[Request], Awaitable[Caller]]:
    async def check(request: Request) -> Caller:
        caller = identify(request, service_of(request).tokens)
        request.state.caller = caller.name
        if scope is not None and not caller.may(scope):
            raise Refusal(403, f"token {caller.name} lacks the scope {scope}; it has {_list(caller.scopes)}")
        return caller

    return check


def _list(scopes: frozenset[Scope]) -> str:
    return ", ".join(sorted(scopes)) or "none"


Anyone = Annotated[Caller, Depends(_scope(None))]
Submitter = Annotated[Caller, Depends(_scope("submit"))]
Reader = Annotated[Caller, Depends(_scope("read"))]
Canceller = Annotated[Caller, Depends(_scope("cancel"))]


async def job_for(caller: Caller, job_id: str, request: Request) -> JobRecord:
    """The job, as far as the caller may know of it. Raises Refusal 404."""
    journal = service_of(request).journal
    request.state.job_id = job_id[:64]
    job = await journal.read(journal.store.get, job_id) if JOB_ID.fullmatch(job_id) else None
    if job is None or not caller.may_touch(job.request.repository):
        raise Refusal(404, f"no job {job_id[:64]!r}")
    return job


async def _agent(request: Request, job_id: Annotated[str, PathParameter()]) -> str:
    clear = bearer(request) or ""
    request.state.job_id, request.state.caller = job_id[:64], "agent"
    expected = agent_token(service_of(request).agent_key, job_id)
    if not JOB_ID.fullmatch(job_id) or not hmac.compare_digest(expected.encode(), clear.encode("utf-8", "replace")):
        raise Refusal(401, "this is not the token of the job's agent", _CHALLENGE)
    return job_id


AgentOf = Annotated[str, Depends(_agent)]


def service_key(data_dir: Path) -> bytes:
    """The secret of this service in `<data_dir>/agent.key` (mode 0600), made at the first start.

    Raises OSError when the folder cannot be written.
    """
    path = data_dir / "agent.key"
    with suppress(FileNotFoundError):
        key = path.read_bytes()
        if len(key) == KEY_BYTES:
            return key
    temporary = data_dir / f".agent.key.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    key = secrets.token_bytes(KEY_BYTES)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key)
        os.fsync(file.fileno())
    temporary.replace(path)
    return key


def agent_token(key: bytes, job_id: str) -> str:
    """The token of a job's agent, for all its attempts and after a restart too: derived, so that none is stored."""
    return hmac.new(key, b"agent:" + job_id.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()
