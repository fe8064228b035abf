"""The token with which the agent of a job speaks to the service: derived, so that none is stored."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path

KEY_BYTES = 32


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
    """The token of a job's agent: the same for all its attempts and after every restart."""
    return hmac.new(key, f"agent:{job_id}".encode(), hashlib.sha256).hexdigest()
