"""How a cluster is reached: a kubeconfig, or the service account of the pod we run in."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from pathlib import Path

from corral.errors import ConfigError
from corral.job.backends.kuberay.credentials import TokenFile
from corral.job.backends.kuberay.kubeconfig import from_files
from corral.job.backends.kuberay.transport import Access, check_server
from corral.job.service.settings import Kubernetes

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def access_of(
    settings: Kubernetes, environ: Mapping[str, str] = os.environ, service_account: Path = SERVICE_ACCOUNT
) -> Access:
    """The kubeconfig of the settings, else those of KUBECONFIG, else ~/.kube/config, else the pod's service account.

    Raises ConfigError: the file, the field and what to do.
    """
    if settings.kubeconfig is not None:
        if not settings.kubeconfig.is_file():
            raise ConfigError(f"kubernetes.kubeconfig: there is no file {settings.kubeconfig}")
        return from_files([settings.kubeconfig], settings, environ)
    if named := [Path(part).expanduser() for part in environ.get("KUBECONFIG", "").split(os.pathsep) if part]:
        if not (found := [path for path in named if path.is_file()]):
            raise ConfigError(f"KUBECONFIG: none of its files is there: {', '.join(map(str, named))}")
        return from_files(found, settings, environ)
    home = Path(environ.get("HOME") or "~").expanduser() / ".kube" / "config"
    if home.is_file():
        return from_files([home], settings, environ)
    if host := environ.get("KUBERNETES_SERVICE_HOST"):
        return _in_cluster(settings, host, environ.get("KUBERNETES_SERVICE_PORT") or "443", service_account)
    raise ConfigError(
        f"no cluster is configured: KUBECONFIG is not set, there is no {home} and this is no pod of a cluster; "
        "set kubernetes.kubeconfig (--kubeconfig FILE)"
    )


def _in_cluster(settings: Kubernetes, host: str, port: str, folder: Path) -> Access:
    if settings.context is not None:
        raise ConfigError(
            f"kubernetes.context: {settings.context!r} is of a kubeconfig, and there is none here; "
            "leave it out, or set kubernetes.kubeconfig"
        )
    token, authority, namespace = folder / "token", folder / "ca.crt", folder / "namespace"
    for path in (token, authority):
        if not path.is_file():
            raise ConfigError(
                f"{path}: this pod has no service account token; "
                "set automountServiceAccountToken: true for it, or kubernetes.kubeconfig"
            )
    try:
        tls = ssl.create_default_context(cafile=str(authority))
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"{authority}: no certificate authority: {error}") from None
    own = namespace.read_text(encoding="utf-8").strip() if namespace.is_file() else ""
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return Access(
        server=check_server(server, "KUBERNETES_SERVICE_HOST"),
        namespace=settings.namespace or own or "default",
        credentials=TokenFile(token),
        tls=tls,
        source=str(folder),
    )
