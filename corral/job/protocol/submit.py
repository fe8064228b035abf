"""What a client asks for: the first protocol's fields unchanged, and what came after them."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StringConstraints,
    model_serializer,
    model_validator,
)

from corral.job.protocol import names
from corral.job.protocol.preflight import Preflight

Seconds = Annotated[float, Field(gt=0, le=30 * 24 * 3600)]
Text = Annotated[str, StringConstraints(max_length=1024)]
Quantity = Annotated[
    str, Field(coerce_numbers_to_str=True), StringConstraints(pattern=r"^[0-9]{1,9}(\.[0-9]{1,3})?(m|[KMGT]i?|k)?$")
]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$")]


class Resources(BaseModel):
    """Nodes and devices of a job. `kind` is a name of the backend's profile: auto, cpu, gpu, npu.

    cpu, memory, shm: of each node, in Kubernetes' notation ("64", "500m", "512Gi"); None: as the profile has it.
    """

    model_config = ConfigDict(extra="forbid")

    nodes: int = Field(1, ge=1, le=1024)
    accelerators_per_node: int = Field(1, ge=1, le=64)
    kind: Literal["auto", "cpu", "gpu", "npu"] = "auto"
    cpu: Quantity | None = None
    memory: Quantity | None = None
    shm: Quantity | None = None

    @model_serializer(mode="wrap")
    def _asked(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what was not asked for: requests from before these fields keep their digests."""
        return {name: value for name, value in whole(self).items() if value is not None}

    @property
    def devices(self) -> int:
        return self.nodes * self.accelerators_per_node


class Timeouts(BaseModel):
    """Five separate deadlines, in seconds; None: none. queue: until admitted. start: from admission until the command
    runs. run: of the command. idle: without any output. hang: while no progress counter of any rank moves."""

    model_config = ConfigDict(extra="forbid")

    queue: Seconds | None = 4 * 3600.0
    start: Seconds | None = 900.0
    run: Seconds | None = 4 * 3600.0
    idle: Seconds | None = None
    hang: Seconds | None = 1800.0


class Layout(BaseModel):
    """Where Ray's head is: on the first of the job's nodes, or on one of its own that has no devices."""

    model_config = ConfigDict(extra="forbid")

    head: Literal["shared", "separate"] = "shared"


class Patch(BaseModel):
    """One operation of JSON Patch (RFC 6902) on the RayJob that the service makes; for what has no field of its own."""

    model_config = ConfigDict(extra="forbid")

    op: Literal["add", "replace", "remove", "test"]
    path: Annotated[str, StringConstraints(max_length=512, pattern=r"^/[^\x00-\x1f\x7f]*$")]
    value: Any = None


class Retry(BaseModel):
    """Further attempts after a failure of class infra; other failures are never tried again."""

    model_config = ConfigDict(extra="forbid")

    infra: int = Field(default=0, ge=0, le=5)


class SubmitRequest(BaseModel):
    """The body of POST /api/v1/rayjobs.

    script: relative to the root of `bundle`, or absolute under a configured source root when there is no bundle.
    command: instead of script, an argument list that is run from the root of the bundle.
    worker_replicas: nodes, in the first protocol; `resources` wins when both are given and they agree or it is absent.
    lease: seconds without a client heartbeat after which the job is cancelled; None: it goes on without a client.
    secrets: names, resolved by the service when the job starts, never part of a payload.
    preflight: check the nodes before the command starts, and fail the job where one is not fit; None: do not.
    profile: name of what its nodes are like; None: what the service has for `resources.kind`.
    layout, template_patches: see Layout and Patch; a backend that makes no such nodes refuses them.
    """

    model_config = ConfigDict(extra="forbid")

    repository: str = "local/local"
    commit_sha: str = "0000000"
    branch: Text = ""
    github_run_id: str = Field("local", coerce_numbers_to_str=True)
    github_run_attempt: int = Field(1, ge=1, le=10_000)
    image: str = ""
    name_suffix: str = "job"
    script: Text | None = None
    command: list[str] | None = Field(None, max_length=names.MAX_ARGS)
    args: list[str] = Field(default_factory=list, max_length=names.MAX_ARGS)
    env: dict[str, str] = Field(default_factory=dict, max_length=names.MAX_ENV)
    worker_replicas: int | None = Field(None, ge=1, le=1024)
    resources: Resources | None = None
    timeouts: Timeouts = Field(default_factory=lambda: Timeouts())
    retry: Retry = Field(default_factory=lambda: Retry())
    priority: int = Field(0, ge=-100, le=100)
    lease: Seconds | None = None
    bundle: str | None = None
    secrets: list[str] = Field(default_factory=list, max_length=64)
    labels: dict[str, str] = Field(default_factory=dict, max_length=names.MAX_LABELS)
    preflight: Preflight | None = None
    profile: Name | None = None
    layout: Layout | None = None
    template_patches: list[Patch] = Field(default_factory=list, max_length=64)
    dry_run: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = [*self._bad_names(), *self._bad_texts(), *self._bad_command(), *self._bad_env()]
        asked, replicas = self.resources, self.worker_replicas
        if asked and replicas not in (None, asked.nodes):
            if "nodes" in asked.model_fields_set:
                problems.append(f"worker_replicas={replicas} and resources.nodes={asked.nodes} differ; give one")
            else:
                self.resources = asked.model_copy(update={"nodes": replicas})
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def digest(self) -> str:
        """Hex SHA-256 of the canonical JSON of all that decides what runs; equal requests have equal digests."""
        content = self.model_dump(mode="json", exclude={"dry_run"})
        for name in _LATER:  # stored digests know nothing of them
            if not content[name]:
                del content[name]
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def _bad_names(self) -> list[str]:
        patterns = {
            "repository": names.REPOSITORY,
            "commit_sha": names.COMMIT_SHA,
            "github_run_id": names.RUN_ID,
            "name_suffix": names.NAME_SUFFIX,
        }
        found = [
            f"{field}={getattr(self, field)[:80]!r} does not match {pattern.pattern}"
            for field, pattern in patterns.items()
            if not pattern.fullmatch(getattr(self, field))
        ]
        if self.image and not names.IMAGE.fullmatch(self.image):
            found.append(f"image={self.image[:80]!r} does not match {names.IMAGE.pattern}")
        if self.bundle is not None and not names.DIGEST.fullmatch(self.bundle):
            found.append("bundle is not the hex SHA-256 of an uploaded source")
        for secret in self.secrets:
            if problem := names.env_problem(secret, ""):
                found.append(problem.replace("env", "secret", 1))
            elif secret in self.env:
                found.append(f"{secret} is in env and in secrets; give it once")
        return found

    def _bad_texts(self) -> list[str]:
        """Texts that people read in tables and that databases keep: printable, and UTF-8 can write them."""
        found = []
        for label, value in self.labels.items():
            if not names.LABEL.fullmatch(label) or len(value) > 256 or not value.isprintable():
                found.append(
                    f"label {label[:80]!r} does not match {names.LABEL.pattern}, "
                    "or its value is over 256 characters or holds a control character"
                )
        if not self.branch.isprintable():
            found.append("branch holds a control character")
        try:
            json.dumps(self.model_dump(), ensure_ascii=False).encode()
        except UnicodeEncodeError:
            found.append("a text holds half of a surrogate pair, which UTF-8 cannot write; send valid UTF-8")
        return found

    def _bad_command(self) -> list[str]:
        if (self.script is None) == (self.command is None):
            return ["give either script or command"]
        words = [*(self.command or []), *self.args]
        if self.command == []:
            return ["command is empty"]
        if self.command and self.bundle is None:
            return ["command needs a bundle to run in; without one, name a script under a configured source root"]
        if any("\0" in word or len(word.encode("utf-8", "surrogatepass")) > names.MAX_ARG_BYTES for word in words):
            return [f"an argument holds a NUL byte or is over {names.MAX_ARG_BYTES} bytes"]
        if self.script is None:
            return []
        if self.bundle is None and not self.script.startswith("/"):
            return [f"script {self.script[:80]!r} is relative; upload a bundle, or give its absolute path"]
        inside = self.script if self.bundle else self.script.lstrip("/")
        problem = names.relative_path_problem(inside)
        return [f"script: {problem}"] if problem else []

    def _bad_env(self) -> list[str]:
        found = [problem for name, value in self.env.items() if (problem := names.env_problem(name, value))]
        size = sum(len(name) + len(value.encode("utf-8", "surrogatepass")) for name, value in self.env.items())
        if size > names.MAX_ENV_BYTES:
            found.append(f"env has {size} bytes, the limit is {names.MAX_ENV_BYTES}; put data into files")
        return found


_LATER = ("preflight", "profile", "layout", "template_patches")


class Submitted(BaseModel):
    """The answer: 201 for a new job, 200 for the same key and digest."""

    job_id: str
    state: str
    created: bool
    notices: list[str] = Field(default_factory=list)
