"""Between the service and the agent, the entrypoint inside a job."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zlib
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from corral import __version__
from corral.errors import ConfigError, InfraError
from corral.job.protocol.preflight import Preflight

DRIVER = "driver"  # the source that is the command's own stdout and stderr, in the order they were written
PROTOCOL = 1  # of service and agent; it grows with every change that one of them has to know of
BOARDING, TOKEN = "CORRAL_AGENT_BOARDING", "CORRAL_AGENT_TOKEN"  # variables of an agent that joins
_LARGEST_BOARDING = 16 << 20  # bytes, unpacked


class AgentSpec(BaseModel):
    """All an agent needs, in `spec.json` of the attempt's folder (mode 0600: it holds a token and resolved secrets).

    command: argument list, already resolved (`bash SCRIPT ARG ...`); run in `cwd`, relative to the attempt's folder or
    absolute. bundle: digest that `source/` is unpacked from and checked against; None: no bundle. env: as asked for;
    secrets: resolved, added to env, and redacted from all output.
    script: file that has to be there before the command starts (after unpacking), for a clear message.
    kind: of the devices. preflight: what the nodes are checked for before the command starts; None: not at all.
    """

    model_config = ConfigDict(extra="forbid")

    job_id: str
    attempt: int
    submission_id: str
    service_url: str
    token: str
    command: list[str]
    cwd: str
    script: str | None = None
    bundle: str | None = None
    bundle_path: str | None = None
    nodes: int
    devices_per_node: int
    kind: Literal["auto", "cpu", "gpu", "npu"] = "auto"
    preflight: Preflight | None = None
    env: dict[str, str] = Field(default_factory=dict)
    secrets: dict[str, str] = Field(default_factory=dict)


class Boarding(BaseModel):
    """What an agent is started with on nodes that do not see the service's disk: zlib, then base64, in the variable
    CORRAL_AGENT_BOARDING. It is readable to whoever may look at the cluster's jobs, so it holds no secret.

    spec: with an empty token, which is in CORRAL_AGENT_TOKEN, and without secrets. root: folder of attempts on the
    nodes. join: secrets or a bundle have to be fetched from the service before anything starts.
    secret_env: names of secrets that are in the agent's environment already (put there by the cluster).
    patience: seconds of trying to reach the service for what has to be fetched. protocol, version: of the service.
    """

    model_config = ConfigDict(extra="forbid")

    spec: AgentSpec
    root: str
    join: bool
    secret_env: list[str] = Field(default_factory=list)
    patience: float = Field(default=120.0, gt=0)
    protocol: int = PROTOCOL
    version: str = __version__

    def encode(self) -> str:
        """The value of the variable."""
        return base64.b64encode(zlib.compress(self.model_dump_json().encode(), 9)).decode()

    @classmethod
    def decode(cls, text: str) -> Self:
        """Raises InfraError for what no service wrote, Misfit for what a service of another protocol wrote."""
        try:
            fields = json.loads(
                zlib.decompressobj().decompress(base64.b64decode(text, validate=True), _LARGEST_BOARDING)
            )
            version, protocol = fields["version"], fields["protocol"]
        except (zlib.error, binascii.Error, ValueError, KeyError, TypeError):
            raise InfraError(f"{BOARDING} holds nothing that a service wrote") from None
        if protocol != PROTOCOL:
            raise Misfit(version, protocol, fields)
        try:
            return cls.model_validate(fields)
        except ValidationError:  # without the values
            raise Misfit(version, protocol, fields) from None


class Misfit(ConfigError):
    """Service and agent do not understand each other. boarding: as it was written."""

    def __init__(self, version: object, protocol: object, boarding: Mapping[str, Any]) -> None:
        super().__init__(misfit(__version__, PROTOCOL, version, protocol))
        self.boarding = boarding


def misfit(image: object, image_protocol: object, service: object, service_protocol: object) -> str:
    """One line about versions that do not fit."""
    return (
        f"the image has corral {image} (agent protocol {image_protocol}), the service {service} ({service_protocol}); "
        "use an image with the version of the service"
    )


class Join(BaseModel):
    """Body of POST /api/v1/agent/{job_id}/join. protocol, version: of the agent."""

    model_config = ConfigDict(extra="forbid")

    attempt: int
    protocol: int = PROTOCOL
    version: str = Field(default=__version__, max_length=64)


class Joined(BaseModel):
    """The answer to POST /api/v1/agent/{job_id}/join, until the agent of the attempt has been heard."""

    secrets: dict[str, str] = Field(default_factory=dict)


class LogChunk(BaseModel):
    """Consecutive lines of one source: the bytes [start, end) of its raw file. `start` is where the last stored chunk
    ended, else the service answers 409 with its watermark. rank None: the driver."""

    model_config = ConfigDict(extra="forbid")

    source: str = Field(pattern=r"^(driver|node-[0-9]{1,4}/rank-[0-9]{1,5})$")
    node: int | None = None
    rank: int | None = None
    start: int = Field(ge=0)
    end: int = Field(ge=0)
    lines: list[str] = Field(max_length=20_000)
    offsets: list[int] = Field(max_length=20_000)

    @model_validator(mode="after")
    def _check(self) -> Self:
        place = "driver" if self.rank is None and self.node is None else f"node-{self.node}/rank-{self.rank}"
        if self.source != place:
            raise ValueError(f"source {self.source} with node={self.node} and rank={self.rank}")
        if len(self.lines) != len(self.offsets):
            raise ValueError(f"{len(self.lines)} lines with {len(self.offsets)} offsets")
        bounds = [self.start, *self.offsets, self.end]
        if any(one > other for one, other in pairwise(bounds)):
            raise ValueError(f"offsets do not grow from start={self.start} to end={self.end}")
        try:
            "".join(self.lines).encode()
        except UnicodeEncodeError:
            raise ValueError("a line holds half of a surrogate pair, which UTF-8 cannot write") from None
        return self


class LogBatch(BaseModel):
    """Body of POST /api/v1/agent/{job_id}/logs; at most 4 MiB."""

    model_config = ConfigDict(extra="forbid")

    attempt: int
    chunks: list[LogChunk] = Field(max_length=64)


class Watermarks(BaseModel):
    """Byte offset per source up to which lines are stored; also the 409 answer to a chunk that does not fit."""

    watermarks: dict[str, int]


class RankProgress(BaseModel):
    """One progress/rank-R.json. calls only grows while the rank works; time is Unix seconds of its last change."""

    model_config = ConfigDict(extra="ignore")

    rank: int
    node: int
    calls: int
    state: str
    method: str = ""
    time: float


class Heartbeat(BaseModel):
    """Body of POST /api/v1/agent/{job_id}/heartbeat, every 2 s and at once on a change of phase.

    output_bytes: raw bytes of all sources so far. progress: the sum of all ranks' counters; None when the command keeps
    none. suspects: what the agent sees of ranks that stand still (a stopped process), for the verdict of a hang.
    """

    model_config = ConfigDict(extra="forbid")

    attempt: int
    phase: Literal["preflight", "running", "collecting"]
    output_bytes: int = 0
    progress: int | None = None
    ranks: list[RankProgress] = Field(default_factory=list, max_length=4096)
    suspects: list[str] = Field(default_factory=list, max_length=64)


class Orders(BaseModel):
    """The answer to a heartbeat. stop: end the command (SIGTERM, then SIGKILL after grace seconds)."""

    stop: bool = False
    grace: float = 3.0


class EndRecord(BaseModel):
    """How the command ended: written to `end.json` of the attempt's folder first, then posted to /end.

    failure: the agent never started the command (preflight) or could not; then exit_code is None and kind says whose
    failure it is. digest: hex SHA-256 of the canonical JSON of all other fields, so that half a record is none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    job_id: str
    attempt: int
    exit_code: int | None
    failure: str | None = None
    kind: Literal["config", "infra"] | None = None
    failing_rank: int | None = None
    failing_node: int | None = None
    first_error: str | None = None
    bundle: str | None = None
    started: float
    ended: float
    sources: dict[str, int] = Field(default_factory=dict)
    digest: str = ""

    def sealed(self) -> Self:
        """The same record with its digest."""
        return self.model_copy(update={"digest": self._content_digest()})

    def is_whole(self) -> bool:
        """Whether the digest fits the content."""
        return self.digest == self._content_digest()

    def _content_digest(self) -> str:
        content = self.model_dump(mode="json", exclude={"digest"})
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
