"""Kubeconfig files, read as kubectl reads them. What we cannot honour is refused by name."""

from __future__ import annotations

import base64
import binascii
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from corral.errors import ConfigError
from corral.job.backends.kuberay.credentials import Credential, Credentials, Fixed, TokenFile, load_certificate
from corral.job.backends.kuberay.exec_plugin import ExecPlugin, plugin_of
from corral.job.backends.kuberay.transport import Access, check_server
from corral.job.service.settings import Kubernetes

_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_REFUSED_USER = {
    "auth-provider": "kubectl itself dropped it; use exec with the provider's plugin",
    "username": "API servers dropped passwords; use a token, a client certificate or exec",
    "as": "impersonation is not supported; use credentials of that user",
}


@dataclass(frozen=True)
class Entry:
    """A named part of a kubeconfig, with the file that holds it: its paths are relative to that file's folder."""

    file: Path
    where: str  # for messages: file and field
    fields: Mapping[str, Any]

    def text(self, name: str) -> str | None:
        """A field that is a text; None when absent or empty."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{self.where}.{name}: a text is expected, not {type(value).__name__}; put it in quotes")
        return value or None

    def flag(self, name: str) -> bool:
        value = self.fields.get(name, False)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}.{name}: true or false is expected, not {value!r}")
        return value

    def path(self, name: str) -> Path | None:
        value = self.text(name)
        if value is None:
            return None
        path = self.file.parent / value
        if not path.is_file():
            raise ConfigError(f"{self.where}.{name}: there is no file {path}")
        return path

    def pem(self, name: str) -> str | None:
        """What `name`-data holds in base64, which wins, or the file that `name` names."""
        if (data := self.text(f"{name}-data")) is not None:
            try:
                return base64.b64decode(data, validate=True).decode("ascii")
            except (binascii.Error, UnicodeDecodeError):
                raise ConfigError(
                    f"{self.where}.{name}-data: not base64 of a PEM text; encode the file again"
                ) from None
        path = self.path(name)
        try:
            return path.read_text(encoding="ascii") if path else None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.where}.{name}: {path} cannot be read as a PEM text: {error}") from None


def from_files(files: Sequence[Path], settings: Kubernetes, environ: Mapping[str, str]) -> Access:
    """Raises ConfigError. Where files disagree the first one wins, as in kubectl."""
    documents = [(path, _document(path)) for path in files]
    names = ", ".join(map(str, files))
    current = next(
        (str(document["current-context"]) for _, document in documents if document.get("current-context")), ""
    )
    if not (context_name := settings.context or current):
        raise ConfigError(f"{names}: current-context is not set; name one with kubernetes.context (--context)")
    asked = "kubernetes.context" if settings.context else f"{names}: current-context"
    context = _entry(documents, "contexts", "context", context_name, asked)
    cluster = _entry(documents, "clusters", "cluster", _needed(context, "cluster"), f"{context.where}.cluster")
    user_name = context.text("user")
    user = _entry(documents, "users", "user", user_name, f"{context.where}.user") if user_name else None
    server = check_server(_needed(cluster, "server"), cluster.where)
    tls = _tls(cluster) if server.startswith("https://") else None
    if tls is None and user is not None and _secret(user) and httpx.URL(server).host not in _LOCAL:
        raise ConfigError(
            f"{cluster.where}.server: {server} would show the credentials to everyone on the way; use https"
        )
    return Access(
        server=server,
        namespace=settings.namespace or context.text("namespace") or "default",
        credentials=_credentials(user, cluster, server, tls, environ),
        tls=tls,
        proxy=_proxy(cluster),
        server_name=cluster.text("tls-server-name"),
        source=names,
        environment_proxy=httpx.URL(server).host not in _LOCAL,
    )


def _document(path: Path) -> Mapping[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        at = getattr(error, "problem_mark", None)  # the error's own text repeats the line, which may be a secret
        raise ConfigError(f"{path}: not YAML" + (f", line {at.line + 1}" if at else "")) from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: not a kubeconfig: a mapping with clusters, users and contexts is expected")
    return found


def _entry(
    documents: Sequence[tuple[Path, Mapping[str, Any]]], plural: str, single: str, name: str, asked: str
) -> Entry:
    known: list[str] = []
    for path, document in documents:
        entries = document.get(plural) or []
        if not isinstance(entries, list):
            raise ConfigError(f"{path}: {plural}: a list is expected")
        for index, entry in enumerate(entries):
            if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
                raise ConfigError(f"{path}: {plural}[{index}]: an entry with name and {single} is expected")
            if entry["name"] == name:
                fields = entry.get(single) or {}
                if not isinstance(fields, dict):
                    raise ConfigError(f"{path}: {plural}[{name}].{single}: a mapping is expected")
                return Entry(path, f"{path}: {plural}[{name}].{single}", fields)
            known.append(entry["name"])
    raise ConfigError(f"{asked}: there is no {single} {name!r}; known: {', '.join(known) or 'none'}")


def _needed(entry: Entry, name: str) -> str:
    value = entry.text(name)
    if value is None:
        raise ConfigError(f"{entry.where}.{name} is missing")
    return value


def _tls(cluster: Entry) -> ssl.SSLContext:
    authority = cluster.pem("certificate-authority")
    if cluster.flag("insecure-skip-tls-verify"):
        if authority is not None:
            raise ConfigError(f"{cluster.where}: insecure-skip-tls-verify and a certificate-authority; leave one out")
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    try:
        return ssl.create_default_context(cadata=authority)
    except ssl.SSLError as error:
        raise ConfigError(f"{cluster.where}.certificate-authority: no certificate in it: {error}") from None


def _proxy(cluster: Entry) -> str | None:
    proxy = cluster.text("proxy-url")
    if proxy is not None and not proxy.startswith(("http://", "https://")):
        raise ConfigError(
            f"{cluster.where}.proxy-url: only http and https proxies are supported, not {proxy.split(':')[0]}"
        )
    return proxy


def _secret(user: Entry) -> bool:
    return any(user.fields.get(name) for name in ("token", "tokenFile", "exec"))


def _credentials(
    user: Entry | None, cluster: Entry, server: str, tls: ssl.SSLContext | None, environ: Mapping[str, str]
) -> Credentials:
    if user is None:
        return Fixed(Credential())
    for name, instead in _REFUSED_USER.items():
        if user.fields.get(name):
            raise ConfigError(f"{user.where}.{name}: {instead}")
    certificate = _certificate(user)
    if certificate is not None and tls is None:
        raise ConfigError(
            f"{user.where}.client-certificate: a certificate is shown over https only, and server is {server}"
        )
    if certificate is not None and tls is not None:
        _fits(certificate, user)
    if user.fields.get("exec") is not None:
        if certificate is not None or user.text("token") or user.text("tokenFile"):
            raise ConfigError(f"{user.where}.exec: a token or certificate is there as well; leave one out")
        return ExecPlugin(
            plugin_of(user.fields["exec"], f"{user.where}.exec", user.file.parent, cluster.fields, environ)
        )
    if (token_file := user.path("tokenFile")) is not None:
        return TokenFile(token_file, certificate)
    return Fixed(Credential(user.text("token"), certificate))


def _certificate(user: Entry) -> tuple[str, str] | None:
    certificate, key = user.pem("client-certificate"), user.pem("client-key")
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        missing = "client-certificate" if certificate is None else "client-key"
        raise ConfigError(f"{user.where}.{missing} is missing: a certificate and its key belong together")
    return certificate, key


def _fits(certificate: tuple[str, str], user: Entry) -> None:
    try:
        load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), certificate)
    except ssl.SSLError as error:
        raise ConfigError(
            f"{user.where}.client-certificate: not a certificate with its key, without a passphrase: {error}"
        ) from None
