"""The pods of a RayJob: what head, workers and submitter have in common, and what each has of its own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from corral.errors import ConfigError
from corral.job.backends.base import Placement
from corral.job.backends.kuberay import model as k8s
from corral.job.backends.profile import Mount, NodeProfile
from corral.job.backends.ray_jobs.attempt import STOP_SECONDS
from corral.job.protocol.agent import BOARDING, TOKEN
from corral.job.service.settings import Nodes, Settings

RAY_TOKEN_KEY = "auth_token"  # in the submission's Secret, where the Ray clusters ask for a token
SERVICE, SUBMISSION, PART = "corral.dev/service", "corral.dev/submission", "corral.dev/part"
SHM, AGENT = "shm", "agent"
_ENV = {
    "RAY_DEDUP_LOGS": "0",  # every line of every rank is kept
    "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS),
    "RAY_USAGE_STATS_ENABLED": "0",
}
_USUAL_PORTS = (("gcs-server", 6379), ("dashboard", 8265), ("client", 10001), ("metrics", 8080))
# On the host's network: (option of `ray start`, name of the port), one after the other from the start of the block.
_OF_HEAD = (("port", "gcs-server"), ("dashboard-port", "dashboard"), ("ray-client-server-port", "client"))
_OF_NODE = (
    ("metrics-export-port", "metrics"),
    ("dashboard-agent-listen-port", "agent-http"),
    ("dashboard-agent-grpc-port", "agent-grpc"),
    ("runtime-env-agent-port", "runtime-env"),
    ("node-manager-port", "node-manager"),
    ("object-manager-port", "object-manager"),
)
_RESERVED = 20  # of a block, for the ports above


@dataclass(frozen=True)
class Size:
    """Of one pod, in Kubernetes' notation."""

    cpu: str
    memory: str
    shm: str


@dataclass(frozen=True)
class Asked:
    """A submission with everything filled in. nodes: with `devices` devices each; a separate head is one more. owner:
    of all that is made for it."""

    submission_id: str
    profile: NodeProfile
    image: str
    nodes: int
    devices: int
    node: Size
    placement: Placement
    settings: Settings
    owner: str

    @property
    def ray(self) -> str:
        """Ray's name of the device."""
        return "CPU" if self.profile.accelerator is None else self.profile.accelerator.ray


def head(asked: Asked) -> k8s.PodTemplate:
    """The pod of Ray's head: one of the nodes, or one without devices. What its agent is told is in the Secret of the
    submission's name, under the names of the variables."""
    env = [k8s.EnvVar(name=name, value_from=_secret(asked.submission_id, name)) for name in (TOKEN, BOARDING)]
    if asked.placement.head == "shared":
        return _template(asked, "ray-head", asked.node, asked.devices, env)
    own = asked.profile.head
    return _template(asked, "ray-head", Size(own.cpu, own.memory, own.shm), 0, env)


def worker(asked: Asked) -> k8s.PodTemplate:
    """The pod of every other node."""
    return _template(asked, "ray-worker", asked.node, asked.devices, [])


def submitter(asked: Asked) -> k8s.PodTemplate:
    """In K8sJobMode: the pod that runs `ray job submit`. The operator fills in its command."""
    few = {"cpu": "1", "memory": "1Gi"}
    container = k8s.Container(
        name="ray-job-submitter",
        image=asked.image,
        image_pull_policy=asked.profile.image_pull_policy,
        resources=k8s.Amounts(requests=few, limits=few),
        security_context=_container_security(),
    )
    return k8s.PodTemplate(
        metadata=k8s.Metadata(labels=_owned(asked) | {PART: "submitter"}),
        spec=k8s.PodSpec(
            containers=[container],
            security_context=_pod_security(asked.profile),
            service_account_name=asked.settings.kubernetes.service_account,
            image_pull_secrets=_pull_secrets(asked.profile),
        ),
    )


def port_params(asked: Asked, *, head: bool) -> dict[str, str]:
    """Ports as options of `ray start`, for nodes on the host's network; {} elsewhere, where each pod has all ports.

    Head and nodes have ports of their own, so that a head without devices may share a host with a node.
    """
    if not asked.profile.host_network:
        return {}
    first = _block(asked)
    params = {option: str(port) for option, _, port in _own_ports(first, head)}
    low = first + _RESERVED + (0 if head else _half(asked))
    return params | {"min-worker-port": str(low), "max-worker-port": str(low + _half(asked) - 1)}


def worker_ports(asked: Asked) -> int | None:
    """The most processes of Ray that one node has ports for; None where pods have all ports."""
    return _half(asked) if asked.profile.host_network else None


def _half(asked: Asked) -> int:
    return (asked.profile.ports.block - _RESERVED) // 2


def _block(asked: Asked) -> int:
    """The first of the job's ports: of a block chosen by the submission's name.

    Two jobs may choose the same block. The ports are declared, so Kubernetes then puts them on different hosts.
    """
    ports = asked.profile.ports
    blocks = (ports.last - ports.first + 1) // ports.block
    chosen = int.from_bytes(hashlib.sha256(asked.submission_id.encode()).digest()[:4], "big") % blocks
    return ports.first + chosen * ports.block


def _own_ports(first: int, head: bool) -> list[tuple[str, str, int]]:
    named = [*_OF_HEAD, *_OF_NODE] if head else [*_OF_NODE]
    first += 0 if head else len(_OF_HEAD) + len(_OF_NODE)
    return [(option, name, first + index) for index, (option, name) in enumerate(named)]


def _template(asked: Asked, name: str, size: Size, devices: int, env: list[k8s.EnvVar]) -> k8s.PodTemplate:
    profile, kubernetes = asked.profile, asked.settings.kubernetes
    amounts = {"cpu": size.cpu, "memory": size.memory}
    if devices and profile.accelerator is not None:
        amounts[profile.accelerator.resource] = str(devices)
    volumes, mounts = _volumes(asked, size, devices)
    container = k8s.Container(
        name=name,
        image=asked.image,
        image_pull_policy=profile.image_pull_policy,
        env=env + _env(asked),
        resources=k8s.Amounts(requests=dict(amounts), limits=dict(amounts)),
        ports=_ports(asked, name == "ray-head"),
        volume_mounts=mounts,
        security_context=_container_security(),
    )
    part = "node" if devices else "head"
    spec = k8s.PodSpec(
        containers=[container],
        volumes=volumes,
        security_context=_pod_security(profile),
        service_account_name=kubernetes.service_account,
        image_pull_secrets=_pull_secrets(profile),
        node_selector=dict(profile.node_selector) or None,
        tolerations=[k8s.Toleration.model_validate(each.model_dump()) for each in profile.tolerations] or None,
        affinity=_apart(asked) if devices else None,
        runtime_class_name=profile.runtime_class if devices else None,
        priority_class_name=profile.priority_class,
        host_network=True if profile.host_network else None,
        dns_policy="ClusterFirstWithHostNet" if profile.host_network else None,
    )
    labels = {**profile.pod_labels, **_owned(asked), PART: part}
    return k8s.PodTemplate(
        metadata=k8s.Metadata(labels=labels, annotations=dict(profile.pod_annotations) or None), spec=spec
    )


def _owned(asked: Asked) -> dict[str, str]:
    """By which its pods are found, and told from those of another service."""
    return {SERVICE: asked.owner, SUBMISSION: asked.submission_id}


def _env(asked: Asked) -> list[k8s.EnvVar]:
    """Of every Ray container: Ray's settings, the profile's variables, the job's secrets by reference."""
    plain = [k8s.EnvVar(name=name, value=value) for name, value in (_ENV | asked.profile.env).items()]
    held = asked.settings.kubernetes.secrets
    known = [name for name in asked.placement.secrets if name in held]
    if twice := [name for name in known if name in asked.profile.env]:
        raise ConfigError(f"{twice[0]} is a secret and in env of profile {asked.profile.name}; keep one of them")
    return plain + [k8s.EnvVar(name=name, value_from=_reference(name, held[name])) for name in known]


def _reference(name: str, place: str) -> k8s.EnvSource:
    secret, slash, key = place.partition("/")
    if not (secret and slash and key) or "/" in key:
        raise ConfigError(f"kubernetes.secrets: {name} is to be NAME/KEY of a Kubernetes secret, not {place[:80]!r}")
    return _secret(secret, key)


def _secret(name: str, key: str) -> k8s.EnvSource:
    return k8s.EnvSource(secret_key_ref=k8s.SecretKey(name=name, key=key))


def _volumes(asked: Asked, size: Size, devices: int) -> tuple[list[k8s.Volume], list[k8s.VolumeMount]]:
    """/dev/shm comes first, so that patches can rely on its place. A driver is mounted where its devices are."""
    volumes = [k8s.Volume(name=SHM, empty_dir=k8s.EmptyDir(medium="Memory", size_limit=size.shm))]
    mounts = [k8s.VolumeMount(name=SHM, mount_path="/dev/shm")]
    shared = asked.profile.mounts_used() if devices else asked.profile.mounts
    folder = asked.settings.nodes.agent_dir
    if folder == Nodes().agent_dir and folder not in [mount.path for mount in shared]:
        volumes.append(k8s.Volume(name=AGENT, empty_dir=k8s.EmptyDir()))
        mounts.append(k8s.VolumeMount(name=AGENT, mount_path=folder))
    for index, mount in enumerate(shared):
        name = f"mount-{index}"
        volumes.append(_volume(name, mount))
        mounts.append(
            k8s.VolumeMount(
                name=name, mount_path=mount.path, sub_path=mount.sub_path, read_only=True if mount.read_only else None
            )
        )
    return volumes, mounts


def _volume(name: str, mount: Mount) -> k8s.Volume:
    if mount.host is not None:
        return k8s.Volume(name=name, host_path=k8s.HostPath(path=mount.host, type=mount.type or None))
    assert mount.claim is not None
    claim = k8s.Claim(claim_name=mount.claim, read_only=True if mount.read_only else None)
    return k8s.Volume(name=name, persistent_volume_claim=claim)


def _ports(asked: Asked, head: bool) -> list[k8s.ContainerPort] | None:
    if asked.profile.host_network:
        named = [(name, port) for _, name, port in _own_ports(_block(asked), head)]
    elif head:
        named = list(_USUAL_PORTS)
    else:
        return None
    return [k8s.ContainerPort(name=name, container_port=port) for name, port in named]


def _apart(asked: Asked) -> k8s.Affinity | None:
    """Two nodes of one job on one host would not be two nodes."""
    if asked.profile.spread == "off" or asked.nodes == 1:
        return None
    term = k8s.PodTerm(
        label_selector=k8s.Selector(match_labels={SUBMISSION: asked.submission_id, PART: "node"}),
        topology_key="kubernetes.io/hostname",
    )
    if asked.profile.spread == "required":
        return k8s.Affinity(
            pod_anti_affinity=k8s.AntiAffinity(required_during_scheduling_ignored_during_execution=[term])
        )
    weighted = k8s.WeightedTerm(weight=100, pod_affinity_term=term)
    return k8s.Affinity(
        pod_anti_affinity=k8s.AntiAffinity(preferred_during_scheduling_ignored_during_execution=[weighted])
    )


def _pod_security(profile: NodeProfile) -> k8s.PodSecurity:
    return k8s.PodSecurity(
        run_as_user=profile.run_as_user,
        run_as_group=profile.run_as_group,
        fs_group=profile.fs_group,
        supplemental_groups=list(profile.groups) or None,
        seccomp_profile=k8s.Seccomp(type="RuntimeDefault"),
    )


def _container_security() -> k8s.ContainerSecurity:
    return k8s.ContainerSecurity(capabilities=k8s.Capabilities(drop=["ALL"]))


def _pull_secrets(profile: NodeProfile) -> list[k8s.Named] | None:
    return [k8s.Named(name=name) for name in profile.image_pull_secrets] or None
