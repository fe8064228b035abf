"""`corral submit`, `watch`, `jobs`, `logs`, `records`, `cancel`, `cleanup`, `profiles`, `serve`. Nothing heavy is
imported before a command runs."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from corral.arguments import positive, seconds, whole

_TYPES = ("log", "status", "phase", "preflight", "warning", "error", "final")
_LIVE = ("ACCEPTED", "QUEUED", "PROVISIONING", "PREFLIGHT", "RUNNING", "COLLECTING", "CLEANING", "RETRYING")
_OVER = ("SUCCEEDED", "FAILED", "TIMEOUT", "CANCELLED")
_CODES = (
    "Exit codes: 0 the job succeeded; 1-63 or 128+n the code of a job that failed by itself; 124 a deadline; 130 or "
    "143 signals and cancelled jobs; 75 infrastructure, or no verdict; 69 no answer from the service; 77 not "
    "authorised; 78 refused."
)


def add_parsers(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands. A parsed namespace carries `run`, which takes it and returns the exit code."""
    from corral.job.serve_command import add_serve_parser

    add_serve_parser(subparsers)
    _add_submit(subparsers)
    _add_watch(subparsers)
    _add_jobs(subparsers)
    _add_logs(subparsers)
    _add_records(subparsers)
    _add_cancel(subparsers)
    _add_cleanup(subparsers)
    _add_profiles(subparsers)


def _add_submit(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    submit = subparsers.add_parser(
        "submit",
        help="run a script on a job service and stay until its verdict",
        description="Send the source (what git tracks and what it does not ignore), run SCRIPT of it on a service, "
        f"show what it prints, and exit with its verdict. Ctrl-C cancels the job. {_CODES}",
        usage="corral submit [options] -- SCRIPT|COMMAND [ARG ...]",
    )
    what = submit.add_argument_group("what")
    what.add_argument("--nodes", type=positive, metavar="N", help="nodes (default: 1)")
    what.add_argument("--devices", type=positive, metavar="N", help="devices of a node (default: the service's)")
    what.add_argument("--kind", choices=["auto", "cpu", "gpu", "npu"], help="of devices (default: the service's)")
    what.add_argument("--name", metavar="S", help="of the job (default: of its script)")
    what.add_argument("--env", action="append", default=[], metavar="K=V", help="variable of the job (repeatable)")
    what.add_argument(
        "--secret", action="append", default=[], metavar="NAME", help="secret of the service, as a variable"
    )
    what.add_argument("--label", action="append", default=[], metavar="K=V", help="to find the job by (repeatable)")
    what.add_argument("--priority", type=int, metavar="N", help="-100 to 100; higher starts first (default: 0)")
    what.add_argument("--repository", metavar="OWNER/NAME", help="default: of the workflow in CI, else local/local")
    what.add_argument("--source", type=Path, metavar="DIR", help="default: the git working tree around this folder")
    what.add_argument("--no-source", action="store_true", help="send nothing; SCRIPT is a path the service knows")
    what.add_argument(
        "--preflight", action="store_true", help="check the nodes first, as `corral doctor` does; start only if all fit"
    )
    what.add_argument(
        "--need", action="append", default=[], metavar="P", help="path that every node has to have (with --preflight)"
    )
    _add_nodes(submit.add_argument_group("what its nodes are like (see `corral profiles`)"))
    limits = submit.add_argument_group("limits, in seconds or `none`")
    for kind, meaning in (
        ("queue", "until the job is admitted"),
        ("start", "from there until its command runs"),
        ("run", "of its command"),
        ("idle", "without output"),
        ("hang", "without progress of any rank"),
    ):
        limits.add_argument(f"--timeout-{kind}", type=_limit, metavar="S", help=f"{meaning} (default: the service's)")
    limits.add_argument("--retry-infra", type=int, metavar="N", help="more attempts after an infrastructure failure")
    limits.add_argument(
        "--lease", type=seconds, metavar="S", help="cancel the job when this client is gone for so long (in CI: 600)"
    )
    how = submit.add_argument_group("how")
    how.add_argument("--detach", action="store_true", help="print the name of the job and leave; it goes on")
    how.add_argument("--dry-run", action="store_true", help="send the source and check everything, start nothing")
    how.add_argument(
        "-o", "--output", choices=("yaml", "json"), help="with --dry-run: print what the cluster would be given"
    )
    _add_stay(how)
    _add_service(how)
    submit.add_argument("words", nargs=argparse.REMAINDER, metavar="-- SCRIPT", help="what to run")
    submit.set_defaults(run=_submit)


def _add_nodes(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--profile", metavar="NAME", help="what the service calls such nodes (default: by --kind)")
    group.add_argument("--head", choices=["shared", "separate"], help="Ray's head: on the first node, or on one more")
    group.add_argument("--image", metavar="I", help="image, where the backend has images")
    group.add_argument("--cpu", metavar="Q", help="CPUs of a node, as 64 or 500m (default: the profile's)")
    group.add_argument("--memory", metavar="Q", help="memory of a node, as 512Gi (default: the profile's)")
    group.add_argument("--shm", metavar="Q", help="/dev/shm of a node, a part of its memory (default: the profile's)")
    group.add_argument(
        "--patch",
        type=Path,
        action="append",
        metavar="FILE",
        help="JSON Patch on the RayJob, JSON or YAML (repeatable)",
    )


def _add_watch(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    watch = subparsers.add_parser(
        "watch",
        help="show a job until its verdict",
        description=f"Show a job until its verdict, and exit with it. Ctrl-C leaves the job alone. {_CODES}",
    )
    watch.add_argument("job", metavar="JOB")
    watch.add_argument("--rank", type=whole, action="append", metavar="R", help="only lines of this rank (repeatable)")
    watch.add_argument("--after-seq", type=whole, default=0, metavar="N", help="start after this event (default: 0)")
    _add_stay(watch)
    _add_service(watch)
    watch.set_defaults(run=_watch)


def _add_jobs(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    jobs = subparsers.add_parser("jobs", help="list jobs, newest first")
    form = jobs.add_mutually_exclusive_group()
    form.add_argument("--watch", action="store_true", help="redraw every second until Ctrl-C")
    form.add_argument("--json", action="store_true", help="as JSON")
    jobs.add_argument("--state", type=str.upper, choices=[*_LIVE, *_OVER], metavar="STATE", help="only in this state")
    jobs.add_argument("--repository", metavar="OWNER/NAME", help="only of this repository")
    jobs.add_argument("--run", dest="run_id", metavar="ID", help="only of this workflow run")
    jobs.add_argument("--label", metavar="K[=V]", help="only with this label")
    jobs.add_argument("--limit", type=positive, default=50, metavar="N", help="at most so many (default: 50)")
    _add_service(jobs)
    jobs.set_defaults(run=_jobs)


def _add_logs(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    logs = subparsers.add_parser("logs", help="print what a job has printed so far")
    logs.add_argument("job", metavar="JOB")
    logs.add_argument("--rank", type=whole, metavar="R", help="only of this rank")
    logs.add_argument("--attempt", type=positive, metavar="N", help="only of this attempt")
    logs.add_argument("--tail", type=positive, metavar="N", help="only the last N lines")
    _add_service(logs)
    logs.set_defaults(run=_logs)


def _add_records(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    records = subparsers.add_parser("records", help="fetch the run folder of a job: metrics, plan, logs of the ranks")
    records.add_argument("job", metavar="JOB")
    records.add_argument("--out", type=Path, metavar="DIR", help="a new folder (default: named as the job)")
    records.add_argument("--attempt", type=positive, metavar="N", help="of this attempt (default: the last)")
    _add_service(records)
    records.set_defaults(run=_records)


def _add_cancel(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    cancel = subparsers.add_parser("cancel", help="cancel jobs")
    cancel.add_argument("jobs", nargs="+", metavar="JOB")
    _add_service(cancel)
    cancel.set_defaults(run=_cancel)


def _add_cleanup(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    cleanup = subparsers.add_parser(
        "cleanup",
        help="cancel and remove all jobs of a workflow run",
        description="Cancel all jobs of a workflow run and wait until their nodes are gone; exit 75 when they are not. "
        "A run without jobs is clean.",
    )
    cleanup.add_argument("--workflow", type=_name, required=True, metavar="RUN", help="id of the workflow run")
    cleanup.add_argument("--attempt", type=positive, metavar="N", help="only of this attempt of the run")
    cleanup.add_argument("--timeout", type=seconds, default=120.0, metavar="S", help="wait so long (default: 120)")
    _add_service(cleanup)
    cleanup.set_defaults(run=_cleanup)


def _add_profiles(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    profiles = subparsers.add_parser("profiles", help="list what nodes may be like, or show one of them in full")
    profiles.add_argument("name", nargs="?", metavar="NAME", help="show this one")
    profiles.add_argument("--profiles-dir", type=Path, metavar="FOLDER", help="with your own, as for `corral serve`")
    profiles.set_defaults(run=_profiles)


def _add_stay(parser: argparse._ActionsContainer) -> None:
    """Options of the commands that stay until the verdict."""
    parser.add_argument(
        "--types",
        type=_event_types,
        default=frozenset(),
        metavar="T,...",
        help="kinds of events to show (default: all)",
    )
    parser.add_argument("--compat", action="store_true", help="exit 0 or 1 only, as older clients do")
    parser.add_argument("--result", type=Path, metavar="FILE", help="write the verdict to FILE as JSON")
    parser.add_argument(
        "--reconnect-timeout",
        type=seconds,
        default=600.0,
        metavar="S",
        help="go on trying for so long when the service is lost (default: 600)",
    )


def _add_service(parser: argparse._ActionsContainer) -> None:
    """Options of every command that talks to a service."""
    parser.add_argument("--url", metavar="URL", help="of the service (default: CORRAL_URL, else http://127.0.0.1:8470)")
    parser.add_argument(
        "--insecure", action="store_true", help="send the token over http to another machine all the same"
    )


def _event_types(text: str) -> frozenset[str]:
    types = frozenset(part for part in text.split(",") if part)
    if text == "all":
        return frozenset()
    for wrong in sorted(types - set(_TYPES)) if types else [text]:
        raise argparse.ArgumentTypeError(f"{wrong!r} is none of {', '.join(_TYPES)}, all")
    return types


def _name(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty; is the variable set that it comes from?")
    return text


def _limit(text: str) -> float:
    """math.inf stands for no limit, None for what the service does by default."""
    return math.inf if text == "none" else seconds(text)


def _submit(args: argparse.Namespace) -> int:
    from corral.job.client.submit import run

    words: list[str] = args.words
    args.words = words[1:] if words[:1] == ["--"] else words
    return run(args)


def _watch(args: argparse.Namespace) -> int:
    from corral.job.client.visit import watch

    return watch(args)


def _jobs(args: argparse.Namespace) -> int:
    from corral.job.client.table import run

    return run(args)


def _logs(args: argparse.Namespace) -> int:
    from corral.job.client.visit import logs

    return logs(args)


def _records(args: argparse.Namespace) -> int:
    from corral.job.client.visit import records

    return records(args)


def _cancel(args: argparse.Namespace) -> int:
    from corral.job.client.visit import cancel

    return cancel(args)


def _cleanup(args: argparse.Namespace) -> int:
    from corral.job.client.visit import clean_up

    return clean_up(args)


def _profiles(args: argparse.Namespace) -> int:
    from corral.job.backends.profile import load, profile_names, shown

    folder: Path | None = args.profiles_dir
    if args.name is not None:
        print(shown(load(args.name, folder)), end="")
        return 0
    for name in profile_names(folder):
        profile = load(name, folder)
        print(f"{name:<16} {profile.kind:<4} {profile.about}")
    return 0
