"""Functions of the algorithm by name or by import path: how a user adds one without touching Corral."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from corral.errors import ConfigError

T = TypeVar("T")


def load(spec: str, registry: Mapping[str, T], what: str) -> T:
    """The entry `spec` of the registry, or the object at the import path `spec`: `file.py:name` or `module:name`.

    what: the configuration key, for messages. The user's object has to be callable, or of the same type as an entry of
    the registry; whether it does what entries do shows when it is called. A file is run once per process.

    Raises ConfigError for an unknown name, a missing file, module or object, and for code that cannot be imported
    (what it raised is the cause).
    """
    if spec in registry:
        return registry[spec]
    path, separator, name = spec.rpartition(":")
    if not separator or not path or not name:
        close = difflib.get_close_matches(spec, registry, n=1, cutoff=0)
        raise ConfigError(
            f"{what}={spec} is unknown; the nearest name is {close[0]!r} (available: {', '.join(registry)}, "
            "or an import path file.py:name or module:name)"
        )
    found = getattr(_module(path, what, spec), name, None)
    if found is None:
        raise ConfigError(f"{what}={spec}: {path} has no {name!r}")
    if not callable(found) and type(found) not in {type(entry) for entry in registry.values()}:
        raise ConfigError(f"{what}={spec}: {name} is of type {type(found).__name__}, expected a function")
    return found  # type: ignore[no-any-return]


def _module(path: str, what: str, spec: str) -> ModuleType:
    is_file = path.endswith(".py") or "/" in path
    file = Path(path).expanduser().resolve()
    if is_file and not file.is_file():
        raise ConfigError(f"{what}={spec}: no file {file}")
    try:
        return _module_from_file(file) if is_file else importlib.import_module(path)
    except (Exception, SystemExit) as error:  # the user's module runs here and may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{what}={spec} cannot be imported: {reason}") from error


def _module_from_file(file: Path) -> ModuleType:
    # Two files of the same name in different folders are different modules.
    name = f"corral_hook_{file.stem}_{hashlib.sha256(bytes(file)).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look the module up by name while it is being run
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
