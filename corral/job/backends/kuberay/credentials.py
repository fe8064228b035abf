"""Who we are to the API server: a fixed token, a file that others keep fresh, or a plugin that is asked."""

from __future__ import annotations

import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from corral.job.backends.kuberay.errors import Unauthorized


@dataclass(frozen=True)
class Credential:
    """token: for the Authorization header. certificate: PEM texts of a client certificate and its key.
    passing: there will be another certificate, so a connection that showed this one is not used again."""

    token: str | None = field(default=None, repr=False)
    certificate: tuple[str, str] | None = field(default=None, repr=False)
    passing: bool = False


class Credentials(Protocol):
    """Both methods raise Unauthorized when there is nothing to show, which may be different later."""

    async def current(self) -> Credential:
        """What to show now; made or read again when it is known to be over."""

    async def renewed(self, refused: Credential) -> Credential:
        """What to show after the server refused `refused`; the same again when there is no other."""


class Fixed:
    """A token or a certificate that never changes, or nothing."""

    def __init__(self, credential: Credential) -> None:
        self._credential = credential

    async def current(self) -> Credential:
        return self._credential

    async def renewed(self, refused: Credential) -> Credential:
        return self._credential


class TokenFile:
    """A file that holds a token and is replaced before the token ends, as Kubernetes does for service accounts."""

    def __init__(self, path: Path, certificate: tuple[str, str] | None = None) -> None:
        self._path = path
        self._certificate = certificate
        self._read_at: tuple[int, int, int] | None = None
        self._credential = Credential()

    async def current(self) -> Credential:
        try:
            found = self._path.stat()
            stamp = (found.st_mtime_ns, found.st_ino, found.st_size)
            if stamp != self._read_at:
                token = self._path.read_text(encoding="utf-8").strip()
                self._credential, self._read_at = Credential(token, self._certificate), stamp
        except (OSError, UnicodeDecodeError) as error:
            raise Unauthorized(401, "TokenFile", f"{self._path}: the token cannot be read: {error}") from None
        if not self._credential.token:
            raise Unauthorized(401, "TokenFile", f"{self._path}: the token file is empty")
        return self._credential

    async def renewed(self, refused: Credential) -> Credential:
        self._read_at = None
        return await self.current()


def load_certificate(context: ssl.SSLContext, certificate: tuple[str, str]) -> None:
    """Present this certificate on connections made from now on. Raises ssl.SSLError when the two do not fit.

    Python reads certificates from files only: they lie in a private folder for the moment that takes.
    """
    with tempfile.TemporaryDirectory(prefix="corral-") as folder:
        paths = [Path(folder) / name for name in ("certificate.pem", "key.pem")]
        for path, text in zip(paths, certificate, strict=True):
            path.touch(mode=0o600)
            path.write_text(text, encoding="utf-8")
        # A key with a passphrase would be asked for on a terminal; an empty answer makes it an error instead.
        context.load_cert_chain(paths[0], paths[1], password=lambda: b"")
