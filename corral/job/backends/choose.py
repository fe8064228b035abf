"""The backend that the settings name. Each is imported when it is wanted: they need different libraries."""

from __future__ import annotations

from corral.errors import ConfigError
from corral.job.backends.base import Backend
from corral.job.service.settings import Settings


def backend_of(settings: Settings) -> Backend:
    """Raises ConfigError for settings that it cannot work with."""
    _only_its_own(settings)
    if settings.backend == "ray":
        from corral.job.backends.ray_jobs.backend import RayJobsBackend

        return RayJobsBackend(settings)
    if settings.backend == "kuberay":
        from corral.job.backends.kuberay.backend import KubeRayBackend

        return KubeRayBackend(settings)
    from corral.job.backends.local import LocalBackend

    return LocalBackend(settings)


def _only_its_own(settings: Settings) -> None:
    """What names another backend's cluster would have no effect, and is a mistake."""
    if settings.ray.address is not None and settings.backend != "ray":
        raise ConfigError("ray.address (--address) is of a Ray cluster; add --backend ray, or leave it out")
    if settings.backend == "kuberay":
        return
    for name, option in (("kubeconfig", "--kubeconfig"), ("context", "--context"), ("namespace", "--namespace")):
        if getattr(settings.kubernetes, name) is not None:
            raise ConfigError(f"kubernetes.{name} ({option}) is of Kubernetes; add --backend kuberay, or leave it out")
