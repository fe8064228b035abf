"""Checks of a job's nodes before its command starts: what is asked for, and what was found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from corral.findings import Finding, failures, worst

Place = Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f\x7f]+$")]
Port = Annotated[int, Field(ge=1, le=65535)]
MIB_LIMIT = 1 << 30
SHOWN = 20  # failures that are reported to the service


class Preflight(BaseModel):
    """What every node has to have besides the source, the script, the devices and the same software.

    paths: absolute, or relative to the source; readable on every node. shm_mib, disk_mib: free, in MiB. clock_skew:
    seconds between nodes. ports: free on every node. timeout: seconds for all of it. None: as `corral doctor` has it.
    """

    model_config = ConfigDict(extra="forbid")

    paths: list[Place] = Field(default_factory=list, max_length=64)
    shm_mib: int | None = Field(None, ge=0, le=MIB_LIMIT)
    disk_mib: int | None = Field(None, ge=0, le=MIB_LIMIT)
    clock_skew: float | None = Field(None, gt=0, le=3600)
    ports: list[Port] = Field(default_factory=list, max_length=64)
    timeout: float = Field(120.0, gt=0, le=3600)


class PreflightReport(BaseModel):
    """Body of POST /api/v1/agent/{job_id}/preflight, once for an attempt. seconds: what the checks took. checks: how
    many there were. findings: those that failed, at most SHOWN; preflight.json has all."""

    model_config = ConfigDict(extra="forbid")

    attempt: int = Field(ge=1)
    seconds: float = Field(ge=0, le=1e6)
    checks: int = Field(ge=0, le=1 << 30)
    failed: int = Field(ge=0, le=1 << 30)
    findings: list[Finding] = Field(max_length=SHOWN)

    @classmethod
    def of(cls, attempt: int, seconds: float, findings: Sequence[Finding]) -> Self:
        bad = failures(findings)
        first = worst(findings)
        order = sorted(bad, key=lambda each: each is not first)
        return cls(attempt=attempt, seconds=seconds, checks=len(findings), failed=len(bad), findings=order[:SHOWN])

    @model_validator(mode="after")
    def _check(self) -> Self:
        for finding in self.findings:
            if finding.ok or finding.kind not in ("infra", "config"):
                raise ValueError("a finding is no failure, or neither of kind infra nor of kind config")
            if finding.value is not None and not math.isfinite(finding.value):
                raise ValueError("the value of a finding is not finite")
        return self

    def message(self) -> str:
        """One line: the failure to look at first, or that there is none."""
        if not self.findings:
            return f"{self.checks} checks passed in {self.seconds:.1f} s"
        return f"{self.failed} of {self.checks} checks failed: {self.findings[0].line()}"

    def event(self) -> dict[str, Any]:
        """Fields of the event."""
        return {"message": self.message(), "ok": not self.findings, **self.model_dump(mode="json", exclude={"attempt"})}
