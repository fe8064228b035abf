"""A user's reward function, named by file path or module."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from corral.errors import DataError
from corral.rewards.registry import RewardFunction

_KEY = "reward.custom_reward_function"
_KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")


def is_file_path(path: str) -> bool:
    """Whether `path` names a file (`rewards/mine.py`) rather than a module (`package.rewards`)."""
    return path.endswith(".py") or "/" in path


def check_file(path: str) -> None:
    """Raises DataError when `path` names a file that is not there; the code itself is not run."""
    if is_file_path(path) and not Path(path).expanduser().is_file():
        raise DataError(f"{_KEY}.path={path}: no such file")


def load_reward_function(path: str, name: str, reward_kwargs: dict[str, Any]) -> RewardFunction:
    """Import `path` and return its function `name`, after checking that it takes the keywords it will be called with.

    Raises DataError when the file, module or name is missing, importing fails (what the user's code raised
    is the cause), or the signature does not fit.
    """
    check_file(path)
    try:
        module = (
            _module_from_file(Path(path).expanduser().resolve())
            if is_file_path(path)
            else importlib.import_module(path)
        )
    except (Exception, SystemExit) as error:  # the user's module runs here and may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(f"{_KEY}.path={path} cannot be imported: {reason}") from error
    function = getattr(module, name, None)
    if not callable(function):
        problem = "has no function" if function is None else "is not a function:"
        raise DataError(f"{path} {problem} {name!r}; set {_KEY}.name to the function to call")
    check_signature(function, f"{name} in {path}", reward_kwargs)
    return function  # type: ignore[no-any-return]


def check_signature(function: RewardFunction, label: str, reward_kwargs: dict[str, Any]) -> None:
    """Raises DataError unless `function` can be called with the reward keywords and `reward_kwargs`."""
    if clash := sorted(set(reward_kwargs) & set(_KEYWORDS)):
        raise DataError(f"reward_kwargs may not set {', '.join(clash)}: the row sets it")
    try:
        inspect.signature(function).bind(**dict.fromkeys(_KEYWORDS), **reward_kwargs)
    except TypeError as error:
        raise DataError(
            f"reward function {label} cannot be called with {', '.join([*_KEYWORDS, *reward_kwargs])}: {error}"
        ) from None


def _module_from_file(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"corral_custom_reward_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise DataError(f"{_KEY}.path={file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look the module up by name while it is being run
    spec.loader.exec_module(module)
    return module
