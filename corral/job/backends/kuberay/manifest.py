"""The RayJob of a submission. Every field is explained in docs/kuberay-manifest.md."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import yaml

from corral.errors import ConfigError
from corral.job.backends.base import Placement
from corral.job.backends.kuberay import pods
from corral.job.backends.kuberay.model import Auth, Cluster, Head, Metadata, RayJob, Spec, Workers
from corral.job.backends.kuberay.patches import patched
from corral.job.backends.kuberay.rules import broken
from corral.job.backends.profile import NodeProfile, amount, profile_of
from corral.job.protocol.submit import Resources
from corral.job.service.settings import Settings

MANAGED_BY = "app.kubernetes.io/managed-by"
START_MARGIN = 60  # seconds: the service's own deadline comes first, and says more
END_MARGIN = 600  # seconds for what comes after the command: its output, its records, the end of its nodes
PROCESSES = 32  # of Ray on a node, besides one a CPU
NOBODY = "0" * 12
DRY = "rj-000000000000-a1"
_UNGATED = "the job may start before Ray has all of its nodes and devices"
LOST = {
    "K8sJobMode": f"{_UNGATED}, and fails with the pod that submitted it, however well it runs",
    "HTTPMode": f"{_UNGATED}, and an operator that finds a new head runs it again, whatever backoffLimit says",
    "SidecarMode": f"{_UNGATED}, and ends when a busy head restarts the container that submitted it",
}  # in the modes in which the operator submits
_HEADS = {"shared": "head on the first node", "separate": "head of its own"}


def manifest(
    submission_id: str, resources: Resources, placement: Placement, settings: Settings, owner: str
) -> dict[str, Any]:
    """A RayJob that the model, the operator's rules and the service's own limits have been looked at for.

    owner: of the label corral.dev/service. Raises ConfigError for what cannot be asked for: what, the numbers, the fix.
    """
    asked = asked_of(submission_id, resources, placement, settings, owner)
    cluster = Cluster(
        ray_version=asked.profile.ray_version,
        auth_options=_auth(asked),
        head_group_spec=_head(asked),
        worker_group_specs=_workers(asked),
    )
    job = RayJob(metadata=_metadata(asked), spec=_spec(asked, cluster))
    found = job.written()
    if problems := broken(found):
        raise ConfigError(f"the RayJob would be refused: {'; '.join(problems)}")
    return patched(found, asked) if placement.patches else found


def refusal(resources: Resources, placement: Placement, settings: Settings) -> str | None:
    """One line that says why there can be no RayJob for this; None when there can."""
    try:
        manifest(DRY, resources, placement, settings, NOBODY)
    except ConfigError as error:
        return str(error)
    return None


def to_yaml(found: dict[str, Any]) -> str:
    """For people and kubectl. Values keep their types: "4" is quoted, 4 is not."""
    mode = found["spec"].get("submissionMode")
    note = f"# {mode}: {LOST[mode]}.\n" if mode in LOST else ""
    text: str = yaml.dump(found, Dumper=_Dumper, sort_keys=False, width=10_000)
    return note + text


def asked_of(
    submission_id: str, resources: Resources, placement: Placement, settings: Settings, owner: str
) -> pods.Asked:
    """All that decides what the pods are like. Raises ConfigError."""
    profile = profile_of(placement.profile, resources.kind, settings)
    image = placement.image or profile.image or settings.kubernetes.image
    if not image:  # none comes with Corral: a name without a registry would be looked for where anybody can push
        raise ConfigError(
            f"profile {profile.name} names no image; give one with --image, or kubernetes.image to the service"
        )
    devices, most = resources.accelerators_per_node, profile.accelerator.per_node if profile.accelerator else None
    if most is not None and devices > most:
        raise ConfigError(
            f"{devices} devices a node asked for, and profile {profile.name} has {most}; ask for fewer, or more nodes"
        )
    node = pods.Size(
        cpu=resources.cpu or profile.cpu or str(devices),
        memory=resources.memory or profile.memory,
        shm=resources.shm or profile.shm,
    )
    _check(node, profile, devices)
    asked = pods.Asked(submission_id, profile, image, resources.nodes, devices, node, placement, settings, owner)
    if (most := pods.worker_ports(asked)) is not None and most < amount(node.cpu) + PROCESSES:
        raise ConfigError(
            f"ports.block {profile.ports.block} of profile {profile.name} leaves a node {most} ports for processes of "
            f"Ray, and {node.cpu} CPUs may have over {PROCESSES} more than CPUs; raise ports.block"
        )
    return asked


def _check(node: pods.Size, profile: NodeProfile, devices: int) -> None:
    if amount(node.shm) > amount(node.memory):
        raise ConfigError(f"shm {node.shm} is over memory {node.memory}, which it is taken from; ask for more memory")
    if min(amount(size) for size in (node.cpu, node.memory, node.shm)) <= 0:
        raise ConfigError(f"cpu {node.cpu}, memory {node.memory}, shm {node.shm}: each has to be over 0")
    if profile.kind == "cpu" and amount(node.cpu) < devices:
        raise ConfigError(f"{devices} devices are {devices} CPUs in profile {profile.name}, and cpu is {node.cpu}")


def _metadata(asked: pods.Asked) -> Metadata:
    kubernetes, about = asked.settings.kubernetes, asked.placement.about
    said = {f"corral.dev/{key}": text for key in sorted(about) if (text := label(about[key]))}
    labels = _labels(asked)
    labels = labels | said | labels | _queue(asked)
    if (priority_class := asked.profile.priority_class) is not None:
        labels["ray.io/priority-class-name"] = priority_class
    notes = {f"corral.dev/{key}": about[key] for key in sorted(about)}
    notes["corral.dev/profile"] = asked.profile.name
    notes["corral.dev/nodes"] = f"{asked.nodes} x {asked.devices} {asked.ray}, {_HEADS[asked.placement.head]}"
    return Metadata(name=asked.submission_id, namespace=kubernetes.namespace, labels=labels, annotations=notes)


def _labels(asked: pods.Asked) -> dict[str, str]:
    return {MANAGED_BY: "corral", pods.SERVICE: asked.owner, pods.SUBMISSION: asked.submission_id}


def label(text: str) -> str:
    """What of a text may be a label's value; "" when nothing may. The text itself belongs into an annotation."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:63].strip("_.-")


def _queue(asked: pods.Asked) -> dict[str, str]:
    """Labels by which a scheduler admits all pods of a job at once, or none."""
    scheduler, queue = asked.settings.kubernetes.scheduler, asked.settings.kubernetes.queue
    if queue is not None and label(queue) != queue:
        raise ConfigError(f"kubernetes.queue {queue[:80]!r} cannot be a label's value; give the queue's name")
    if scheduler == "volcano":
        return {} if queue is None else {"volcano.sh/queue-name": queue}
    if scheduler == "yunikorn":
        found = {"yunikorn.apache.org/app-id": asked.submission_id, "ray.io/gang-scheduling-enabled": "true"}
        return found if queue is None else found | {"yunikorn.apache.org/queue": queue}
    if scheduler == "kueue":
        if queue is None:
            raise ConfigError("kubernetes.scheduler kueue needs kubernetes.queue, the name of a LocalQueue")
        return {"kueue.x-k8s.io/queue-name": queue}
    if queue is not None:
        raise ConfigError(f"kubernetes.queue {queue} needs a kubernetes.scheduler: volcano, kueue or yunikorn")
    return {}


def _spec(asked: pods.Asked, cluster: Cluster) -> Spec:
    kubernetes, limits = asked.settings.kubernetes, asked.placement
    mode = kubernetes.submission
    by_operator = mode != "InteractiveMode"
    return Spec(
        submission_mode=mode,
        entrypoint=f"{asked.settings.nodes.python} -m corral.job.agent.join" if by_operator else None,
        job_id=asked.submission_id if by_operator else None,
        metadata=dict(limits.about) or None if by_operator else None,
        pre_running_deadline_seconds=None if limits.start is None else math.ceil(limits.start) + START_MARGIN,
        active_deadline_seconds=None
        if limits.start is None or limits.run is None
        else math.ceil(limits.start + limits.run) + START_MARGIN + END_MARGIN,
        ttl_seconds_after_finished=asked.profile.keep,
        suspend=True if kubernetes.scheduler == "kueue" else None,
        submitter_pod_template=pods.submitter(asked) if mode == "K8sJobMode" else None,
        ray_cluster_spec=cluster,
    )


def _auth(asked: pods.Asked) -> Auth:
    """Said either way: what Ray does by default differs by version."""
    if asked.settings.kubernetes.token_file is None:
        return Auth(mode="disabled")
    return Auth(mode="token", secret_name=asked.submission_id)


def _head(asked: pods.Asked) -> Head:
    params = {"dashboard-host": "0.0.0.0"}
    if asked.placement.head == "separate":
        params |= {"num-cpus": "0"} | ({"num-gpus": "0"} if asked.ray == "GPU" else {})
    else:
        params |= counts(asked)
    params |= asked.profile.ray_start_params | pods.port_params(asked, head=True)
    return Head(ray_start_params=params, template=pods.head(asked))


def _workers(asked: pods.Asked) -> list[Workers] | None:
    replicas = asked.nodes if asked.placement.head == "separate" else asked.nodes - 1
    if replicas == 0:
        return None
    group = Workers(
        group_name="node",
        replicas=replicas,
        min_replicas=replicas,
        max_replicas=replicas,
        ray_start_params=counts(asked) | asked.profile.ray_start_params | pods.port_params(asked, head=False),
        template=pods.worker(asked),
    )
    return [group]


def counts(asked: pods.Asked) -> dict[str, str]:
    """What Ray is told that a node has: the operator knows of no NPU, and no detection beats a number."""
    if asked.ray == "CPU":
        return {"num-cpus": str(asked.devices)}
    cpus = {"num-cpus": str(max(1, math.floor(amount(asked.node.cpu))))}
    if asked.ray == "GPU":
        return cpus | {"num-gpus": str(asked.devices)}
    # The operator writes it into a shell command: quotes inside quotes.
    return cpus | {"resources": json.dumps(json.dumps({asked.ray: asked.devices}))}


class _Dumper(yaml.SafeDumper):
    """Lists are indented under their key, as in Kubernetes' own examples."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True
