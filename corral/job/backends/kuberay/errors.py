"""What a Kubernetes API server refuses, and that it does not answer, each as one line without secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping

from corral.errors import InfraError

_LONGEST = 400  # characters of a server's own message that are shown
_NO_VALUES = re.compile(r'secrets (?:"[^"]{1,253}" )?is forbidden: (?:User |exceeded quota)')
_TOKEN = re.compile(r"(?=[\w.+=-]*\d)(?=[\w.+=-]*[a-z])(?=[\w.+=-]*[A-Z])[\w.+=-]{24,}")


class KubeError(InfraError):
    """One call failed.

    status: of the answer, 0 when there was none. reason: one word as Kubernetes names it. retry_after: seconds the
    server asks to wait, None when it does not say.
    """

    def __init__(self, status: int, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after = retry_after


class Unreachable(KubeError):
    """No whole answer came. sent: the server may have done what it was asked; nobody knows."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(0, "Unreachable", message)
        self.sent = sent


class Unauthorized(KubeError):
    """401, also after the credentials were renewed; or they could not be renewed."""


class Forbidden(KubeError):
    """403: the credentials are known and may not do this, or a rule of the server or a quota is against it."""


class NotFound(KubeError):
    """404."""


class Conflict(KubeError):
    """409: the object is newer than the one that was changed, or another than the one that was meant."""


class AlreadyExists(Conflict):
    """409 on create."""


class Gone(KubeError):
    """410: the server no longer knows what happened since that resource version. List again."""


class Invalid(KubeError):
    """400 or 422: the object breaks the server's rules."""


class Throttled(KubeError):
    """429."""


_BY_STATUS: Mapping[int, type[KubeError]] = {
    400: Invalid,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    422: Invalid,
    429: Throttled,
}


def error_of(what: str, status: int, body: object, retry_after: float | None = None, quiet: bool = False) -> KubeError:
    """The error of an answer. what: the call, for the message. body: a Status object, or whatever else came.
    quiet: leave out what the server says, which may repeat the object that was sent; not what is about the namespace,
    rights or quotas."""
    said = body if isinstance(body, Mapping) else {}
    details = said.get("details")
    if retry_after is None and isinstance(details, Mapping) and isinstance(details.get("retryAfterSeconds"), int):
        retry_after = float(details["retryAfterSeconds"])
    reason = str(said.get("reason") or "Unknown")[:60]
    text = one_line(str(said.get("message") or ""))
    if quiet and not (status == 404 or (status == 403 and _NO_VALUES.match(text))):
        text = ""
    kind = AlreadyExists if status == 409 and reason == "AlreadyExists" else _BY_STATUS.get(status, KubeError)
    return kind(status, reason, f"{what}: {status} {reason}" + (f": {text}" if text else ""), retry_after)


def one_line(text: str) -> str:
    """Without line ends, control characters and what looks like a token; cut when long."""
    text = _TOKEN.sub("***", " ".join("".join(c if c.isprintable() else " " for c in text).split()))
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
