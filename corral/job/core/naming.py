"""Names of jobs: functions of who asked for what, so that asking twice makes one job."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable

from corral.errors import ConfigError
from corral.job.protocol.submit import SubmitRequest

NO_RUN = "local"  # the default github_run_id: not inside CI, so nothing says that two requests are the same
_HEADER = re.compile(r"[!-~]{1,200}")


def idempotency_key(
    request: SubmitRequest, header: str | None = None, random: Callable[[], str] = lambda: secrets.token_hex(16)
) -> str:
    """What makes two requests of one owner the same job: the Idempotency-Key header, else the CI run, its attempt and
    the job's name in it, else nothing (a fresh random key).

    The three kinds never meet. Raises ConfigError for a header that is not 1 to 200 visible ASCII characters.
    """
    if header is not None:
        if not _HEADER.fullmatch(header):
            raise ConfigError(f"Idempotency-Key {header[:40]!r}: give 1 to 200 visible ASCII characters without spaces")
        return f"key:{header}"
    if request.github_run_id != NO_RUN:
        run = [request.repository, request.github_run_id, request.github_run_attempt, request.name_suffix]
        return f"run:{json.dumps(run, separators=(',', ':'))}"
    return f"once:{random()}"


def job_id(owner: str, key: str) -> str:
    """`rj-` and 12 hex digits: a DNS-1035 label, and short enough for `-a<attempt>` and Kubernetes' suffixes.

    48 bits: two of a million jobs share one with a chance of 0.2 %; the store then answers as for a taken key.
    """
    return "rj-" + hashlib.sha256(json.dumps([owner, key]).encode()).hexdigest()[:12]
