"""`resolve`: a command line in, a plan out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from corral.config.check import check_files, notices
from corral.config.checkpoints import find
from corral.config.compose import compose
from corral.config.derive import derive
from corral.config.memory import estimate
from corral.config.overrides import parse
from corral.config.plan import Plan
from corral.config.reads import name_fields
from corral.config.schema.root import Config, leaves
from corral.config.spellings import spellings
from corral.config.unused import unused
from corral.config.validate import Values, check_values


@dataclass(frozen=True)
class Resolved:
    """The plan, and the configuration it came from: as plain data (the content of config.yaml) and typed; the keys the
    user set, under their own names."""

    plan: Plan
    config: dict[str, Any]
    typed: Config
    given: frozenset[str]
    environ: Mapping[str, str]


def resolve(overrides: Sequence[str], environ: Mapping[str, str] = os.environ) -> Resolved:
    """The plan of `overrides` on this machine. Reads RAY_ADDRESS and CORRAL_RUN_DIR from `environ`.

    Raises ConfigError (a key, a value, a combination, a path that leads nowhere) or DataError (a file that is not what
    its key needs), each in one line; nothing is written.
    """
    parsed = parse(overrides)
    config, plain = compose(parsed)
    values = flatten(plain)
    check_values(values)
    plan = derive(config, environ)
    given = frozenset(key for override in parsed for key in override.keys)
    check_files(plan, given)
    trainer = plan.trainer
    resumed = find(trainer.resume_mode, trainer.resume_from_path, trainer.checkpoint_dir)
    going_on = [f"resuming from {resumed.folder.name} in {resumed.folder.parent}"] if resumed else []
    plan = replace(
        plan,
        memory=estimate(plan),
        notices=(*going_on, *plan.notices, *spellings(parsed, values), *notices(plan)),
        unused=unused(parsed, values, plan),
    )
    name_fields(plan)
    return Resolved(plan, plain, config, given, environ)


def flatten(plain: dict[str, Any]) -> Values:
    """Full dotted key → value, for every key of the schema."""
    return {name: reduce(lambda node, part: node[part], name.split("."), plain) for name in leaves()}
