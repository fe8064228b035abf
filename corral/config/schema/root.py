"""The whole schema, and a flat view of it."""

# ruff: noqa: RUF009 (key and section build dataclass fields)
from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import get_type_hints

from corral.config.schema.actor import Actor
from corral.config.schema.algorithm import Algorithm
from corral.config.schema.critic import Critic
from corral.config.schema.data import Data
from corral.config.schema.model import Model
from corral.config.schema.ref import Ref
from corral.config.schema.reward import Reward
from corral.config.schema.rollout import Rollout
from corral.config.schema.skip import Skip
from corral.config.schema.trainer import Trainer
from corral.config.section import Leaf, Section, section


@dataclass
class ActorRolloutRef(Section):
    model: Model = section(Model, "Weights of actor, rollout and reference.")
    actor: Actor = section(Actor, "The policy update.")
    ref: Ref = section(Ref, "The reference model.")
    rollout: Rollout = section(Rollout, "Generation.")


@dataclass
class Config(Section):
    algorithm: Algorithm = section(Algorithm, "From rewards to advantages.")
    data: Data = section(Data, "Prompts.")
    actor_rollout_ref: ActorRolloutRef = section(ActorRolloutRef, "The policy in its three roles.")
    critic: Critic = section(Critic, "The value model.")
    reward: Reward = section(Reward, "Scoring.")
    trainer: Trainer = section(Trainer, "Where and how long.")
    skip: Skip = section(Skip, "Record and replay.")


@cache
def leaves() -> dict[str, Leaf]:
    """Every key of the schema by its full dotted name, in schema order."""
    out: dict[str, Leaf] = {}
    _collect(Config, "", out)
    return out


@cache
def _heirs() -> dict[str, tuple[str, ...]]:
    out: dict[str, tuple[str, ...]] = {}
    for name, leaf in leaves().items():
        for link in re.findall(r"\$\{([^}]+)\}", leaf.default) if isinstance(leaf.default, str) else ():
            parent = f"{name.rpartition('.')[0]}{link}" if link.startswith(".") else link
            out[parent] = (*out.get(parent, ()), name)
    return out


def heirs_of(key: str) -> tuple[str, ...]:
    """The keys whose default is taken from this one, or has it inside."""
    return _heirs().get(key, ())


def _collect(kind: type, prefix: str, out: dict[str, Leaf]) -> None:
    hints = get_type_hints(kind)
    for item in fields(kind):
        name, annotation = f"{prefix}{item.name}", hints[item.name]
        if isinstance(annotation, type) and issubclass(annotation, Section):
            _collect(annotation, f"{name}.", out)
            continue
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        out[name] = Leaf(annotation, default, item.metadata["doc"], item.metadata["unit"])
