"""The RayJob v1 fields that Corral writes, and no others: names as Kubernetes has them, types exact.

https://ray-project.github.io/kuberay/reference/api/ describes them; the operator's further rules are in rules.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel


def _written(value: object) -> object:
    """Kubernetes takes numbers for quantities as well; one way of writing them is enough here."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Amount = Annotated[
    str, BeforeValidator(_written), StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|[KMGTPE]i?)?$", max_length=32)
]
Port = Annotated[int, Field(ge=1, le=65535)]
Text = dict[str, str]


class Part(BaseModel):
    """Attributes in Python's spelling, keys in Kubernetes'."""

    model_config = ConfigDict(
        extra="forbid", strict=True, alias_generator=to_camel, validate_by_name=True, validate_by_alias=True
    )

    def written(self) -> dict[str, Any]:
        """As a manifest, without what is not set."""
        found: dict[str, Any] = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        return found

    @classmethod
    def read(cls, manifest: Any) -> Self:
        """From a manifest. Raises pydantic.ValidationError for keys that are not among these, and for wrong types."""
        return cls.model_validate(manifest, by_alias=True, by_name=False)


class Metadata(Part):
    name: str | None = None
    namespace: str | None = None
    labels: Text | None = None
    annotations: Text | None = None


class SecretKey(Part):
    name: str
    key: str


class EnvSource(Part):
    secret_key_ref: SecretKey


class EnvVar(Part):
    name: str
    value: str | None = None
    value_from: EnvSource | None = None


class Amounts(Part):
    requests: dict[str, Amount]
    limits: dict[str, Amount]


class Capabilities(Part):
    drop: list[str]


class Seccomp(Part):
    type: Literal["RuntimeDefault"]


class ContainerSecurity(Part):
    allow_privilege_escalation: Literal[False] = False
    capabilities: Capabilities


class PodSecurity(Part):
    run_as_non_root: Literal[True] = True
    run_as_user: int | None = None
    run_as_group: int | None = None
    fs_group: int | None = None
    supplemental_groups: list[int] | None = None
    seccomp_profile: Seccomp


class ContainerPort(Part):
    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?$")]
    container_port: Port


class VolumeMount(Part):
    name: str
    mount_path: str
    sub_path: str | None = None
    read_only: bool | None = None


class Container(Part):
    name: str
    image: str
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    env: list[EnvVar] | None = None
    resources: Amounts
    ports: list[ContainerPort] | None = None
    volume_mounts: list[VolumeMount] | None = None
    security_context: ContainerSecurity


class EmptyDir(Part):
    medium: Literal["", "Memory"] | None = None
    size_limit: Amount | None = None


class HostPath(Part):
    path: str
    type: Literal["", "Directory", "DirectoryOrCreate", "File", "CharDevice", "Socket"] | None = None


class Claim(Part):
    claim_name: str
    read_only: bool | None = None


class Volume(Part):
    name: str
    empty_dir: EmptyDir | None = None
    host_path: HostPath | None = None
    persistent_volume_claim: Claim | None = None


class Toleration(Part):
    key: str | None = None
    operator: Literal["Exists", "Equal"] | None = None
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = None


class Named(Part):
    name: str


class Selector(Part):
    match_labels: Text


class PodTerm(Part):
    label_selector: Selector
    topology_key: str


class WeightedTerm(Part):
    weight: Annotated[int, Field(ge=1, le=100)]
    pod_affinity_term: PodTerm


class AntiAffinity(Part):
    required_during_scheduling_ignored_during_execution: list[PodTerm] | None = None
    preferred_during_scheduling_ignored_during_execution: list[WeightedTerm] | None = None


class Affinity(Part):
    pod_anti_affinity: AntiAffinity


class PodSpec(Part):
    containers: list[Container]
    volumes: list[Volume] | None = None
    security_context: PodSecurity
    automount_service_account_token: Literal[False] = False
    service_account_name: str | None = None
    enable_service_links: Literal[False] = False
    restart_policy: Literal["Never"] = "Never"
    termination_grace_period_seconds: Annotated[int, Field(ge=0, le=3600)] | None = None
    image_pull_secrets: list[Named] | None = None
    node_selector: Text | None = None
    tolerations: list[Toleration] | None = None
    affinity: Affinity | None = None
    runtime_class_name: str | None = None
    priority_class_name: str | None = None
    host_network: Literal[True] | None = None
    dns_policy: Literal["ClusterFirst", "ClusterFirstWithHostNet"] | None = None


class PodTemplate(Part):
    metadata: Metadata
    spec: PodSpec


class Head(Part):
    ray_start_params: Text
    template: PodTemplate


class Workers(Part):
    group_name: str
    replicas: int
    min_replicas: int
    max_replicas: int
    ray_start_params: Text
    template: PodTemplate


class Auth(Part):
    mode: Literal["disabled", "token"]
    secret_name: str | None = None


class Cluster(Part):
    ray_version: str
    auth_options: Auth
    head_group_spec: Head
    worker_group_specs: list[Workers] | None = None


class Spec(Part):
    submission_mode: Literal["InteractiveMode", "K8sJobMode", "HTTPMode", "SidecarMode"]
    entrypoint: str | None = None
    job_id: str | None = None
    metadata: Text | None = None
    backoff_limit: Literal[0] = 0
    pre_running_deadline_seconds: Annotated[int, Field(ge=1)] | None = None
    active_deadline_seconds: Annotated[int, Field(ge=1)] | None = None
    shutdown_after_job_finishes: Literal[True] = True
    ttl_seconds_after_finished: Annotated[int, Field(ge=0)]
    suspend: bool | None = None
    submitter_pod_template: PodTemplate | None = None
    ray_cluster_spec: Cluster


class RayJob(Part):
    api_version: Literal["ray.io/v1"] = "ray.io/v1"
    kind: Literal["RayJob"] = "RayJob"
    metadata: Metadata
    spec: Spec
