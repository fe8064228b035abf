"""The token file: who may call the service, as salted hashes.

`{"tokens": [{"name", "salt", "hash", "scopes": [...], "repositories": ["org/*"], "expires": "2027-01-31T00:00:00Z"}]}`.
A token holds 256 random bits, so that one SHA-256 with its salt (both hex) is as hard to invert as any slow hash.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import time
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, get_args

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from corral.atomic import write_text
from corral.errors import ConfigError
from corral.job.service.errors import validation_line

Scope = Literal["submit", "read", "cancel", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
PREFIX = "corral_"  # for secret scanners


class Token(BaseModel):
    """One entry. scopes: `admin` includes the others and lifts the limit to one's own jobs. repositories: shell
    patterns of those it may touch at all. expires: None for never."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    salt: str = Field(pattern=r"^([0-9a-f]{2}){8,32}$")
    hash: str = Field(pattern=r"^[0-9a-f]{64}$")
    scopes: frozenset[Scope]
    repositories: tuple[str, ...] = ("*",)
    expires: AwareDatetime | None = None

    def fits(self, clear: str) -> bool:
        """Whether this is the token, in a time that does not depend on how much of it is right."""
        return hmac.compare_digest(_hash(self.salt, clear), self.hash)

    @property
    def expired(self) -> bool:
        return self.expires is not None and self.expires.timestamp() <= time.time()

    def may_touch(self, repository: str) -> bool:
        return any(fnmatchcase(repository, pattern) for pattern in self.repositories)


class _Entries(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tokens: list[Token]


class TokenFile:
    """The entries of a file, read again whenever it changes.

    Raises ConfigError, here and in `find`, when the file cannot be read or an entry does not fit: nobody gets in by a
    file that is half understood.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int, int] | None = None
        self._tokens: list[Token] = []
        self._refresh()

    def find(self, clear: str) -> Token | None:
        """The entry of a token, also of an expired one."""
        self._refresh()
        found = None
        for token in self._tokens:  # all of them, so that the time says nothing about the place
            if token.fits(clear):
                found = token
        return found

    def _refresh(self) -> None:
        try:
            stat = self.path.stat()
            seen = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if seen == self._seen:
                return
            self._tokens = read_tokens(self.path)
        except OSError as error:
            self._seen = None
            raise ConfigError(f"cannot read the token file {self.path}: {error.strerror}") from error
        except ConfigError:
            self._seen = None
            raise
        self._seen = seen


def read_tokens(path: Path) -> list[Token]:
    """Raises ConfigError with one line when the content does not fit, OSError when the file cannot be read."""
    try:
        tokens = _Entries.model_validate_json(path.read_bytes()).tokens
    except ValidationError as error:
        raise ConfigError(f"token file {path}: {validation_line(error)}") from error
    names = [token.name for token in tokens]
    if double := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"token file {path}: name {double[0]!r} is there twice; names own jobs, so each is unique")
    return tokens


def new_token(
    name: str, scopes: frozenset[Scope], repositories: tuple[str, ...] = ("*",), days: float | None = None
) -> tuple[str, Token]:
    """A fresh token in clear, and its entry. Raises ConfigError for a name or scope that does not fit."""
    clear = PREFIX + secrets.token_urlsafe(32)
    salt = secrets.token_hex(16)
    expires = None if days is None else datetime.fromtimestamp(int(time.time() + days * 86_400), UTC)
    try:
        entry = Token(
            name=name, salt=salt, hash=_hash(salt, clear), scopes=scopes, repositories=repositories, expires=expires
        )
    except ValidationError as error:
        raise ConfigError(f"new token: {validation_line(error)}") from error
    return clear, entry


def add_token(path: Path, entry: Token) -> None:
    """Append an entry to a token file (mode 0600), made where it is missing. Raises ConfigError, InfraError."""
    tokens = read_tokens(path) if path.exists() else []
    if any(token.name == entry.name for token in tokens):
        raise ConfigError(f"token file {path}: name {entry.name!r} is taken; choose another or remove that entry")
    entries = [token.model_dump(mode="json") | {"scopes": sorted(token.scopes)} for token in [*tokens, entry]]
    write_text(path, json.dumps({"tokens": entries}, indent=2) + "\n")
    path.chmod(0o600)


def _hash(salt: str, clear: str) -> str:
    return hashlib.sha256(bytes.fromhex(salt) + clear.encode("utf-8", "surrogateescape")).hexdigest()
