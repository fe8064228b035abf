"""Credential plugins of a kubeconfig: a command that prints an ExecCredential (client.authentication.k8s.io)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from corral.errors import ConfigError
from corral.job.backends.kuberay.credentials import Credential
from corral.job.backends.kuberay.errors import Unauthorized, one_line

VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")
_EARLY = 30.0  # seconds before its end at which a credential is made anew


@dataclass(frozen=True)
class Plugin:
    """command: program and arguments. environ: the whole environment. where: for messages. seconds: it may run."""

    command: tuple[str, ...]
    version: str
    environ: Mapping[str, str] = field(repr=False)
    where: str
    seconds: float = 60.0


def plugin_of(
    fields: object, where: str, folder: Path, cluster: Mapping[str, Any], environ: Mapping[str, str]
) -> Plugin:
    """Raises ConfigError: the field and what to do."""
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: a mapping with command and apiVersion is expected")
    version, command, args = fields.get("apiVersion"), fields.get("command"), fields.get("args") or []
    if version not in VERSIONS:
        raise ConfigError(f"{where}.apiVersion: {version!r} is not supported; update the plugin to {VERSIONS[0]}")
    if not isinstance(command, str) or not command:
        raise ConfigError(f"{where}.command is missing: the program that prints the credential")
    if not isinstance(args, list) or not all(isinstance(part, str) for part in args):
        raise ConfigError(f"{where}.args: a list of texts is expected")
    if fields.get("interactiveMode") == "Always":
        raise ConfigError(f"{where}.interactiveMode: Always needs a terminal, which a service has not; use IfAvailable")
    program = str(folder / command) if os.sep in command else shutil.which(command, path=environ.get("PATH"))
    if program is None or not os.access(program, os.X_OK):
        hint = fields.get("installHint")
        raise ConfigError(f"{where}.command: {command} is not installed" + (f"; {one_line(hint)}" if hint else ""))
    return Plugin((program, *args), version, _environment(fields, where, cluster, environ, version), where)


def _environment(
    fields: Mapping[str, Any], where: str, cluster: Mapping[str, Any], environ: Mapping[str, str], version: str
) -> Mapping[str, str]:
    added: dict[str, str] = {}
    for index, pair in enumerate(fields.get("env") or []):
        if (
            not isinstance(pair, dict)
            or not isinstance(pair.get("name"), str)
            or not isinstance(pair.get("value"), str)
        ):
            raise ConfigError(f"{where}.env[{index}]: name and value are expected, both texts")
        added[pair["name"]] = pair["value"]
    spec: dict[str, Any] = {"interactive": False}
    if fields.get("provideClusterInfo"):
        names = ("server", "certificate-authority-data", "tls-server-name", "insecure-skip-tls-verify", "proxy-url")
        spec["cluster"] = {name: cluster[name] for name in names if name in cluster}
    info = {"apiVersion": version, "kind": "ExecCredential", "spec": spec}
    return {**environ, **added, "KUBERNETES_EXEC_INFO": json.dumps(info)}


class ExecPlugin:
    """Runs the plugin when there is no credential, when it is about to end, and when the server refused it."""

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin
        self._credential: Credential | None = None
        self._until = 0.0  # wall clock
        self._lock = asyncio.Lock()

    async def current(self) -> Credential:
        async with self._lock:
            if self._credential is None or time.time() >= self._until:
                await self._renew()
            assert self._credential is not None
            return self._credential

    async def renewed(self, refused: Credential) -> Credential:
        async with self._lock:
            if self._credential is None or self._credential == refused:  # else another call has renewed it meanwhile
                await self._renew()
            assert self._credential is not None
            return self._credential

    async def _renew(self) -> None:
        self._credential = None
        self._credential, ends = _credential(await self._output(), self._plugin)
        # A credential that lives for less than a minute is used for half of its time.
        left = ends - time.time()
        self._until = ends - min(_EARLY, left / 2)

    async def _output(self) -> bytes:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._plugin.command,
                env=dict(self._plugin.environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:  # replaced by an update at this moment, or no processes left
            raise _failed(self._plugin, f"cannot be started: {error.strerror}") from None
        try:
            async with asyncio.timeout(self._plugin.seconds):
                output, complaint = await process.communicate()
        except TimeoutError:
            raise _failed(self._plugin, f"no answer in {self._plugin.seconds:g} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode:
            last = complaint.decode("utf-8", "replace").strip().splitlines()[-1:]
            raise _failed(
                self._plugin, f"exit code {process.returncode}" + "".join(f": {one_line(line)}" for line in last)
            )
        return output


def _failed(plugin: Plugin, what: str) -> Unauthorized:
    return Unauthorized(401, "ExecPlugin", f"{plugin.where}: {plugin.command[0]}: {what}")


def _credential(output: bytes, plugin: Plugin) -> tuple[Credential, float]:
    """The credential and when it ends, in seconds of the wall clock; infinite when it does not say."""
    try:
        found = json.loads(output)
        version, status = found["apiVersion"], found["status"]
        token = status.get("token")
        certificate, key = status.get("clientCertificateData"), status.get("clientKeyData")
        ends = status.get("expirationTimestamp")
        until = datetime.fromisoformat(ends).timestamp() if ends else float("inf")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _failed(plugin, "what it prints is no ExecCredential with a status") from None
    if version != plugin.version:
        raise _failed(plugin, f"it prints {version}, and apiVersion is {plugin.version}")
    pair = (certificate, key) if certificate and key else None
    if not token and pair is None:
        raise _failed(plugin, "it prints neither a token nor a certificate with its key")
    return Credential(token, pair, passing=True), until
