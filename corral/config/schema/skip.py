"""skip.*: record and replay of phases."""

# ruff: noqa: RUF009 (key and section build dataclass fields)
from __future__ import annotations

from dataclasses import dataclass

from corral.config.section import Section, key, section


@dataclass
class SkipRollout(Section):
    enable: bool = key(False, "Record generations, and replay recorded ones.")
    dump_dir: str = key("~/.corral/rollout_dump", "Folder of the recordings.")
    steps: list[int] = key([], "Iterations it applies to; the first is 1.", "steps")
    action: str = key("cache", "cache: this iteration's recording; repeat: else the nearest one below, else above.")


@dataclass
class Skip(Section):
    rollout: SkipRollout = section(SkipRollout, "Generation.")
