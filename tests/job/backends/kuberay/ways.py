"""Ways to a cluster that tests write down: kubeconfig files and certificates."""

from __future__ import annotations

import base64
import os
import ssl
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from corral.job.backends.kuberay.client import PODS, KubeClient
from corral.job.backends.kuberay.config import access_of
from corral.job.backends.kuberay.errors import NotFound
from corral.job.backends.kuberay.transport import Access
from corral.job.service.settings import Kubernetes
from tests.job.backends.kuberay.near import QUICK, run

NOWHERE = Path("/nonexistent")
PARTS = {"cluster": "clusters", "user": "users", "context": "contexts"}


def config(tmp_path: Path, name: str = "config", /, **parts: object) -> Path:
    """A kubeconfig with the entry "main" of each kind; parts: fields of it, or top fields."""
    entries: dict[str, Any] = {
        "cluster": {"server": "https://kube.example:6443"},
        "user": {},
        "context": {"cluster": "main", "user": "main"},
    }
    document: dict[str, Any] = {"current-context": "main"}
    for key, value in (entries | parts).items():
        if key in PARTS and value is not None:
            document[PARTS[key]] = [{"name": "main", key: value}]
        elif key not in PARTS:
            document[key.replace("_", "-")] = value
    path = tmp_path / name
    path.write_text(yaml.safe_dump(document))
    return path


def access(path: Path, environ: Mapping[str, str] = os.environ, **settings: Any) -> Access:
    return access_of(Kubernetes(kubeconfig=path, **settings), environ, NOWHERE)


def asked(found: Access, **patience: float) -> None:
    """One call, which has to be let in: nothing is there."""

    async def life() -> None:
        client = KubeClient(found, replace(QUICK, **patience))
        try:
            with pytest.raises(NotFound):
                await client.get(PODS, "nothing")
        finally:
            await client.close()

    run(life)


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


class Authority:
    """Certificates of an authority of our own, made by openssl: `server` is for 127.0.0.1, `other` for kube.example."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        named = ["-subj", "/CN=test authority"]
        self._openssl("req", "-x509", *key, "-days", "2", "-keyout", "ca.key", "-out", "ca.pem", *named)
        for name, subject in (("server", "IP:127.0.0.1"), ("other", "DNS:kube.example"), ("client", "DNS:me")):
            written(folder / "extra", f"subjectAltName={subject}\nbasicConstraints=CA:FALSE\n")
            self._openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
            signing = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "extra"]
            self._openssl("x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.pem")

    def server(self, name: str = "server", ask_client: bool = False) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        if ask_client:
            context.load_verify_locations(self.folder / "ca.pem")
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def text(self, name: str) -> str:
        return (self.folder / name).read_text()

    def data(self, name: str) -> str:
        return base64.b64encode((self.folder / name).read_bytes()).decode()

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True, timeout=60)
