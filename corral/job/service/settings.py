"""What a service is started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class Profile:
    """What a request leaves out. images: shell patterns a named image has to match; empty: any.
    bootstraps: names of scripts that stand for "run the script of --script-path" (see docs/jobs.md)."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    devices_per_node: Count = 1
    kind: Literal["auto", "cpu", "gpu", "npu"] = "auto"
    images: tuple[str, ...] = ()
    bootstraps: tuple[str, ...] = ()


@dataclass(frozen=True)
class Limits:
    """Of one request or job. log_bytes: stored output of a job; more is kept in the raw files only and said once."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    body: Count = 256 << 10
    bundle: Count = 64 << 20
    unpacked: Count = 512 << 20
    watchers: Count = 256  # at once, over all jobs
    queued: Count = 2000  # jobs that are not terminal
    log_bytes: Count = 2 << 30
    records: Count = 4 << 30  # bytes of one attempt that are sent in one answer
    active_devices_per_repository: Count | None = None


@dataclass(frozen=True)
class Nodes:
    """Of backends whose nodes do not see this machine's disk. agent_dir: absolute folder on the nodes that attempts get
    a folder in. python: what starts the agent there; Corral has to be installed for it. profiles_dir: profiles of your
    own, which win over Corral's of the same name."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    agent_dir: Annotated[str, Field(pattern=r"^(/[A-Za-z0-9._-]+)+$", max_length=200)] = "/tmp/corral-jobs"
    python: Annotated[str, Field(pattern=r"^[A-Za-z0-9._/-]+$", max_length=200)] = "python3"
    profiles_dir: Path | None = None


@dataclass(frozen=True)
class RayCluster:
    """A Ray cluster that is there already. address: URL of its dashboard. token_file: holds the token it asks for."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    address: str | None = None
    token_file: Path | None = None


@dataclass(frozen=True)
class Kubernetes:
    """Where RayJobs are made. kubeconfig, context: None: as kubectl would, or the pod's service account. namespace:
    None: that of the context or of the pod. profile: of jobs that name none. image: where job and profile name none.

    dashboard: how a cluster's Ray dashboard is reached, by its service name or through the API server. scheduler,
    queue: who admits all pods of a job at once. secrets: name of a job's secret → NAME/KEY of a Kubernetes secret.
    patch_paths: prefixes of what `template_patches` may change; empty: Corral's list. submission: how the operator is
    told of the job; see docs. token_file: of the Ray clusters, where they ask for one.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None
    profile: str = "cpu"
    image: str = ""
    dashboard: Literal["service", "proxy"] = "service"
    scheduler: Literal["none", "volcano", "kueue", "yunikorn"] = "none"
    queue: str | None = None
    service_account: str | None = None
    secrets: Mapping[str, str] = field(default_factory=dict)
    patch_paths: tuple[str, ...] = ()
    submission: Literal["InteractiveMode", "K8sJobMode", "HTTPMode", "SidecarMode"] = "InteractiveMode"
    token_file: Path | None = None


@dataclass(frozen=True)
class Settings:
    """backend: what runs jobs, with `nodes` and `ray` or `kubernetes` for those that are not this machine.
    data_dir: database, segments, bundles and job folders. public_url: what agents and notices use to reach us.
    source_roots: absolute prefix of a script as a client names it → folder where the service can see it."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    data_dir: Path
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8470
    public_url: str | None = None
    database_url: str | None = None  # SQLite inside data_dir
    token_file: Path | None = None
    secrets_dir: Path | None = None
    devices: Count = 16
    max_nodes: Count = 8
    max_devices_per_node: Count = 8
    source_roots: Mapping[str, Path] = field(default_factory=dict)
    profile: Profile = field(default_factory=Profile)
    limits: Limits = field(default_factory=Limits)
    backend: Literal["local", "ray", "kuberay"] = "local"
    nodes: Nodes = field(default_factory=Nodes)
    ray: RayCluster = field(default_factory=RayCluster)
    kubernetes: Kubernetes = field(default_factory=Kubernetes)

    @property
    def url(self) -> str:
        return self.public_url or f"http://{self.host}:{self.port}"
