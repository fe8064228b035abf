"""Where the service is and who we are to it."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from corral.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8470"


@dataclass(frozen=True)
class Endpoint:
    """url: without a trailing slash. loopback: it is on this machine, so no proxy of the environment is used."""

    url: str
    token: str | None = field(default=None, repr=False)
    loopback: bool = False


def endpoint(url: str | None, insecure: bool = False, env: Mapping[str, str] = os.environ) -> Endpoint:
    """From an option, else CORRAL_URL, else SUBMITTER_URL; the token from CORRAL_TOKEN or the file CORRAL_TOKEN_FILE.

    Raises ConfigError for what is no http(s) URL, and for a token that would cross a network in clear text.
    """
    given = url or env.get("CORRAL_URL") or env.get("SUBMITTER_URL") or DEFAULT_URL
    parts = urlsplit(given if "://" in given else f"http://{given}")
    try:
        host, _port = parts.hostname, parts.port
    except ValueError:
        host = None
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise ConfigError(f"{given!r} is not the URL of a service, such as {DEFAULT_URL}; set --url or CORRAL_URL")
    if parts.username or parts.password:
        raise ConfigError("the URL of the service must not hold a user or password; use CORRAL_TOKEN")
    token = _token(env)
    loopback = _is_loopback(host)
    if token and parts.scheme == "http" and not loopback and not insecure:
        raise ConfigError(
            f"refusing to send the token in clear text to {host}; use https, or --insecure where the network is trusted"
        )
    return Endpoint(parts.geturl().rstrip("/"), token, loopback)


def _token(env: Mapping[str, str]) -> str | None:
    token, origin = env.get("CORRAL_TOKEN", "").strip(), "CORRAL_TOKEN"
    file = env.get("CORRAL_TOKEN_FILE")
    if not token and file:
        origin = f"CORRAL_TOKEN_FILE={file}"
        try:
            token = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{origin} cannot be read: {getattr(error, 'strerror', None) or 'not text'}") from None
    if any(not "!" <= character <= "~" for character in token):
        raise ConfigError(f"the token in {origin} holds a space, a line break or another character no token has")
    return token or None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
