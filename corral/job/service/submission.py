"""From what a client asks for to what would run: defaults, the command, and all that can be checked before queueing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from corral.errors import ConfigError
from corral.job.backends.profile import NodeProfile, asked_profile
from corral.job.protocol.submit import Resources, SubmitRequest, Timeouts
from corral.job.service.errors import Refusal
from corral.job.service.settings import Profile, Settings

SCRIPT_PATH = "--script-path"
SOURCE = "source"  # where an agent unpacks the bundle, inside the folder of the attempt
_INTERPRETERS = {".py": "python"}  # everything else is for bash


@dataclass(frozen=True)
class Resolved:
    """command: argument list. cwd: absolute, or relative to the folder of the attempt. script: the file that has to be
    there, absolute or relative to cwd; None for a bare command. root: the source root an absolute script lies under.
    hints: what a person should know about how the request was understood."""

    command: list[str]
    cwd: str
    script: str | None = None
    root: Path | None = None
    hints: tuple[str, ...] = ()


def resolve_command(request: SubmitRequest, settings: Settings) -> Resolved:
    """What to run, where, without looking at any disk.

    A script without a bundle lies under a configured source root. When its name is one of `profile.bootstraps`, it
    stands for "bring the nodes up, then run the script of --script-path": they are up already, so only the latter is
    run. Raises Refusal 422.
    """
    if request.bundle is not None:
        if request.script is None:
            return Resolved([*(request.command or []), *request.args], SOURCE)
        return Resolved([*_run(request.script), *request.args], SOURCE, request.script)
    assert request.script is not None, "the model wants a bundle for a command"
    name = PurePosixPath(request.script).name
    hint: tuple[str, ...] = ()
    if name in settings.profile.bootstraps:
        script, args = _script_path(request.args, name)
        hint = (f"{name} is a bootstrap: {script} is run directly, on nodes that are up",)
    else:
        script, args = request.script, request.args
    root, path = _mapped(script, settings.source_roots)
    return Resolved([*_run(str(path)), *args], str(root), str(path), root, hint)


def node_profile(request: SubmitRequest, settings: Settings) -> NodeProfile | None:
    """What the nodes of a job are like; None where nobody said and the backend makes none.

    Raises Refusal 422 for a profile that is not known, does not fit the kind, or does not hold together.
    """
    kind = request.resources.kind if request.resources else "auto"
    if kind == "auto" and request.profile is None:
        kind = settings.profile.kind
    try:
        return asked_profile(request.profile, kind, settings)
    except ConfigError as error:
        raise Refusal(422, str(error)) from None


def with_defaults(request: SubmitRequest, profile: Profile, nodes: NodeProfile | None = None) -> SubmitRequest:
    """The same request with its resources spelled out, so that the profile of a later service changes nothing of it.

    nodes: what its nodes are like, where that is known: then their kind and deadlines hold where none are asked for.
    Raises Refusal 422 when the image is not allowed.
    """
    asked = request.resources
    replicas = request.worker_replicas
    given = asked.model_fields_set if asked else set()
    count = asked.nodes if asked and "nodes" in given else replicas or 1
    devices = asked.accelerators_per_node if asked and "accelerators_per_node" in given else profile.devices_per_node
    kind = profile.kind if asked is None or asked.kind == "auto" else asked.kind
    if request.image and profile.images and not any(fnmatchcase(request.image, p) for p in profile.images):
        raise Refusal(422, f"image={request.image!r} is not allowed here; allowed are {', '.join(profile.images)}")
    own = {name: getattr(asked, name) for name in ("cpu", "memory", "shm")} if asked else {}
    update: dict[str, object] = {"worker_replicas": None}
    if nodes is not None:
        kind = nodes.kind
        update |= {"profile": nodes.name, "timeouts": _timeouts(request.timeouts, nodes)}
    update["resources"] = Resources.model_validate(
        {"nodes": count, "accelerators_per_node": devices, "kind": kind, **own}
    )
    return request.model_copy(update=update)


def _timeouts(asked: Timeouts, nodes: NodeProfile) -> Timeouts:
    usual = nodes.timeouts.model_dump(exclude_none=True)
    return Timeouts.model_validate(usual | {name: getattr(asked, name) for name in asked.model_fields_set})


def check_script(resolved: Resolved, files: frozenset[str] | None) -> tuple[str, ...]:
    """Refuse with 422 a script that is not there; notices about what cannot be seen from here.

    files: names in the request's bundle; None without one.
    """
    if resolved.script is None:
        return resolved.hints
    if files is not None:
        if str(PurePosixPath(resolved.script)) not in files:
            near = sorted(name for name in files if PurePosixPath(name).name == PurePosixPath(resolved.script).name)
            hint = f"; it has {', '.join(near[:3])}" if near else ""
            raise Refusal(422, f"script {resolved.script!r} is not in the bundle ({len(files)} files){hint}")
        return resolved.hints
    assert resolved.root is not None
    if not resolved.root.is_dir():
        notice = f"{resolved.root} is not visible to the service: {resolved.script} is checked when the job starts"
        return (*resolved.hints, notice)
    real, root = Path(resolved.script).resolve(), resolved.root.resolve()
    if not real.is_relative_to(root):
        raise Refusal(422, f"script {resolved.script!r} leads out of its source root {resolved.root}")
    if not real.is_file():
        raise Refusal(422, f"script {resolved.script!r} does not exist under the source root {resolved.root}")
    return resolved.hints


def check_secrets(names: list[str], settings: Settings) -> None:
    """Refuse with 422 a secret the service does not hold. Only names are looked at, never contents."""
    names, folder = held_here(names, settings), settings.secrets_dir
    if names and folder is None:
        raise Refusal(422, f"secret {names[0]!r}: this service holds none; it was started without --secrets-dir")
    for name in names:
        if folder is not None and not (folder / name).is_file():
            raise Refusal(422, f"secret {name!r} is not among those of the service; add the file to its secrets folder")


def held_here(names: list[str], settings: Settings) -> list[str]:
    """Those of the secrets that come from the service: the cluster gives the others to the nodes itself."""
    by_cluster = settings.kubernetes.secrets if settings.backend == "kuberay" else {}
    return [name for name in names if name not in by_cluster]


def _run(script: str) -> list[str]:
    interpreter = _INTERPRETERS.get(PurePosixPath(script).suffix, "bash")
    return [interpreter, f"./{script}" if script.startswith("-") else script]


def _script_path(args: list[str], bootstrap: str) -> tuple[str, list[str]]:
    """The script that a bootstrap is told to run, and the arguments that remain for it."""
    for index, argument in enumerate(args):
        if argument == SCRIPT_PATH and index + 1 < len(args):
            return args[index + 1], [*args[:index], *args[index + 2 :]]
        if argument.startswith(f"{SCRIPT_PATH}="):
            return argument.partition("=")[2], [*args[:index], *args[index + 1 :]]
    raise Refusal(422, f"script {bootstrap!r} is a bootstrap and needs `{SCRIPT_PATH} /path/of/the/script` in args")


def _mapped(script: str, roots: Mapping[str, Path]) -> tuple[Path, Path]:
    """(folder of the root, file) of a script named by absolute path; the longest prefix wins."""
    path = PurePosixPath(script)
    if "\0" in script or "\\" in script or ".." in path.parts or len(script) > 1024:
        raise Refusal(422, f"script {script[:80]!r} holds `..`, a backslash or a NUL byte, or is too long")
    if not path.is_absolute():
        raise Refusal(422, f"{SCRIPT_PATH} {script[:80]!r} is relative; give its absolute path under a source root")
    for prefix in sorted(roots, key=len, reverse=True):
        if path != PurePosixPath(prefix) and path.is_relative_to(prefix):
            return roots[prefix], roots[prefix] / path.relative_to(prefix)
    known = ", ".join(sorted(roots)) or "none"
    raise Refusal(422, f"script {script[:80]!r} lies under no source root of this service ({known}), and has no bundle")
