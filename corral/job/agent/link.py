"""HTTP to the service over one connection that is made anew whenever there is doubt about it."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections.abc import Iterable, Iterator
from urllib.parse import urlsplit

from corral.job.agent.attempt import Attempt

TIMEOUT = 5.0  # seconds the service may be silent
LONG_TIMEOUT = 60.0  # the same where it has a whole archive to read or to write
IDLE = 3.0  # seconds after which a connection is not used again: the other side may be about to close it
LONGEST_ANSWER = 4 << 20
FIRST_DELAY, LONGEST_DELAY = 0.05, 2.0  # seconds between tries


class Unanswered(Exception):
    """The service did not answer, or not with what it should; whether it did what was asked is not known.

    status: of its answer; None when there was none.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Link:
    """For one thread. `call` never retries: what a repetition means is for the caller to know."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._connection: http.client.HTTPConnection | None = None
        self._prefix = ""
        self._used = 0.0

    def call(self, method: str, what: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body of the answer. `what`: the end of the path, such as `logs`. Raises Unanswered."""
        try:
            answer = self._request(method, what, body)
            content = answer.read(LONGEST_ANSWER)
            if not answer.isclosed():  # the rest of a giant answer
                self.close()
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from None
        self._used = time.monotonic()
        return answer.status, content

    def download(self, what: str, limit: int) -> Iterator[bytes]:
        """The body of a GET, in pieces. Raises Unanswered, also for another status than 200, for more than `limit`
        bytes, and for a body that ended before its time."""
        self.close()
        try:
            answer = self._request("GET", what, None)
            while piece := answer.read(1 << 20) if answer.status == 200 else b"":
                limit -= len(piece)
                if limit < 0:
                    raise http.client.HTTPException("the answer is too large")
                yield piece
            if answer.status == 200 and answer.length:
                raise http.client.IncompleteRead(b"", answer.length)
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from None
        finally:
            self.close()
        if answer.status != 200:
            raise Unanswered(f"status {answer.status}", answer.status)

    def upload(self, what: str, pieces: Iterable[bytes]) -> int:
        """Status of a PUT of a body of unknown length. Raises Unanswered."""
        self.close()
        try:
            answer = self._request("PUT", what, pieces, LONG_TIMEOUT)
            answer.read(LONGEST_ANSWER)
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from None
        finally:
            self.close()
        return answer.status

    def _request(
        self, method: str, what: str, body: bytes | Iterable[bytes] | None, timeout: float = TIMEOUT
    ) -> http.client.HTTPResponse:
        if self._connection is None or time.monotonic() - self._used > IDLE:
            self.close()
            self._connect()
        connection = self._connection
        assert connection is not None
        connection.timeout = timeout
        spec = self._attempt.spec
        headers = {"Authorization": f"Bearer {spec.token}", "Content-Type": "application/json"}
        streamed = body is not None and not isinstance(body, bytes)
        if streamed:
            headers |= {"Transfer-Encoding": "chunked", "Content-Type": "application/gzip"}
        path = f"{self._prefix}/api/v1/agent/{spec.job_id}/{what}"
        try:
            connection.request(method, path, body, headers, encode_chunked=streamed)
        except (BrokenPipeError, ConnectionResetError):
            if not streamed:
                raise
            # A service that takes no more of it has said why before it hung up.
        return connection.getresponse()

    def _broken(self, error: OSError | http.client.HTTPException) -> Unanswered:
        self.close()
        return Unanswered(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self) -> None:
        url = self._attempt.service_url()
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise Unanswered(f"{url!r} is no URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Unanswered(f"{url!r} is no URL of a service")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname, port, timeout=TIMEOUT)
        self._prefix = parts.path.rstrip("/")


class Backoff:
    """Growing pauses between tries, cut short when `awake` is set."""

    def __init__(self, awake: threading.Event) -> None:
        self._awake = awake
        self.reset()

    def reset(self) -> None:
        self._delay = FIRST_DELAY

    def wait(self) -> None:
        self._awake.wait(self._delay * random.uniform(0.7, 1.0))
        self._delay = min(2 * self._delay, LONGEST_DELAY)
