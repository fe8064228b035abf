"""What nodes are like: device, image, resources, environment. Data in `profiles/*.yaml` and a folder of your own."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

from corral.errors import ConfigError
from corral.job.protocol import names
from corral.job.protocol.submit import Quantity, Seconds
from corral.job.service.settings import Settings

SHIPPED = Path(__file__).parent / "profiles"
EXTENDS = "extends"
LARGEST = 256 << 10  # bytes of a file
# They are right on one node, or in one process, at most: Corral, Ray and the device plugin find them there.
OF_ONE_NODE = frozenset(
    {"HCCL_IF_IP", "RANK_TABLE_FILE", "ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"}
    | {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)
_LOADERS = ("LD_PRELOAD", "LD_AUDIT", "BASH_ENV", "PYTHONSTARTUP")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
_START = re.compile(r"[A-Za-z0-9._:/=,@+-]*")  # the operator pastes values into a shell command
_DERIVED = ("address", "block", "head", "labels", "num-cpus", "num-gpus", "resources")
_SCALE = {"": Decimal(1), "m": Decimal("0.001"), "k": Decimal(1000)}
_SCALE |= {letter: Decimal(1000**power) for power, letter in enumerate("KMGTPE", 1)}
_SCALE |= {f"{letter}i": Decimal(1024**power) for power, letter in enumerate("KMGTPE", 1)}

Label = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$")]
Key = Annotated[
    str,
    StringConstraints(
        pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$"
    ),
]
Dns = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
Folder = Annotated[str, StringConstraints(pattern=r"^(/[A-Za-z0-9._-]+)+$", max_length=200)]
Id = Annotated[int, Field(ge=0, le=2**31 - 1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Accelerator(_Part):
    """resource: as the cluster's device plugin names it, "huawei.com/Ascend910" for one. ray: as Ray counts it.
    per_node: the most that one node has; None: not checked here."""

    resource: Annotated[str, StringConstraints(pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]{1,63}$")]
    ray: Literal["GPU", "NPU"]
    per_node: Annotated[int, Field(ge=1, le=64)] | None = None


class Mount(_Part):
    """A folder or file of the containers: of the host, or of a claim that is there already (PersistentVolumeClaim)."""

    path: Folder
    host: Folder | None = None
    type: Literal["", "Directory", "DirectoryOrCreate", "File", "CharDevice", "Socket"] = ""
    claim: Dns | None = None
    sub_path: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*$")] | None = None
    read_only: bool = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.host is None) == (self.claim is None):
            raise ValueError(f"mount {self.path} has to name either `host`, a path of the host, or `claim`")
        if self.type and self.host is None:
            raise ValueError(f"mount {self.path}: `type` is of a path of the host; leave it out")
        if ".." in f"{self.path}/{self.host or ''}/{self.sub_path or ''}".split("/"):
            raise ValueError(f"mount {self.path} holds `..`; write the path out")
        return self


class Ports(_Part):
    """For nodes on the host's network: [first, last] in blocks of `block` ports, one block a job."""

    first: Annotated[int, Field(ge=1024, le=65535)] = 20000
    last: Annotated[int, Field(ge=1024, le=65535)] = 29999
    block: Annotated[int, Field(ge=64, le=10_000)] = 500

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.last - self.first + 1 < self.block:
            raise ValueError(f"ports {self.first}-{self.last} hold no block of {self.block}; widen the range")
        return self


class Toleration(_Part):
    """As Kubernetes has it."""

    key: Key | None = None
    operator: Literal["Exists", "Equal"] = "Exists"
    value: Label | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


class HeadNode(_Part):
    """Of a head that is a node of its own, without devices."""

    cpu: Quantity = "4"
    memory: Quantity = "16Gi"
    shm: Quantity = "4Gi"


class Waits(_Part):
    """Deadlines of jobs that set none themselves, in seconds. See corral.job.protocol.submit.Timeouts."""

    queue: Seconds | None = None
    start: Seconds | None = None
    run: Seconds | None = None
    idle: Seconds | None = None
    hang: Seconds | None = None


class NodeProfile(_Part):
    """docs/profiles.md describes each key. env is used by every backend, as are kind and timeouts; all else is of
    backends that make nodes. cpu None: as many as the node has devices."""

    name: str
    about: str = ""
    kind: Literal["cpu", "gpu", "npu"]
    accelerator: Accelerator | None = None
    image: Annotated[str, StringConstraints(pattern=rf"^({names.IMAGE.pattern})?$")] = ""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    image_pull_secrets: tuple[Dns, ...] = ()
    ray_version: Annotated[str, StringConstraints(pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$")] = "2.60.0"
    ray_start_params: dict[str, str] = Field(default_factory=dict)
    cpu: Quantity | None = None
    memory: Quantity = "16Gi"
    shm: Quantity = "4Gi"
    head: HeadNode = HeadNode()
    env: dict[str, str] = Field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    docker_runtime: bool = True
    driver_mounts: tuple[Mount, ...] = ()
    runtime_class: Dns | None = None
    host_network: bool = False
    ports: Ports = Ports()
    node_selector: dict[Key, Label] = Field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    pod_labels: dict[Key, Label] = Field(default_factory=dict)
    pod_annotations: dict[Key, str] = Field(default_factory=dict)
    priority_class: Dns | None = None
    spread: Literal["required", "preferred", "off"] = "required"
    run_as_user: Annotated[int, Field(ge=1, le=2**31 - 1)] = 1000
    run_as_group: Id | None = None
    fs_group: Id | None = None
    groups: tuple[Id, ...] = ()
    keep: Annotated[int, Field(ge=0, le=24 * 3600)] = 300
    timeouts: Waits = Waits()

    @field_validator("env")
    @classmethod
    def _env(cls, env: dict[str, str]) -> dict[str, str]:
        for variable, value in env.items():
            if variable in OF_ONE_NODE:
                raise ValueError(f"{variable} is right on one node at most, and found out on each; leave it out")
            if not names.ENV_NAME.fullmatch(variable) or "\0" in value:
                raise ValueError(f"{variable[:80]!r} is not a variable name, or its value holds a NUL byte")
            if variable in _LOADERS or variable.startswith(("CORRAL_AGENT_", "CORRAL_JOB_", "RAY_AUTH_")):
                raise ValueError(f"{variable} controls the loader, the shell or Corral itself; leave it out")
        connect, execute = (env.get(f"HCCL_{what}_TIMEOUT", "") for what in ("CONNECT", "EXEC"))
        if connect.isdigit() and not 120 <= int(connect) <= 7200:
            raise ValueError(f"HCCL_CONNECT_TIMEOUT={connect} is outside of 120 to 7200, which is what HCCL takes")
        if connect.isdigit() and execute.isdigit() and 0 < int(execute) <= int(connect):
            raise ValueError(f"HCCL_EXEC_TIMEOUT={execute} has to be over HCCL_CONNECT_TIMEOUT={connect}; raise it")
        return env

    @field_validator("ray_start_params")
    @classmethod
    def _start(cls, params: dict[str, str]) -> dict[str, str]:
        for option, value in params.items():
            if option in _DERIVED or option.endswith("-port"):
                raise ValueError(f"{option} follows from the job and the other fields; leave it out")
            if not re.fullmatch(r"[a-z][a-z0-9-]{0,62}", option) or not _START.fullmatch(value):
                raise ValueError(
                    f"{option[:80]!r} is no option of `ray start`, or its value holds more than letters, "
                    "digits and ._:/=,@+-"
                )
        return params

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.accelerator is None) != (self.kind == "cpu"):
            fix = "has none; leave `accelerator` out" if self.kind == "cpu" else "needs an `accelerator`: resource, ray"
            raise ValueError(f"kind {self.kind} {fix}")
        if self.accelerator and self.accelerator.ray.lower() != self.kind:
            raise ValueError(f"kind {self.kind} with accelerator.ray {self.accelerator.ray}; make them agree")
        for who, part in (("", self), ("head.", self.head)):
            if amount(part.shm) > amount(part.memory):
                raise ValueError(
                    f"{who}shm {part.shm} is over {who}memory {part.memory}, which it is taken from; raise that"
                )
        paths = [mount.path for mount in self.mounts_used()]
        if twice := {path for path in paths if paths.count(path) > 1 or path == "/dev/shm"}:
            raise ValueError(f"{sorted(twice)[0]} is mounted twice; keep one of them (/dev/shm is `shm`)")
        return self

    def mounts_used(self) -> tuple[Mount, ...]:
        """With the container runtime of the accelerator's vendor none of the driver has to be mounted."""
        return self.mounts if self.docker_runtime else (*self.mounts, *self.driver_mounts)


def amount(quantity: str) -> Decimal:
    """A Kubernetes quantity as a number: "512Gi" in bytes, "500m" as 0.5. Raises ValueError for what is none."""
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)([a-zA-Z]{0,2})", quantity)
    if found is None or found[2] not in _SCALE:
        raise ValueError(f"{quantity[:40]!r} is no quantity, as 500m, 64 or 512Gi are")
    return Decimal(found[1]) * _SCALE[found[2]]


def profile_names(folder: Path | None) -> list[str]:
    """Of Corral's profiles and of those in `folder`."""
    found = {path.stem for where in _folders(folder) for path in where.glob("*.yaml") if _NAME.fullmatch(path.stem)}
    return sorted(found)


def load(name: str, folder: Path | None) -> NodeProfile:
    """The profile of this name, what it extends included. Raises ConfigError: file, key, what is wrong, the fix."""
    path = _find(name, _folders(folder))
    if path is None:
        known = ", ".join(profile_names(folder))
        raise ConfigError(f"profile {name[:80]!r} is not known here; there are {known}")
    content = _content(path, _folders(folder), ())
    if "name" in content:
        raise ConfigError(f"{path}: name is the file's own, {name}; leave the key out")
    try:
        return NodeProfile.model_validate(content | {"name": name})
    except ValidationError as error:
        raise ConfigError(f"{path}: {_line(error)}") from None


def profile_of(name: str | None, kind: str, settings: Settings) -> NodeProfile:
    """The profile a job gets. name None: the settings' own when its kind fits, else the only one of that kind.

    Raises ConfigError for one that is not known, or does not fit the kind asked for.
    """
    folder = settings.nodes.profiles_dir
    found = load(name or settings.kubernetes.profile, folder)
    if kind in ("auto", found.kind):
        return found
    if name is not None:
        raise ConfigError(f"profile {name} is of kind {found.kind}, and the job asks for {kind}; leave one of them out")
    fitting = [each for each in profile_names(folder) if load(each, folder).kind == kind]
    if len(fitting) == 1:
        return load(fitting[0], folder)
    known = ", ".join(fitting) or f"none of kind {kind} here"
    raise ConfigError(f"kind {kind} does not say what the nodes are like; name a profile (--profile): {known}")


def asked_profile(name: str | None, kind: str, settings: Settings) -> NodeProfile | None:
    """As profile_of; None where no profile is named and the backend makes no nodes that would need one."""
    if name is None and settings.backend != "kuberay":
        return None
    return profile_of(name, kind, settings)


def shown(profile: NodeProfile) -> str:
    """As YAML, with every key; a file of that content, without its name, is the same profile."""
    content = profile.model_dump(mode="json", exclude_none=True, exclude={"name"})
    text: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    return text


def _folders(folder: Path | None) -> list[Path]:
    """Where to look, best first. Raises ConfigError for a folder that is not there."""
    if folder is None:
        return [SHIPPED]
    if not folder.expanduser().is_dir():
        raise ConfigError(f"profiles folder {folder} does not exist; make it, or leave --profiles-dir out")
    return [folder.expanduser(), SHIPPED]


def _find(name: str, folders: list[Path]) -> Path | None:
    if not _NAME.fullmatch(name):
        return None
    return next((path for folder in folders if (path := folder / f"{name}.yaml").is_file()), None)


def _content(path: Path, folders: list[Path], seen: tuple[Path, ...]) -> dict[str, Any]:
    content = dict(_read(path, path.stat().st_mtime_ns))
    base = content.pop(EXTENDS, None)
    if base is None:
        return content
    if not isinstance(base, str):
        raise ConfigError(f"{path}: extends has to be the name of one profile")
    # One that extends its own name means Corral's of that name, as do all that are found in Corral's folder.
    places = folders[folders.index(path.parent) + 1 :] if base == path.stem else folders
    below = _find(base, places)
    if below is None:
        raise ConfigError(f"{path}: extends {base[:80]!r}, which is not known; there are {', '.join(_known(folders))}")
    if below in seen or below == path:
        raise ConfigError(f"{path}: extends {base}, which extends this one; end the circle")
    return _merged(_content(below, folders, (*seen, path)), content)


def _known(folders: list[Path]) -> list[str]:
    return sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings key by key, anything else as a whole; null takes a key away."""
    found = dict(below)
    for key, value in above.items():
        if value is None:
            found.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(found.get(key), Mapping):
            found[key] = _merged(found[key], value)
        else:
            found[key] = value
    return found


@lru_cache(64)
def _read(path: Path, changed: int) -> dict[str, Any]:
    """changed: time of the file's last change, so that a new content is read."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise ConfigError(f"{path}: is over {LARGEST >> 10} KiB, which no profile is; keep other files elsewhere")
        content = yaml.safe_load(data.decode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: also a date that is none
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{path}: has to be a mapping of a profile's keys; see docs/profiles.md")
    return content


def _line(error: ValidationError) -> str:
    # A misspelt key comes first: what is missing is often what was meant.
    problem = min(error.errors(include_url=False), key=lambda each: each["type"] != "extra_forbidden")
    place = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        return f"{place} is no key of a profile; see docs/profiles.md for those there are"
    if problem["type"] == "string_type":
        return f"{place}: {reprlib.repr(problem['input'])[:80]} has to be a text; put it in quotes"
    what = str(problem["msg"]).removeprefix("Value error, ")
    return f"{place}: {what}" if place else what
