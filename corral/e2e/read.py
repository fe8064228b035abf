"""From YAML to cases: files, their matrix, names, tiers, and one line for every mistake."""

from __future__ import annotations

import difflib
import sysconfig
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from corral.e2e.case import Case
from corral.e2e.document import Document, read_document
from corral.e2e.matrix import expanded
from corral.e2e.mistakes import mistakes
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
    it is installed; for others the git work tree around the file, else the file's folder, or the one around e2e/."""
    if not found.shipped:
        here = found.file.parent
        around = (folder for folder in found.file.parents if (folder / ".git").exists())
        return next(around, here.parent if here.name == PROJECT.name else here)
    checkout = SHIPPED.parents[2]
    if (checkout / "pyproject.toml").is_file():
        return checkout
    return next((folder for folder in _installed() if folder.is_dir()), checkout)


def _installed() -> list[Path]:
    """Where pip puts data files: below the prefix, or below the user's folder after `pip install --user`."""
    paths = (sysconfig.get_path("data"), sysconfig.get_path("data", sysconfig.get_preferred_scheme("user")))
    return [Path(path) / "share" / "corral" for path in paths]


def case_files(project: Path = PROJECT) -> list[Path]:
    """Files of the cases that come with Corral, then of the project's own. Raises ConfigError."""
    return [*sorted(SHIPPED.glob("*.yaml")), *sorted(_absolute(project).glob("*.yaml"))]


def _absolute(path: Path) -> Path:
    try:
        return path.absolute()
    except FileNotFoundError:
        raise ConfigError("the working folder does not exist any more; go to one that does") from None


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
    """Cases by name or file (all of its matrix), each once; with a tier only those of it. Without names: all.

    Raises ConfigError when that leaves none, for a name that no case has, and for files that are not cases.
    """
    picked = [found for name in names for found in _named(name, project)] if names else all_cases(project)
    unique = {(found.file, found.case.name): found for found in picked}
    chosen = [found for found in unique.values() if tier is None or tier in found.case.tiers]
    if not chosen:
        tiers = sorted({tier for found in picked for tier in found.case.tiers})
        raise ConfigError(
            f"{'none of these cases' if names else 'no case'} has the tier {tier!r}; there are {', '.join(tiers)}"
        )
    return chosen


def _named(name: str, project: Path) -> list[Found]:
    if name.endswith((".yaml", ".yml")):
        file = _absolute(Path(name))
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
    """The cases of a file: one, or one for each combination of its matrix. Raises ConfigError: file, line, key, what is
    wrong."""
    document = read_document(file)
    cases = [_validated(content, document) for content in expanded(document)]
    if twice := sorted(name for name, count in Counter(case.name for case in cases).items() if count > 1):
        raise ConfigError(f"case {file}: matrix: two combinations are called {twice[0]!r}; tell them apart in name")
    return cases


def _validated(content: dict[str, Any], document: Document) -> Case:
    try:
        return Case.model_validate(content)
    except ValidationError as error:
        found = [f"{document.at(place)}: {what}" for place, what in mistakes(error, content)]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise ConfigError(f"{found[0]}{more}") from None
