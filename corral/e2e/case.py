"""An end-to-end case: what to run, where, within what time, and what its records must show. Read by corral.e2e.read."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, StringConstraints, model_validator

Seconds = Annotated[float, Field(gt=0, le=30 * 24 * 3600)]
Text = Annotated[str, StringConstraints(min_length=1)]
Identifier = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]
Number = int | float


def _regex(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{text[:200]!r} is not a regular expression: {error}") from None
    return text


Regex = Annotated[str, AfterValidator(_regex)]


class Part(BaseModel):
    """No key is ignored, and nothing is guessed: `"4"` is no number, `4` is no text."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Topology(Part):
    """kind: of the devices. head: shared, node 0 is one of the nodes; separate, a further node without devices."""

    nodes: int = Field(default=1, ge=1, le=1024, description="Nodes.")
    devices_per_node: int = Field(default=1, ge=1, le=64, description="Devices of each node.")
    kind: Literal["auto", "cpu", "gpu", "npu"] = Field(default="auto", description="Of the devices.")
    head: Literal["shared", "separate"] = Field(default="shared", description="Is the head one of the nodes?")

    @property
    def world(self) -> int:
        return self.nodes * self.devices_per_node


class Need(Part):
    """A folder a run reads and never writes: made once by a corral command, or lying somewhere already. `{env.NAME}` in
    its texts is a variable of whoever runs the case."""

    make: list[str] | None = Field(default=None, description="Arguments of corral; {out} is the folder to fill.")
    revision: int = Field(default=1, ge=1, description="Raise it when the same arguments have to be made anew.")
    path: Text | None = Field(default=None, description="Or: a folder that every node has.")
    about: str = Field(default="", description="What it is and where to get it; shown when it is missing.")

    @model_validator(mode="after")
    def _one(self) -> Need:
        if (self.make is None) == (self.path is None):
            raise ValueError("give either make or path")
        if self.make is not None and not any("{out}" in argument for argument in self.make):
            raise ValueError("make has to say where to write, with {out}")
        return self


class Rollouts(Part):
    """Generations that are kept in the cache after a run that passed, and replayed by later runs ({rollouts})."""

    steps: list[int] = Field(min_length=1, description="Steps that are recorded and replayed.")
    revision: int = Field(default=1, ge=1, description="Raise it when what is generated has changed.")


class Deadlines(Part):
    """Seconds. prepare: one need, whose command gets `stop` to end after a signal. start: from having devices until
    the command runs. hang: no progress of any rank."""

    prepare: Seconds = 600.0
    queue: Seconds = 4 * 3600.0
    start: Seconds = 900.0
    run: Seconds = 3600.0
    idle: Seconds | None = None
    hang: Seconds | None = None
    stop: Seconds = 15.0


class Tolerance(Part):
    """Equal when |a - b| <= atol + rtol * |b|, b being the reference or the baseline."""

    rtol: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    atol: float = Field(default=0.0, ge=0, allow_inf_nan=False)


class Metrics(Part):
    """On metrics.jsonl. finite and within: on every line; trend: the last third's mean against the first third's."""

    finite: list[str] = Field(default_factory=list, description="Metrics every line has, as finite numbers.")
    within: dict[str, Annotated[list[Number], Field(min_length=2, max_length=2)]] = Field(
        default_factory=dict, description="Metric: [lowest, highest] on every line."
    )
    trend: dict[str, Literal["rises", "falls"]] = Field(default_factory=dict, description="Metric: rises or falls.")
    baseline: dict[str, Tolerance] = Field(
        default_factory=dict, description="Metric: tolerance against the committed baseline of the case."
    )

    @model_validator(mode="after")
    def _ordered(self) -> Metrics:
        for name, (low, high) in self.within.items():
            if not low <= high:
                raise ValueError(f"within {name}: [{low}, {high}] has to be [lowest, highest]")
        return self


class Expect(Part):
    """What must hold; each line of it is one test of the report. All are judged on records, never on what was shown."""

    status: Literal["SUCCEEDED", "FAILED", "TIMEOUT"] = "SUCCEEDED"
    exit_code: int | None = Field(default=None, description="Of the command; 0 when status is SUCCEEDED.")
    failure_class: str | None = Field(default=None, description="user, config, infra, timeout.")
    cause: str | None = Field(default=None, description="Of the verdict, such as hang.")
    failing_rank: int | None = None
    steps: int | None = Field(default=None, ge=0, description="Lines of metrics.jsonl.")
    plan: dict[str, JsonValue] = Field(default_factory=dict, description="Dotted path in plan.json: value.")
    metrics: Metrics = Field(default_factory=Metrics)
    ran: list[str] = Field(default_factory=list, description="Phases of trace.json that there must be.")
    not_ran: list[str] = Field(default_factory=list, description="Phases that there must not be.")
    files: list[str] = Field(default_factory=list, description="Patterns; each has to match a file of the records.")
    forbidden: list[Regex] = Field(default_factory=list, description="Regular expressions no log line may match.")
    rank_logs: bool = Field(default=False, description="A log of every rank of the topology.")
    seconds: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="The command takes at most so long."
    )
    memory_gib: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="Most memory of one rank, as it was recorded."
    )


class Parity(Part):
    """The same command once more with `args` appended, in one process unless they say otherwise, and equal results."""

    args: list[str] = Field(description="Appended to the arguments, so that they win.")
    env: dict[str, str] = Field(default_factory=dict)
    nodes: int = Field(default=1, ge=1)
    devices_per_node: int = Field(default=1, ge=1)
    rtol: float = Field(default=1e-9, ge=0, allow_inf_nan=False)
    atol: float = Field(default=1e-9, ge=0, allow_inf_nan=False)
    ignore: list[Text] = Field(default_factory=list, description="Prefixes of metrics that may differ.")


class Case(Part):
    """One case with its matrix expanded. Texts may hold {name} of a need, those of env {rollouts} and {run_dir} too."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]{0,62}$")]
    summary: Text
    tiers: list[Identifier] = Field(default_factory=lambda: ["pr"], min_length=1)
    topology: Topology = Field(default_factory=lambda: Topology())
    source: Text = Field(default=".", description="Folder that is sent: relative to the case's project.")
    paths: list[str] = Field(default_factory=list, description="Of it, only these files and folders; all when empty.")
    script: Text | None = Field(default=None, description="File of the source.")
    command: list[str] | None = Field(
        default=None, min_length=1, description="Or: program and arguments, run in the source."
    )
    args: list[str] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)
    secrets: list[str] = Field(default_factory=list, description="Names of secrets of the service.")
    image: str = ""
    needs: dict[Identifier, Need] = Field(default_factory=dict)
    rollouts: Rollouts | None = None
    deadlines: Deadlines = Field(default_factory=Deadlines)
    retries: int = Field(default=0, ge=0, le=5, description="Further attempts after an infrastructure failure.")
    expect: Expect = Field(default_factory=lambda: Expect())
    parity: Parity | None = None

    @model_validator(mode="after")
    def _check(self) -> Case:
        if (self.script is None) == (self.command is None):
            raise ValueError("give either script or command")
        if reserved := sorted(self.needs.keys() & {"out", "rollouts", "run_dir"}):
            raise ValueError(f"needs: {reserved[0]!r} is the name of something else; choose another")
        return self
