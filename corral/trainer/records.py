"""What a run leaves: plan.json, config.yaml, keys.json, metrics.jsonl, trace.json, logs, exports, samples."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from corral import atomic
from corral.config.audit import KeyUse
from corral.config.plan import Plan
from corral.errors import InfraError

RECORDS = ("plan.json", "config.yaml", "metrics.jsonl", "trace.json", "keys.json", "logs", "progress", "phases")


class Records:
    """The run folder. Records of an earlier run in the same folder are moved to earlier/K, never overwritten."""

    def __init__(self, run_dir: str | Path) -> None:
        self.folder = Path(run_dir).expanduser().absolute()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._move_earlier()
            self._metrics = (self.folder / "metrics.jsonl").open("wb", buffering=0)
        except OSError as error:
            raise InfraError(
                f"run folder {self.folder}: {error.strerror}; choose another with trainer.default_local_dir"
            ) from error

    def _move_earlier(self) -> None:
        present = [name for name in RECORDS if (self.folder / name).exists()]
        if not present:
            return
        number = 1
        while (self.folder / "earlier" / str(number)).exists():
            number += 1
        earlier = self.folder / "earlier" / str(number)
        earlier.mkdir(parents=True)
        for name in present:
            (self.folder / name).rename(earlier / name)

    def plan(self, plan: Plan, config: Mapping[str, Any]) -> None:
        """plan.json and config.yaml: what this run is."""
        self._write("plan.json", json.dumps(plan.as_dict(), indent=2))
        self._write("config.yaml", yaml.safe_dump(dict(config), sort_keys=False))

    def keys(self, keys: Mapping[str, KeyUse]) -> None:
        """keys.json: what became of every key of the configuration."""
        self._write("keys.json", json.dumps({key: use.as_dict() for key, use in keys.items()}, indent=2))

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of metrics.jsonl, on disk when this returns."""
        rest = memoryview((json.dumps({"step": step, **metrics}) + "\n").encode())
        end = self._metrics.tell()
        with atomic.undone_on_failure(self.folder / "metrics.jsonl", lambda: self._metrics.truncate(end)):
            while rest:
                rest = rest[self._metrics.write(rest) :]

    def trace(self, events: list[dict[str, Any]]) -> None:
        """trace.json in the Trace Event Format (opens in Perfetto and chrome://tracing)."""
        self._write("trace.json", json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def samples(self, folder: str, step: int, rows: list[dict[str, Any]]) -> None:
        """{folder}/{step}.jsonl: one line a sample."""
        atomic.write_text(Path(folder).expanduser() / f"{step}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def close(self) -> None:
        self._metrics.close()

    def _write(self, name: str, text: str) -> None:
        atomic.write_text(self.folder / name, text)
