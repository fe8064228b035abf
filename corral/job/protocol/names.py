"""What names and texts from outside may look like. Client, service and agent refuse the same things."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

REPOSITORY = re.compile(r"(?!\.{1,2}/)[A-Za-z0-9_.-]{1,100}/(?!\.{1,2}\Z)[A-Za-z0-9_.-]{1,100}")
COMMIT_SHA = re.compile(r"[0-9a-f]{7,64}")
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # part of a URL: "." and ".." would be taken out of it
NAME_SUFFIX = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_./-]{0,61}[A-Za-z0-9])?")
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@-]{0,255}")
JOB_ID = re.compile(r"rj-[0-9a-f]{12}")
DIGEST = re.compile(r"[0-9a-f]{64}")

MAX_ARGS = 256
MAX_ARG_BYTES = 16 << 10
MAX_ENV = 256
MAX_ENV_BYTES = 64 << 10  # all names and values of one job together
MAX_LABELS = 32

# They change what the loader, the interpreter, the shell or Ray does before the user's first line runs.
_DENIED_PREFIXES = ("LD_", "DYLD_", "RAY_", "CORRAL_JOB_", "CORRAL_AGENT_")
_DENIED_NAMES = frozenset(
    {"PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONHOME", "BASH_ENV", "ENV", "IFS", "PS4", "SHELLOPTS", "BASHOPTS"}
    | {"CORRAL_RUN_DIR", "CORRAL_RANK_OUTPUT"}
)


def env_problem(name: str, value: str) -> str | None:
    """Why a job must not set this variable; None when it may."""
    if not ENV_NAME.fullmatch(name):
        return f"env name {name[:80]!r} is not a variable name; use letters, digits and _"
    if name.startswith(_DENIED_PREFIXES) or name in _DENIED_NAMES:
        return f"env {name} is refused: it controls the loader, the shell, Ray or Corral itself; set it in the script"
    if "\0" in value:
        return f"env {name} holds a NUL byte"
    return None


def relative_path_problem(path: str) -> str | None:
    """Why a path cannot name a file inside a source bundle; None when it can."""
    parts = PurePosixPath(path).parts
    if not parts or "\\" in path or not path.isprintable() or len(path) > 1024:
        return f"path {path[:80]!r} is empty, too long or holds a control character or a backslash"
    if path.startswith("/") or ".." in parts:
        return f"path {path[:80]!r} leaves the source; name a file inside it, relative to its root"
    return None
