"""An end-to-end case, read from a YAML file: what to run, where, with what time, and what it must have recorded."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from corral.errors import ConfigError

CASES = Path(__file__).parent / "cases"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Topology:
    """Local nodes to start for the command."""

    nodes: int
    devices_per_node: int


@dataclass(frozen=True)
class Cache:
    """Something a corral command makes once. `make` holds the command's arguments; {out} is the folder to fill."""

    make: tuple[str, ...]
    revision: int  # raised when the same arguments have to be made anew


@dataclass(frozen=True)
class Deadlines:
    """Seconds. start: until the run has written plan.json; run: until it has ended; stop: to end after a signal."""

    prepare: float
    start: float
    run: float
    stop: float


@dataclass(frozen=True)
class Expectations:
    """What the records must show. plan: dotted path in plan.json to its value; within: metric to (lowest, highest),
    on every line of metrics.jsonl; finite: metrics that every line has, as finite numbers."""

    exit_code: int
    plan: Mapping[str, Any]
    lines: int | None
    finite: tuple[str, ...]
    within: Mapping[str, tuple[float, float]]
    rank_logs: bool

    def with_metric(self, name: str, low: float, high: float) -> Expectations:
        """These expectations and one more bound on a metric."""
        return replace(self, within={**self.within, name: (low, high)})


@dataclass(frozen=True)
class Case:
    """topology None: the command runs by itself, without a cluster."""

    name: str
    summary: str
    topology: Topology | None
    command: tuple[str, ...]
    env: Mapping[str, str]
    caches: Mapping[str, Cache]
    deadlines: Deadlines
    expect: Expectations


def case_names() -> list[str]:
    """Names of the cases that come with Corral."""
    return sorted(path.stem for path in CASES.glob("*.yaml"))


def find_case(name_or_file: str) -> Case:
    """A case by name, or from a file when the argument ends in .yaml. Raises ConfigError."""
    if name_or_file.endswith((".yaml", ".yml")):
        return read_case(Path(name_or_file))
    if name_or_file not in case_names():
        raise ConfigError(
            f"no case is called {name_or_file!r}; there are: {', '.join(case_names())} (or give a .yaml file)"
        )
    return read_case(CASES / f"{name_or_file}.yaml")


def read_case(path: Path) -> Case:
    """The case in a file. Raises ConfigError that names the file and the key."""
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read case {path}: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"case {path} is not YAML: {' '.join(str(error).split())}") from error
    top = _Section(document, str(path))
    case = Case(
        name=top.text("name"),
        summary=top.text("summary"),
        topology=_topology(top.section("topology")) if "topology" in top.values else None,
        command=top.texts("command"),
        env=top.section("env").all_texts(),
        caches=_caches(top.section("caches")),
        deadlines=_deadlines(top.section("deadlines")),
        expect=_expectations(top.section("expect")),
    )
    top.done()
    if not _NAME.fullmatch(case.name):
        raise ConfigError(f"{path}: name {case.name!r} has to be letters, digits, '.', '_' and '-' (it names a folder)")
    if not case.command:
        raise ConfigError(f"{path}: command is empty")
    if case.expect.rank_logs and case.topology is None:
        raise ConfigError(f"{path}: expect.rank_logs needs a topology to know which ranks there are")
    return case


class _Section:
    """One mapping of the file. Keys are taken by name; done() refuses those that nothing took."""

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
            raise ConfigError(f"{where}: expected a mapping with text keys, found {_shown(values)}")
        self.values: dict[str, Any] = values
        self.where = where
        self.known: set[str] = set()

    def take(self, key: str, default: Any, kind: type | tuple[type, ...], expected: str) -> Any:
        self.known.add(key)
        if key not in self.values:
            if default is None:
                raise ConfigError(f"{self.where}: {key} is missing")
            return default
        value = self.values[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"{self.where}: {key} has to be {expected}, found {_shown(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        return str(self.take(key, default, str, "text (quote it)"))

    def whole(self, key: str, default: int | None = None, low: int = 0) -> int:
        value = int(self.take(key, default, int, "a whole number"))
        if value < low:
            raise ConfigError(f"{self.where}: {key} has to be at least {low}, found {value}")
        return value

    def seconds(self, key: str) -> float:
        value = float(self.take(key, None, (int, float), "a number of seconds"))
        if not 0 < value < math.inf:
            raise ConfigError(f"{self.where}: {key} has to be a positive number of seconds, found {value}")
        return value

    def texts(self, key: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        values = self.take(key, default, (list, tuple), "a list of texts")
        for value in values:
            if not isinstance(value, str):
                raise ConfigError(f"{self.where}: {key} has to be a list of texts (quote them), found {_shown(value)}")
        return tuple(values)

    def section(self, key: str) -> _Section:
        return _Section(self.take(key, {}, dict, "a mapping"), f"{self.where}: {key}")

    def all_texts(self) -> dict[str, str]:
        return {key: self.text(key) for key in self.values}

    def done(self) -> None:
        for key in self.values:
            if key not in self.known:
                near = difflib.get_close_matches(key, self.known, n=1, cutoff=0.0)
                raise ConfigError(f"{self.where}: unknown key {key!r}; the nearest known key is {near[0]!r}")


def _topology(section: _Section) -> Topology:
    topology = Topology(section.whole("nodes", low=1), section.whole("devices_per_node", low=1))
    section.done()
    return topology


def _caches(section: _Section) -> dict[str, Cache]:
    caches = {}
    for name in section.values:
        entry = section.section(name)
        caches[name] = Cache(entry.texts("make"), entry.whole("revision", 1))
        entry.done()
        if name in ("cache", "out") or not name.isidentifier():
            raise ConfigError(f"{section.where}: {name!r} cannot name a cache (an identifier other than cache, out)")
        if not any("{out}" in argument for argument in caches[name].make):
            raise ConfigError(f"{entry.where}: make has to say where to write, with {{out}}")
    return caches


def _deadlines(section: _Section) -> Deadlines:
    deadlines = Deadlines(*(section.seconds(key) for key in ("prepare", "start", "run", "stop")))
    section.done()
    return deadlines


def _expectations(section: _Section) -> Expectations:
    metrics = section.section("metrics")
    bounds = metrics.section("within")
    expect = Expectations(
        exit_code=section.whole("exit_code", 0),
        plan=section.section("plan").values,
        lines=metrics.whole("lines") if "lines" in metrics.values else None,
        finite=metrics.texts("finite", ()),
        within={name: _bounds(bounds, name) for name in bounds.values},
        rank_logs=bool(section.take("rank_logs", False, bool, "true or false")),
    )
    metrics.known.add("lines")
    metrics.done()
    section.done()
    return expect


def _bounds(section: _Section, name: str) -> tuple[float, float]:
    pair = section.take(name, None, list, "[lowest, highest]")
    numbers = [float(x) for x in pair if isinstance(x, (int, float)) and not isinstance(x, bool)]
    if len(pair) != 2 or len(numbers) != 2 or not numbers[0] <= numbers[1]:
        raise ConfigError(
            f"{section.where}: {name} has to be [lowest, highest] (1.0e-3, not 1e-3), found {_shown(pair)}"
        )
    return numbers[0], numbers[1]


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:60]!r}"
