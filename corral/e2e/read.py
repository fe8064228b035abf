"""From YAML to cases: files, their matrix, names, tiers, and one line for every mistake."""

from __future__ import annotations

import difflib
import itertools
import re
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from corral.e2e.case import Case
from corral.errors import ConfigError

SHIPPED = Path(__file__).parent / "cases"
PROJECT = Path("e2e")  # of the working directory: a project's own cases


@dataclass(frozen=True)
class Found:
    """A case and the file it stands in."""

    case: Case
    file: Path

    @property
    def shipped(self) -> bool:
        return self.file.parent == SHIPPED


def project_root(found: Found) -> Path:
    """The folder that `source` is relative to. For cases that come with Corral: its checkout, else share/corral where
    it is installed; for others the git work tree around the file, else the file's folder."""
    if not found.shipped:
        around = (folder for folder in found.file.parents if (folder / ".git").exists())
        return next(around, found.file.parent)
    checkout = SHIPPED.parents[2]
    if (checkout / "pyproject.toml").is_file():
        return checkout
    return next((folder for folder in _installed() if folder.is_dir()), checkout)


def _installed() -> list[Path]:
    """Where pip puts data files: below the prefix, or below the user's folder after `pip install --user`."""
    paths = (sysconfig.get_path("data"), sysconfig.get_path("data", sysconfig.get_preferred_scheme("user")))
    return [Path(path) / "share" / "corral" for path in paths]


def case_files(project: Path = PROJECT) -> list[Path]:
    """Files of the cases that come with Corral, then of the project's own."""
    return [*sorted(SHIPPED.glob("*.yaml")), *sorted(project.absolute().glob("*.yaml"))]


def all_cases(project: Path = PROJECT) -> list[Found]:
    """Every case by name. Raises ConfigError for a file that is none, or a name that is given twice."""
    found: dict[str, Found] = {}
    for file in case_files(project):
        for case in read_cases(file):
            if case.name in found:
                raise ConfigError(f"{file}: case {case.name!r} is also in {found[case.name].file}; rename one")
            found[case.name] = Found(case, file)
    return list(found.values())


def find_cases(names: Sequence[str], tier: str | None = None, project: Path = PROJECT) -> list[Found]:
    """Cases by name or file (all of its matrix), or all of a tier when no name is given. Raises ConfigError."""
    if not names:
        chosen = [found for found in all_cases(project) if tier is None or tier in found.case.tiers]
        if not chosen:
            raise ConfigError(f"no case has the tier {tier!r}; see `corral e2e list`")
        return chosen
    picked: list[Found] = []
    for name in names:
        picked += _named(name, project)
    return [found for found in picked if tier is None or tier in found.case.tiers]


def _named(name: str, project: Path) -> list[Found]:
    if name.endswith((".yaml", ".yml")):
        file = Path(name).absolute()
        return [Found(case, file) for case in read_cases(file)]
    known = all_cases(project)
    chosen = [found for found in known if name in (found.case.name, found.file.stem)]
    if not chosen:
        names = [found.case.name for found in known]
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
        raise ConfigError(
            f"no case is called {name!r}; the nearest is {near[0]!r}; `corral e2e list` shows all, or give a .yaml file"
        )
    return chosen


def read_cases(file: Path) -> list[Case]:
    """The cases of a file: one, or one for each combination of its matrix. Raises ConfigError: file, key, mistake."""
    import yaml

    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read case {file}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"case {file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"case {file}: expected a mapping, found {type(document).__name__}")
    matrix = _matrix(document.pop("matrix", {}), file)
    cases = []
    for values in _combinations(matrix):
        filled = _fill(document, values)
        if values:
            filled["name"] = "-".join([str(filled.get("name", "")), *(f"{k}-{v}" for k, v in values.items())]).lower()
        cases.append(_validated(filled, file))
    return cases


def _matrix(matrix: object, file: Path) -> dict[str, list[Any]]:
    good = isinstance(matrix, dict) and all(
        isinstance(key, str) and key.isidentifier() and isinstance(values, list) and values
        for key, values in matrix.items()
    )
    if not good:
        raise ConfigError(f"case {file}: matrix: has to be name: [value, ...], such as sp: [1, 2]")
    assert isinstance(matrix, dict)
    return matrix


def _combinations(matrix: Mapping[str, list[Any]]) -> Iterable[dict[str, Any]]:
    for values in itertools.product(*matrix.values()):
        yield dict(zip(matrix, values, strict=True))


def _fill(value: Any, values: Mapping[str, Any]) -> Any:
    """`{sp}` alone becomes the value itself, inside a text its text. Other braces are left alone."""
    if isinstance(value, dict):
        return {_fill(key, values): _fill(part, values) for key, part in value.items()}
    if isinstance(value, list):
        return [_fill(part, values) for part in value]
    if not isinstance(value, str):
        return value
    for name, given in values.items():
        if value == f"{{{name}}}":
            return given
        value = value.replace(f"{{{name}}}", str(given))
    return value


def _validated(document: Mapping[str, Any], file: Path) -> Case:
    try:
        return Case.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise ConfigError(f"case {file}: {_problem(first, document)}{more}") from None


def _problem(problem: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    """`topology: unknown key 'node'; the nearest known key is 'nodes'`, or `topology.nodes: ..., found '4'`."""
    place = [str(part) for part in problem["loc"]]
    message = str(problem["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if problem["type"] == "extra_forbidden":
        known = list(_model_at(place[:-1]).model_fields)
        near = difflib.get_close_matches(place[-1], known, n=1, cutoff=0.0)
        where = ".".join(place[:-1])
        nearest = f"; the nearest known key is {near[0]!r}" if near else ""
        return f"{f'{where}: ' if where else ''}unknown key {place[-1]!r}{nearest}"
    if problem["type"] == "missing":
        return f"{'.'.join(place)} is missing"
    found = problem["input"]
    shown = "" if isinstance(found, dict | list) else f", found {type(found).__name__} {str(found)[:60]!r}"
    return f"{'.'.join(place) or 'it'}: {message}{shown}"


def _model_at(place: Sequence[str]) -> type[BaseModel]:
    """The model whose keys stand at a place of the document; names in a mapping are skipped."""
    model: type[BaseModel] = Case
    for part in place:
        if part in model.model_fields:
            text = str(model.model_fields[part].annotation)
            names = re.findall(r"corral\.e2e\.case\.(\w+)", text)
            if names:
                import corral.e2e.case as module

                found = getattr(module, names[-1], None)
                model = found if isinstance(found, type) and issubclass(found, BaseModel) else model
    return model


def schema() -> dict[str, Any]:
    """JSON Schema of a case file."""
    document = Case.model_json_schema()
    document["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    document["title"] = "Corral end-to-end case"
    document["properties"]["matrix"] = {
        "type": "object",
        "description": "name: [value, ...]; one case for each combination, {name} standing for the value.",
        "additionalProperties": {"type": "array", "minItems": 1},
    }
    return document
