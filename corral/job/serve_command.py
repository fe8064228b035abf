"""`corral serve`, as a command line. Nothing is imported before it runs, so that `corral --help` answers at once."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

SCOPES = ("submit", "read", "cancel", "admin")


def add_serve_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `serve`. A parsed namespace carries `run`, which takes it and returns the exit code."""
    parser = subparsers.add_parser(
        "serve",
        help="run the job service",
        description="Run the service that takes jobs, runs them and tells what became of them. Without options: on "
        "loopback, with SQLite, and jobs run on this machine. SIGINT or SIGTERM ends it with exit code 0; its jobs "
        "go on, and the next start adopts them.",
    )
    where = parser.add_argument_group("where")
    where.add_argument("--host", metavar="ADDRESS", help="to listen on (default: 127.0.0.1; others need --token-file)")
    where.add_argument("--port", type=int, metavar="P", help="to listen on, 0 for any free one (default: 8470)")
    where.add_argument("--public-url", metavar="URL", help="under which agents reach the service (default: host, port)")
    where.add_argument(
        "--data-dir", type=Path, metavar="FOLDER", help="default: $CORRAL_SERVICE_DIR, else ~/.corral/service"
    )
    where.add_argument(
        "--database",
        dest="database_url",
        metavar="URL",
        help="PostgreSQL URL (default: $CORRAL_DATABASE_URL, else SQLite)",
    )
    where.add_argument("--config", type=Path, metavar="FILE", help="settings as YAML; options win over it")
    where.add_argument(
        "--private",
        action="store_true",
        help="serve one caller: cancel all jobs and end when standard input ends, as it does when the caller dies",
    )
    where.add_argument(
        "--log-level", choices=("DEBUG", "INFO", "WARNING"), default="INFO", help="of the JSON log on stderr"
    )
    _add_backend(parser.add_argument_group("what runs the jobs"))
    _add_access(parser.add_argument_group("who and what is let in"))
    _add_capacity(parser.add_argument_group("what jobs get"))
    _add_other(parser.add_argument_group("instead of serving"))
    parser.set_defaults(run=_serve)


def _add_backend(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--backend",
        choices=("local", "ray", "kuberay"),
        help="this machine, a Ray cluster by its Jobs API, or Kubernetes with KubeRay (default: local)",
    )
    group.add_argument("--address", dest="ray_address", metavar="URL", help="ray: of the cluster's dashboard")
    group.add_argument("--kubeconfig", type=Path, metavar="FILE", help="kuberay: default as for kubectl, or in the pod")
    group.add_argument("--context", dest="kube_context", metavar="NAME", help="kuberay: of the kubeconfig")
    group.add_argument("--namespace", metavar="NAME", help="kuberay: of the RayJobs (default: the context's)")
    group.add_argument("--agent-dir", metavar="FOLDER", help="ray, kuberay: on the nodes (default: /tmp/corral-jobs)")
    group.add_argument("--profiles-dir", type=Path, metavar="FOLDER", help="profiles of your own, one YAML file each")


def _add_access(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--token-file", type=Path, metavar="FILE", help="hashed tokens; read again when it changes")
    group.add_argument("--secrets-dir", type=Path, metavar="FOLDER", help="one file a secret, named as its variable")
    group.add_argument(
        "--source-root",
        type=_root,
        action="append",
        metavar="PREFIX=FOLDER",
        help="scripts that are named by an absolute path under PREFIX, without a bundle, lie in FOLDER; repeatable",
    )
    group.add_argument(
        "--bootstrap",
        action="append",
        metavar="NAME",
        help="a script of this name stands for the one its argument --script-path names; repeatable",
    )
    group.add_argument("--image", action="append", metavar="PATTERN", help="images a job may name; repeatable")


def _add_capacity(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--devices", type=int, metavar="N", help="for all jobs together (default: 16)")
    group.add_argument("--max-nodes", type=int, metavar="N", help="of one job (default: 8)")
    group.add_argument("--max-devices-per-node", type=int, metavar="N", help="of one job (default: 8)")
    group.add_argument("--quota", type=int, metavar="N", help="devices one repository may hold at a time")
    group.add_argument(
        "--default-devices", type=int, metavar="N", help="of a node, for jobs that do not say (default: 1)"
    )
    group.add_argument("--default-kind", choices=("auto", "cpu", "gpu", "npu"), help="for jobs that do not say")


def _add_other(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--print-openapi", action="store_true", help="print the OpenAPI document")
    group.add_argument(
        "--new-token",
        metavar="NAME",
        help="print a fresh token, once, and its entry; with --token-file the entry is added to the file",
    )
    group.add_argument(
        "--scopes", type=_scopes, default="submit,read,cancel", metavar="LIST", help=f"of {', '.join(SCOPES)}"
    )
    group.add_argument(
        "--repositories", type=_words, default="*", metavar="LIST", help="patterns it may touch (default: all)"
    )
    group.add_argument("--days", type=float, metavar="N", help="after which it expires (default: never)")


def _root(text: str) -> tuple[str, str]:
    prefix, equals, folder = text.partition("=")
    if not (equals and prefix.startswith("/") and folder):
        raise argparse.ArgumentTypeError(f"{text!r} is not /PREFIX=FOLDER")
    return prefix, folder


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _scopes(text: str) -> frozenset[str]:
    scopes = frozenset(_words(text))
    if not scopes or scopes - set(SCOPES):
        raise argparse.ArgumentTypeError(f"{text!r}: give some of {', '.join(SCOPES)}")
    return scopes


def _serve(args: argparse.Namespace) -> int:
    from corral.errors import ConfigError

    try:
        import fastapi  # noqa: F401
        import jsonpatch  # noqa: F401
        import sqlalchemy  # noqa: F401
        import uvicorn  # noqa: F401
        import websockets  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(f"`corral serve` needs {error.name}: pip install 'corral[serve]'") from error
    if args.print_openapi:
        from corral.job.service.app import openapi

        print(json.dumps(openapi(), indent=1))
        return 0
    if args.new_token is not None:
        return _new_token(args)
    from corral.job.service.logs import configure
    from corral.job.service.options import settings_of
    from corral.job.service.serve import serve

    configure(args.log_level)
    return serve(settings_of(args), private=args.private)


def _new_token(args: argparse.Namespace) -> int:
    from corral.job.service.tokens import add_token, new_token

    clear, entry = new_token(args.new_token, args.scopes, args.repositories, args.days)
    if args.token_file is not None:
        add_token(args.token_file, entry)
    print(clear)
    if args.token_file is None:
        print(json.dumps(entry.model_dump(mode="json") | {"scopes": sorted(entry.scopes)}))
    return 0
