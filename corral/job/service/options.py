"""Settings from a file and the command line."""

from __future__ import annotations

import argparse
import difflib
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from corral.errors import ConfigError
from corral.job.backends.profile import asked_profile, load, profile_names
from corral.job.service.errors import one_line, validation_line
from corral.job.service.settings import Settings

_PLAIN = ("host", "port", "public_url", "database_url", "devices", "max_nodes", "max_devices_per_node", "backend")
_FILES = ("data_dir", "token_file", "secrets_dir")
_SECTIONS = {
    "ray": {"ray_address": "address"},
    "kubernetes": {"kubeconfig": "kubeconfig", "kube_context": "context", "namespace": "namespace"},
    "nodes": {"agent_dir": "agent_dir", "profiles_dir": "profiles_dir"},
}
_PROFILE = {"default_devices": "devices_per_node", "default_kind": "kind", "image": "images", "bootstrap": "bootstraps"}


def settings_of(args: argparse.Namespace) -> Settings:
    """`--config` holds the fields of Settings; an option of the command line wins over it.

    Raises ConfigError for a file or value that does not fit.
    """
    content = read_config(args.config) if args.config else {}
    given = vars(args)
    content |= {name: given[name] for name in (*_PLAIN, *_FILES) if given.get(name) is not None}
    content.setdefault("data_dir", os.environ.get("CORRAL_SERVICE_DIR") or "~/.corral/service")
    if url := os.environ.get("CORRAL_DATABASE_URL"):  # holds a password, which a command line would show to everyone
        content.setdefault("database_url", url)
    for section in ("profile", "limits", "source_roots", *_SECTIONS):
        if not isinstance(content.setdefault(section, {}), dict):
            raise ConfigError(f"{args.config}: {section} has to be a mapping")
    content["profile"] |= {field: given[name] for name, field in _PROFILE.items() if given.get(name) is not None}
    for section, options in _SECTIONS.items():
        content[section] |= {field: given[name] for name, field in options.items() if given.get(name) is not None}
    content["source_roots"] |= dict(args.source_root or [])
    if args.quota is not None:
        content["limits"] |= {"active_devices_per_repository": args.quota}
    try:
        settings = TypeAdapter(Settings).validate_python(content)
    except ValidationError as error:
        raise ConfigError(f"{args.config or 'settings of the service'}: {_misfit(error)}") from error
    settings = _absolute(settings)
    for name in profile_names(settings.nodes.profiles_dir):
        load(name, settings.nodes.profiles_dir)  # before the first job that names it
    asked_profile(None, "auto", settings)
    return settings


def _misfit(error: ValidationError) -> str:
    """A key that is not there is told with those that are."""
    first = error.errors()[0]
    if first["type"] != "unexpected_keyword_argument":
        return validation_line(error)
    *sections, key = (str(part) for part in first["loc"])
    where: Any = Settings
    for section in sections:
        where = get_type_hints(where)[section]
    known = [field.name for field in fields(where)]
    near = difflib.get_close_matches(key, known, 1)
    said = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    return one_line(f"{'.'.join((*sections, key))} is no setting; {said}")


def read_config(path: Path) -> dict[str, Any]:
    """Raises ConfigError when it is no YAML mapping."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{path} has to be a mapping of settings")
    return content


def _absolute(settings: Settings) -> Settings:
    def full(path: Path | None) -> Path | None:
        return None if path is None else path.expanduser().absolute()

    for prefix in settings.source_roots:
        if not prefix.startswith("/") or ".." in prefix.split("/"):
            raise ConfigError(f"source root {prefix!r} has to be an absolute path without `..`")
    if settings.secrets_dir is not None and not settings.secrets_dir.expanduser().is_dir():
        raise ConfigError(f"secrets folder {settings.secrets_dir} does not exist; make it, or leave --secrets-dir out")
    return replace(
        settings,
        data_dir=settings.data_dir.expanduser().absolute(),
        nodes=replace(settings.nodes, profiles_dir=full(settings.nodes.profiles_dir)),
        token_file=full(settings.token_file),
        secrets_dir=full(settings.secrets_dir),
        source_roots={prefix: path.expanduser().absolute() for prefix, path in settings.source_roots.items()},
    )
