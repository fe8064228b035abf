"""The text of a workflow: the template with its options filled in, under a head that says how it was made.

Template lines between `#? flag` (or `#? not flag`) and `#?` are there when the flag is; `%{name}` is a value.
"""

from __future__ import annotations

import hashlib
import math
import re
import shlex
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from corral import __version__
from corral.e2e.case import Case
from corral.e2e.read import Found
from corral.e2e.workflow_options import LOCAL, words
from corral.errors import ConfigError

TEMPLATE = Path(__file__).parent / "workflows" / "multinode.yml"
HOSTED_MINUTES = 360  # of a job on a runner of GitHub's
_COLLECTING = 120.0  # seconds a service takes at most for the records of a job that ended
_SPARE = 10  # minutes: checkout, installation, reports

_FIRST = "# Written by Corral. Run this with other options to change it; a file edited by hand is left alone."
_PIN = re.compile(r"(uses: )(?P<action>[\w./-]+)@(?P<sha>[0-9a-f]{40}) # v(?P<version>\d+(?:\.\d+)*)")
_DIGEST = re.compile(r"^# corral: (?P<digest>[0-9a-f]{64})$", re.M)
_EXPRESSION = re.compile(r"\$\{\{.*?\}\}|\$\{\{")
_VARIABLE = re.compile(r"\$\{\{ ?vars\.[A-Za-z_][A-Za-z0-9_]* ?\}\}")

_FORMS = {
    "branch": (r"[A-Za-z0-9][A-Za-z0-9._/-]*", "the name of a branch"),
    "owner": (r"[A-Za-z0-9][A-Za-z0-9-]*", "the name of a GitHub user or organisation"),
    "schedule": (r"[-0-9*,/A-Za-z]+( [-0-9*,/A-Za-z]+){4}", "five fields of cron, such as '17 3 * * *'"),
    "token_secret": (r"[A-Za-z_][A-Za-z0-9_]*", "the name of a GitHub secret"),
    "python": (r"none|[0-9][0-9A-Za-z.-]*", "a version of Python, or none"),
    "tier": (r"[a-z][a-z0-9_]*", "the name of a tier"),
}


def rendered(args: Namespace, found: Sequence[Found], existing: str = "") -> str:
    """The whole file. found: the cases it runs. existing: the file so far; pins of actions that are newer there
    stay, so that whoever updates them need not tell Corral. Raises ConfigError for a value that cannot be."""
    _check(args)
    text = _filled(TEMPLATE.read_text(encoding="utf-8"), _flags(args), _values(args, found))
    text = _with_newer_pins(text, existing)
    head = f"{_FIRST}\n# {words(args)}\n"
    return f"{head}# corral: {_digest(head + text)}\n{text}"


def untouched(text: str) -> bool:
    """Whether it is as Corral wrote it, but for the pins of actions."""
    found = _DIGEST.search(text)
    return found is not None and found["digest"] == _digest(text[: found.start()] + text[found.end() + 1 :])


def command_of(text: str) -> str | None:
    """The command it was written with; None for what Corral did not write."""
    lines = text.split("\n", 2)
    return lines[1].removeprefix("# ") if len(lines) > 2 and _DIGEST.search(text) else None


def minutes(cases: Iterable[Case], local: bool) -> int:
    """Upper bound of a run of these cases, one after the other: each limit of each attempt of each job, and 10 more.
    local: what is needed is made first, and nothing waits for devices."""
    total = 0.0
    for case in cases:
        limits = case.deadlines
        waiting = limits.prepare * len(case.needs) if local else limits.queue * _jobs(case)
        total += waiting + _jobs(case) * (limits.start + limits.run + limits.stop + _COLLECTING)
    return math.ceil(total / 60) + _SPARE


def _jobs(case: Case) -> int:
    """Attempts of the job and of its reference."""
    return (1 + case.retries) * (1 if case.parity is None else 2)


def hosted(args: Namespace) -> bool:
    """Whether the job runs on a machine of GitHub's that is thrown away after it."""
    labels = args.runner or ["ubuntu-latest"]
    return len(labels) == 1 and re.fullmatch(r"ubuntu-(latest|\d\d\.\d\d)(-arm)?", labels[0]) is not None


def _flags(args: Namespace) -> set[str]:
    local = args.service_url == LOCAL
    forks = args.forks or ("run" if local and hosted(args) else "refuse")
    python, install = _python(args), _install(args)
    given = {
        "local": local,
        "service": not local,
        "schedule": args.schedule,
        "owner": args.owner,
        "refuse-forks": forks == "refuse",
        "environment": args.environment,
        "image": args.image,
        "container-options": args.container_options,
        "python": python != "none",
        "install": install,
    }
    return {name for name, there in given.items() if there}


def _python(args: Namespace) -> str:
    return str(args.python or ("none" if args.image else "3.11"))


def _install(args: Namespace) -> list[str]:
    extras = "[train,serve]" if args.service_url == LOCAL else ""
    default = [] if args.image else [f"python -m pip install 'corral{extras}=={__version__}'"]
    return list(args.install or default)


def _values(args: Namespace, found: Sequence[Found]) -> dict[str, str]:
    local, on_hosted = args.service_url == LOCAL, hosted(args)
    bound = minutes((one.case for one in found), local)
    limits = "prepare, start, run, stop and collecting" if local else "queue, start, run, stop and collecting"
    said = f"Of all jobs: {limits}; and {_SPARE} minutes."
    if on_hosted and bound > HOSTED_MINUTES:
        said, bound = f"{said} That is {bound}; this runner allows {HOSTED_MINUTES}.", HOSTED_MINUTES
    runner = args.runner or ["ubuntu-latest"]
    named = [*(["--tier", args.tier] if args.tier else []), *args.cases]
    return {
        "name": args.out.stem,
        "branch": args.branch,
        "ref": _quoted(f"refs/heads/{args.branch}"),
        "schedule": _quoted(args.schedule or ""),
        "owner": _quoted(args.owner or ""),
        "light_runner": _scalar(args.light_runner),
        "runner": _scalar(runner[0]) if len(runner) == 1 else f"[{', '.join(map(_scalar, runner))}]",
        "patterns": _block(_patterns(args, found), 12),
        "title": _quoted(f"Prove {' '.join(args.cases) or f'tier {args.tier}'}"),
        "minutes_are": said,
        "minutes": str(bound),
        "environment": _quoted(args.environment or ""),
        "image": _scalar(args.image or ""),
        "container_options": _quoted(args.container_options or ""),
        "url": _scalar(args.service_url),
        "python": _quoted(_python(args)),
        "install": _block(_install(args), 10),
        "secret": args.token_secret,
        "cases": shlex.join(named),
    }


def _patterns(args: Namespace, found: Sequence[Found]) -> list[str]:
    """What has to be proved: with some files also this one and those of the cases, as far as they lie here."""
    if not args.paths:
        return ["**"]
    here = Path.cwd()
    files = [args.out.absolute(), *(one.file for one in found)]
    inside = [file.relative_to(here).as_posix() for file in files if file.is_relative_to(here)]
    return list(dict.fromkeys([*args.paths, *inside]))


def _scalar(text: str) -> str:
    """As YAML has it, quoted unless it cannot be taken for anything else."""
    return text if re.fullmatch(r"[a-z]+-[a-z0-9.-]+", text) else _quoted(text)


def _quoted(text: str) -> str:
    """A text of YAML, or of an expression."""
    return "'" + text.replace("'", "''") + "'"


def _block(lines: Iterable[str], indent: int) -> str:
    return "\n".join(" " * indent + line for line in lines)


def _check(args: Namespace) -> None:
    """Raises ConfigError for values that would not be what they are meant to be in the file."""
    for name, (form, meaning) in _FORMS.items():
        value = getattr(args, name)
        if value is not None and not re.fullmatch(form, value):
            raise ConfigError(f"{_option(name)} {value!r} is not {meaning}")
    for name, value in sorted(vars(args).items()):
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str):
                continue
            if not text.strip() or not text.isprintable():
                raise ConfigError(
                    f"{_option(name)} {text!r} is empty or holds a line break or another control character"
                )
            _check_expressions(name, text)
    for case in args.cases:
        path = PurePosixPath(case)
        if (
            not re.fullmatch(r"[A-Za-z0-9._/-]+", case)
            or case.startswith("-")
            or path.is_absolute()
            or ".." in path.parts
        ):
            raise ConfigError(f"case {case!r}: give a name, or a .yaml file by its path in this repository")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*\.ya?ml", args.out.name):
        raise ConfigError(f"--out {str(args.out)!r}: a workflow is called like e2e.yml, without blanks")
    if args.container_options and not args.image:
        raise ConfigError("--container-options needs --image: without a container there is nothing to set")


def _check_expressions(name: str, text: str) -> None:
    """Only variables of the repository, and only where they do not become part of a shell's text."""
    for found in _EXPRESSION.findall(text):
        if name not in ("service_url", "runner", "light_runner", "image", "container_options"):
            raise ConfigError(f"{_option(name)} {text!r}: an expression cannot stand here")
        if not _VARIABLE.fullmatch(found):
            raise ConfigError(
                f"{_option(name)}: {found!r} is not of the form ${{{{ vars.NAME }}}}, the only one allowed"
            )


def _option(name: str) -> str:
    return "case" if name == "cases" else f"--{name.replace('_', '-')}"


def _filled(template: str, flags: set[str], values: Mapping[str, str]) -> str:
    lines: list[str] = []
    shown: list[bool] = []
    for line in template.splitlines():
        if line == "#?":
            shown.pop()
        elif line.startswith("#? "):
            flag = line.removeprefix("#? ")
            shown.append(flag.removeprefix("not ") not in flags if flag.startswith("not ") else flag in flags)
        elif all(shown):
            lines.append(re.sub(r"%\{(\w+)\}", lambda found: values[found[1]], line))
    assert not shown, "a block of the template is not closed"
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def _digest(text: str) -> str:
    return hashlib.sha256(_PIN.sub(r"\1\g<action>", text).encode()).hexdigest()


def _with_newer_pins(text: str, existing: str) -> str:
    there = {found["action"]: found for found in _PIN.finditer(existing)}

    def newer(ours: re.Match[str]) -> str:
        theirs = there.get(ours["action"])
        return theirs[0] if theirs is not None and _version(theirs) > _version(ours) else ours[0]

    return _PIN.sub(newer, text)


def _version(pin: re.Match[str]) -> tuple[int, ...]:
    return tuple(int(part) for part in pin["version"].split("."))
