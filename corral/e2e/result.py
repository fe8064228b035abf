"""What a case run leaves for machines: result.json. Reports are made of it, and of the records beside it, alone.

Folder of a run (`<runs>/<case>/<time>/`):
  result.json  report.html  report.md  junit.xml  console.log  case.json
  job/         records of the job: plan.json, metrics.jsonl, trace.json, phases/, logs/, driver.log, preflight.json ...
  reference/   the same of the one-process run, when the case asks for parity
  divergence/  both sides' tensors of the phase in which they first differ
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from corral import atomic
from corral.errors import ConfigError

Status = Literal["PASSED", "FAILED", "TIMEOUT", "INTERRUPTED"]
Group = Literal["run", "preflight", "plan", "metrics", "baseline", "phases", "files", "logs", "limits", "parity"]


class _Record(BaseModel):
    """Its texts quote what jobs wrote: half a surrogate pair, which no file can hold, is shown by its number."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: object) -> object:
        return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


class Check(_Record):
    """One expectation: what was expected and what was found, each in a few words. file, line: of the user's code, where
    the failure points there. detail: further lines for the report."""

    group: Group
    name: str
    expected: str
    found: str
    ok: bool
    detail: str = ""
    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.name}: expected {self.expected}, found {self.found}"


class ParityRow(_Record):
    """The widest gap of one quantity of one step. phase: samples, rewards, log_probs, values, advantages, gradients,
    weights, metrics, in the order in which a step makes them. rank: of the run that computed it, where one did alone.
    sample: data row and index in its group, for what belongs to a sample. step 0: not of a step."""

    step: int
    phase: str
    name: str
    reference: str
    found: str
    gap: float | None
    ok: bool
    rank: int | None = None
    row: int | None = None
    sample: int | None = None

    def where(self) -> str:
        parts = [f"step {self.step}"] if self.step else []
        parts += [f"data row {self.row}, sample {self.sample}"] if self.row is not None else []
        parts += [f"rank {self.rank}"] if self.rank is not None else []
        return ", ".join(parts)


class ParityReport(_Record):
    """first: the first row, in the order of computation, that is not equal. compared: how many numbers were, by phase.
    hint: what usually causes a first difference there. dumped: folder with both sides' tensors, relative to the run."""

    rows: list[ParityRow]
    first: ParityRow | None = None
    compared: dict[str, int] = Field(default_factory=dict)
    hint: str = ""
    dumped: str | None = None


class JobPart(_Record):
    """One job of the run: the main one or the reference. verdict: as the client wrote it. states: (state, Unix time).
    records: folder relative to the run's. preflight: findings, as corral.findings.Finding.as_dict."""

    job_id: str
    url: str
    command: list[str]
    nodes: int
    devices_per_node: int
    verdict: dict[str, object]
    states: list[tuple[str, float]] = Field(default_factory=list)
    seconds: float = 0.0
    records: str = ""
    preflight: list[dict[str, object]] = Field(default_factory=list)


class Result(_Record):
    """reason: "" when passed, else the first thing that is wrong. started: Unix time. where: local, or the service's
    URL. again: the command that runs it once more on this machine."""

    version: Literal[1] = 1
    case: str
    summary: str
    status: Status
    reason: str
    exit_code: int
    failure_class: str | None = None
    started: float
    seconds: float
    where: str
    corral: str
    commit: str = ""
    checks: list[Check] = Field(default_factory=list)
    job: JobPart | None = None
    reference: JobPart | None = None
    parity: ParityReport | None = None
    again: str = ""

    def line(self) -> str:
        """The last line of the output."""
        if self.status == "PASSED":
            return f"VERDICT: PASSED {self.case} in {self.seconds:.0f} s"
        return f"VERDICT: {self.status} {self.case}: {' '.join(self.reason.split())}"

    def write(self, folder: Path) -> None:
        """result.json, whole or not at all. Raises InfraError."""
        atomic.write_text(folder / "result.json", self.model_dump_json(indent=1) + "\n")


def read_result(path: Path) -> Result:
    """From result.json or the folder it lies in. Raises ConfigError."""
    file = path / "result.json" if path.is_dir() else path
    try:
        return Result.model_validate_json(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{file} is no result of corral e2e: {' '.join(str(error).split())[:300]}") from None
