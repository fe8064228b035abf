"""What one node sees. The code is sent to the node, not imported there, so that a node with another Corral, or none,
can be examined too: only the standard library and psutil, and nothing judged here."""

from __future__ import annotations

import glob
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from corral.manifest import manifest_digest
from corral.workers.doctor.reach import Listener, reach
from corral.workers.interfaces import interfaces

SHARED_MEMORY = "/dev/shm"
LOOKUP = 5.0  # seconds a name may take to resolve
VARIABLES = (
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"),
    *("HCCL_IF_IP", "RANK_TABLE_FILE"),
)


class Probe:
    """On one node; the methods answer with plain values that any Python can read."""

    def __init__(self) -> None:
        self._listener: Listener | None = None

    def facts(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Fields of `NodeFacts`. asked: those of `Asked`."""
        environ = node_environment()
        return {
            "host": socket.gethostname(),
            "python": platform.python_version(),
            "packages": packages(),
            "corral": said(corral_digest),
            "source": said(lambda: manifest_digest(asked["source"])) if asked["source"] else None,
            "unreadable": {path: why for path in wanted_paths(asked) if (why := unreadable(path))},
            "shm": free_of(SHARED_MEMORY),
            "disk": {name: free_of(folder) for name, folder in folders(asked).items()},
            "memory": memory(),
            "device_files": None if not asked["device_files"] else len(glob.glob(f"/dev/{asked['device_files']}")),
            "visible": environ.get(asked["visible_devices"] or ""),
            "ports": {port: why for port in asked["ports"] if (why := port_problem(port))},
            "own_name": resolve(socket.gethostname()),
            "interfaces": interfaces(),
            "variables": {name: os.environ[name] for name in VARIABLES if os.environ.get(name)},
        }

    def clock(self) -> float:
        """Unix seconds."""
        return time.time()

    def listen(self, address: str) -> tuple[str, int]:
        """Where other nodes can reach this one, until `close`. Raises OSError."""
        self._listener = Listener(address)
        return self._listener.address, self._listener.port

    def reach(self, others: list[tuple[int, str, int]], bound: float) -> dict[int, str]:
        """Why a node cannot be reached, for each of (number, address, port) that cannot."""
        with ThreadPoolExecutor(min(32, len(others) or 1)) as pool:
            tries = {number: pool.submit(reach, address, port, bound) for number, address, port in others}
            return {number: why for number, tried in tries.items() if (why := tried.result())}

    def resolve(self, names: list[str]) -> dict[str, list[str] | str]:
        """Addresses by name; a text says why there are none."""
        return {name: resolve(name) for name in names}

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def said(fact: Callable[[], str | None]) -> str | None:
    """A digest, or `! ` and why there is none."""
    try:
        return fact()
    except OSError as error:
        return f"! {error.strerror}: {error.filename}"


def node_environment() -> dict[str, str]:
    """That of the node: Ray hides all devices from a process that asked for none, so its parent is looked at."""
    if "RAY_RAYLET_PID" not in os.environ:
        return dict(os.environ)
    try:
        raw = Path(f"/proc/{os.environ['RAY_RAYLET_PID']}/environ").read_bytes()
    except OSError:
        return dict(os.environ)
    pairs = (entry.partition("=") for entry in os.fsdecode(raw).split("\0") if "=" in entry)
    return {name: value for name, _, value in pairs}


def packages() -> dict[str, str]:
    """Version by name of all that Python would import here; the first place on its path wins, as in an import."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-").replace(".", "-")
        if name:
            found.setdefault(name, distribution.version or "?")
    return found


def corral_digest() -> str | None:
    """Of the Python files of the Corral that Python would import here; None: there is none."""
    spec = importlib.util.find_spec("corral")
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(next(iter(spec.submodule_search_locations)))
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def wanted_paths(asked: dict[str, Any]) -> list[str]:
    return [*asked["paths"], *([asked["script"]] if asked["script"] else [])]


def unreadable(path: str) -> str:
    """Why this process cannot read a file or folder; "" when it can."""
    try:
        if os.path.isdir(path):
            os.listdir(path)
        else:
            with open(path, "rb") as file:
                file.read(1)
    except OSError as error:
        return str(error.strerror)
    return ""


def folders(asked: dict[str, Any]) -> dict[str, str]:
    return {"run folder": asked["run_dir"], "temp": tempfile.gettempdir()}


def free_of(folder: str) -> dict[str, Any] | None:
    """Bytes of the file system a folder lies on, or will lie on once it is made; None where there is none."""
    place = os.path.abspath(folder)
    while not os.path.exists(place):
        if place == SHARED_MEMORY:
            return None
        place = os.path.dirname(place)
    usage = shutil.disk_usage(place)
    return {"folder": folder, "total": usage.total, "free": usage.free, "writable": os.access(place, os.W_OK)}


def memory() -> dict[str, int]:
    """Bytes; what the container may use where that is less than the machine has."""
    import psutil

    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit != "max":
            total, available = min(total, int(limit)), min(available, int(limit) - used)
    except (OSError, ValueError):
        pass
    return {"total": total, "available": available}


def port_problem(port: int) -> str:
    """Why nothing could listen on a port here; "" when something could."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return str(error.strerror)
    return ""


def resolve(name: str) -> list[str] | str:
    """Addresses of a name; a text says why there are none. A resolver without a network can take minutes."""
    answers: list[list[str] | str] = []

    def ask() -> None:
        try:
            found = socket.getaddrinfo(name, None, 0, socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            answers.append(str(getattr(error, "strerror", None) or error))
        else:
            answers.append(sorted({str(entry[4][0]) for entry in found}))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(LOOKUP)
    return answers[0] if answers else f"no answer in {LOOKUP:g} s"
