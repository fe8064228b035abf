"""`corral e2e run` and `replay`: cases one after the other, each with its own folder, report and verdict."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import yaml
from pydantic import ValidationError

from corral import atomic
from corral.e2e.caches import cache_root, look_up, rollouts_in
from corral.e2e.case import Case
from corral.e2e.case_run import CaseRun, Options
from corral.e2e.console import Console
from corral.e2e.problems import problems
from corral.e2e.read import Found, find_cases
from corral.e2e.report import index, write_reports
from corral.e2e.report.github import announce, match_tracebacks
from corral.e2e.report.terminal import lines
from corral.e2e.result import Result, read_result
from corral.e2e.submission import Places, Role, request_of, source_of, with_env, with_metrics
from corral.errors import ConfigError, InfraError
from corral.job.client import github
from corral.job.client.bundle import packed
from corral.job.client.endpoint import endpoint

CASE = "case.json"  # what ran, for `replay`


def run(args: argparse.Namespace) -> int:
    """The exit code: 0 when all passed, else that of the first that did not. Raises CorralError before anything ran."""
    if not args.cases and args.tier is None:
        raise ConfigError("nothing to run; name cases of `corral e2e list`, or give --tier")
    if not args.on:
        raise ConfigError("--on is empty; is the variable set that it comes from? give local, or the URL of a service")
    found = find_cases(args.cases, args.tier)
    chosen = [with_env(with_metrics(one, args.metric), args.env) for one in found]
    cache = cache_root(args.cache, os.environ)
    if args.dry_run:
        return _dry_run(chosen, cache, not args.no_parity)
    on = None if args.on == "local" else endpoint(args.on, args.insecure)
    options = Options(on, cache, not args.no_prepare, not args.no_parity, args.reconnect_timeout)
    return _run_all(chosen, args.runs, options)


def replay(args: argparse.Namespace) -> int:
    """The case of a result once more, as it was, from the source as it is now. Raises ConfigError."""
    result = read_result(args.result)
    folder = args.result if args.result.is_dir() else args.result.parent
    found, parity = _recorded(folder / CASE, result)
    return _run_all([found], args.runs, Options(None, cache_root(args.cache, os.environ), parity=parity))


def _run_all(chosen: Sequence[Found], runs: Path, options: Options) -> int:
    ran: list[tuple[Result, Path]] = []
    match_tracebacks(os.environ)
    for found in chosen:
        ran.append(_run_one(found, runs, options))
        if ran[-1][0].status == "INTERRUPTED":
            break
    results = [result for result, _ in ran]
    if len(chosen) > 1:
        index(ran, runs.absolute())
        *shown, verdict = _summary(results, len(chosen))
        print("\n".join([*shown, verdict]), flush=True)
        if github.current_run() is not None:
            github.set_outputs(os.environ, {"verdict": verdict.split()[1]})  # else it is that of the last case
    return next((result.exit_code for result in results if result.status != "PASSED"), 0)


def _run_one(found: Found, runs: Path, options: Options) -> tuple[Result, Path]:
    """The result, and the folder of the run."""
    case = found.case
    folder = _new_folder(runs, case.name)
    what = {"file": str(found.file), "parity": options.parity, "case": case.model_dump(mode="json")}
    atomic.write_text(folder / CASE, json.dumps(what, indent=1) + "\n")
    with Console(folder / "console.log") as console:
        console.say(f"== {case.name}: {case.summary}", f"-- run folder {folder}")
        result = CaseRun(found, folder, options, console).run()
        result.write(folder)
        write_reports(result, folder)
        console.say(*lines(result, folder), result.line())
    announce(result, folder, os.environ)
    return result, folder


def _summary(results: Sequence[Result], asked: int) -> list[str]:
    """A line for each case, and last the verdict of all."""
    width = max(len(result.case) for result in results)
    shown = [
        f"{result.status:11}  {result.case:{width}}  {result.seconds:6.0f} s  {result.reason}" for result in results
    ]
    passed = sum(result.status == "PASSED" for result in results)
    took = f"{sum(result.seconds for result in results):.0f} s"
    first = next((result for result in results if result.status != "PASSED"), None)
    if first is None:
        verdict = f"PASSED {passed} of {asked} cases in {took}"
    else:
        verdict = f"{first.status} ({passed} of {asked} cases passed in {took}); first {first.case}: {first.reason}"
    return ["", *(line.rstrip() for line in shown), f"VERDICT: {verdict}"]


def _dry_run(chosen: Sequence[Found], cache: Path, parity: bool) -> int:
    """Print each request as it would be sent, as YAML documents. Nothing is prepared, sent or started."""
    wrong = [f"case {found.case.name}: {problem}" for found in chosen for problem in problems(found)]
    if wrong:
        raise ConfigError("; ".join(wrong))
    for found in chosen:
        case = found.case
        places = Places(look_up(case, cache), rollouts_in(case, cache) if case.rollouts is not None else None)
        source = source_of(found, places)
        roles: list[Role] = ["main", "reference"] if case.parity is not None and parity else ["main"]
        with packed(source.listing) as bundle:
            for role in roles:
                request = request_of(found, role, places, source, bundle.digest)
                print(f"--- # {case.name}, {role}; source {source.listing.root}, {len(bundle.members)} files")
                print(yaml.safe_dump(request.model_dump(mode="json", exclude_unset=True), sort_keys=False), end="")
    return 0


def _recorded(file: Path, result: Result) -> tuple[Found, bool]:
    """The case that ran, at the place where it lies on this machine; and whether parity was asked for."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        case, place, parity = Case.model_validate(content["case"]), Path(content["file"]), bool(content["parity"])
    except (OSError, ValueError, ValidationError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"cannot read {file}, which says what ran: {' '.join(str(error).split())[:200]}") from None
    if not place.is_file():  # the result is from another machine
        same = [found for found in find_cases([]) if found.case.name == case.name]
        if not same:
            raise ConfigError(f"case {case.name} is not here, neither {place} nor in ./e2e; replay it in its project")
        place = same[0].file
    return Found(case, place), parity


def _new_folder(runs: Path, name: str) -> Path:
    """A folder no other run has, named by the time. Raises InfraError.

    A folder of runs that is made here ignores itself: reports are nothing to commit, or to send as source.
    """
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    attempt = 0
    while True:
        attempt += 1
        folder = (runs / name / (stamp if attempt == 1 else f"{stamp}-{attempt}")).absolute()
        try:
            if not runs.exists():
                runs.mkdir(parents=True)
                atomic.write_text(runs / ".gitignore", "*\n")
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise InfraError(f"cannot make run folder {folder}: {error.strerror}") from error
        return folder
