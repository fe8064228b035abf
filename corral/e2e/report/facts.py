"""What ran: the states of a job with their times, and the facts of its plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from corral.e2e.report import text
from corral.e2e.report.html import Child, el, folded, pairs
from corral.e2e.report.story import Side

MOST_STATES = 60
_PLAN = (
    ("device", "topology.device"),
    ("nodes", "topology.nnodes"),
    ("devices per node", "topology.devices_per_node"),
    ("world", "topology.world"),
    ("launcher", "topology.launcher"),
    ("samples per step", "samples_per_step"),
    ("prompts per step", "data.train_batch_size"),
    ("prompt, response tokens at most", "data.max_prompt_length data.max_response_length"),
    ("advantages", "algorithm.adv_estimator"),
    ("actor: data × sequence parallel", "actor.dp actor.sp"),
    ("critic: data × sequence parallel", "critic.dp critic.sp"),
    ("actor: master, compute dtype", "actor.master_dtype actor.compute_dtype"),
    ("actor: optimizer steps, mini-batch", "actor_update.optimizer_steps actor_update.mini_batch_prompts"),
    ("critic: optimizer steps, mini-batch", "critic_update.optimizer_steps critic_update.mini_batch_prompts"),
    ("actor: learning rate", "actor.optim.lr"),
    ("critic: learning rate", "critic.optim.lr"),
    ("rollout", "rollout.name"),
    ("steps", "trainer.total_training_steps"),
    ("seed", "data.seed"),
)


def job(title: str, side: Side) -> list[Child]:
    """Its states in their order, where it ran, and with what."""
    part = side.part
    size = f"{text.count(part.nodes, 'node')} × {text.count(part.devices_per_node, 'device')}"
    facts: list[tuple[str, Child]] = [
        ("job", el("code", text.line(part.job_id))),
        ("size", size),
        ("took", text.seconds(part.seconds)),
        ("records", el("code", f"{side.folder}/")),
    ]
    command = " ".join(text.line(argument, 2000) for argument in part.command[:500])
    return [
        el("h3", title),
        el("ol", _states(part.states[:MOST_STATES]), class_="states"),
        pairs(facts, "columns"),
        folded("Command", el("pre", el("code", command), class_="command")),
    ]


def _states(states: Sequence[tuple[str, float]]) -> list[Child]:
    """Each with the seconds it lasted; the last one lasts."""
    items: list[Child] = []
    for at, (state, since) in enumerate(states):
        last = at + 1 == len(states)
        lasted = "" if last else text.seconds(states[at + 1][1] - since)
        kind = state.lower() if last and state in ("SUCCEEDED", "FAILED", "TIMEOUT", "CANCELLED") else None
        items.append(el("li", el("b", text.line(state, 40)), el("span", lasted), class_=kind))
    return items


def plan(document: Any) -> list[Child]:
    """The facts a reader looks for, then all of it."""
    if not isinstance(document, dict):
        return [el("p", "plan.json is broken or too big", class_="note")]
    facts: list[tuple[str, Child]] = []
    for name, paths in _PLAN:
        values = [value for path in paths.split() if (value := _at(document, path)) is not None]
        if values:
            joint = " × " if "×" in name else ", "
            facts.append((name, joint.join(text.line(value, 100) for value in values)))
    whole = json.dumps(document, indent=1, ensure_ascii=False)
    return [
        pairs(facts, "columns"),
        folded("All of plan.json", el("pre", el("code", text.fit(whole, 60_000)))),
    ]


def _at(document: Any, path: str) -> str | int | float | bool | None:
    for key in path.split("."):
        document = document.get(key) if isinstance(document, dict) else None
    return document if isinstance(document, str | int | float | bool) else None
