"""The other nodes of a cluster: an actor on each, which is asked again and again for what its folder has that ours has
not."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.job.agent.attempt import Attempt
from corral.job.agent.mirror_copy import Copy
from corral.job.agent.mirror_node import LARGEST, MIB, Grown, MirrorNode

POLL = 1.0  # seconds between questions to a node
NODES = 5.0  # seconds between looks for nodes
START = 90.0  # seconds nodes have to start an actor, and to unpack the source
ANSWER = 60.0  # seconds of silence after which a node is asked through a new actor
REMOVE = 5.0


@dataclass
class _Node:
    """actor: None while there is none. shared: its folder is the head's. pending: the question it has not answered.
    complete: at the last answer it had no more."""

    copy: Copy
    actor: Any = None
    shared: bool = False
    pending: Any = None
    asked_at: float = 0.0
    due: float = 0.0
    complete: bool = False


class Mirrored:
    """say: gets lines for people, each once."""

    def __init__(self, attempt: Attempt, say: Callable[[str], None]) -> None:
        self._attempt, self._tell = attempt, say
        self._nodes: dict[str, _Node] = {}
        self._owners: dict[str, str] = {}
        self._mark = f".head-{secrets.token_hex(8)}"
        self._bundle: Any = None
        self._look_at = 0.0
        self._said: set[str] = set()

    def begin(self) -> tuple[int, str | None]:
        """How many other nodes there are, and why fewer of them are prepared than the job needs."""
        import ray

        spec = self._attempt.spec
        (self._attempt.folder / self._mark).touch(mode=0o600)
        ray.init(
            address=os.environ["RAY_ADDRESS"],
            namespace=f"corral-{spec.submission_id}",
            log_to_driver=False,
            logging_level="ERROR",
        )
        problems = self._look()
        ready = sum(node.shared or node.actor is not None for node in self._nodes.values())
        return len(self._nodes), problems[0] if problems and ready + 1 < spec.nodes else None

    def turn(self, wait: float) -> None:
        """Take what was answered within `wait` seconds, ask whoever is due, look for new nodes."""
        if time.monotonic() >= self._look_at:
            self._look()
        self._ask(list(self._nodes.values()), last=False)
        if not self._answers(list(self._nodes.values()), wait):
            time.sleep(wait)

    def last(self, seconds: float) -> bool:
        """Fetch all there is from every node that answers in time; whether that were all."""
        deadline = time.monotonic() + seconds
        wanted = [node for node in self._nodes.values() if not node.shared]
        for node in wanted:  # an answer that is under way may be older than the last words
            node.complete, node.pending, node.due = False, None, 0.0
        while (left := [node for node in wanted if not node.complete and node.actor]) and time.monotonic() < deadline:
            self._ask(left, last=True)
            self._answers(left, max(0.0, deadline - time.monotonic()))
        return all(node.complete for node in wanted)

    def remove(self, all_of_it: bool) -> None:
        """The folder on other nodes, or the source alone."""
        import ray

        refs = [node.actor.remove.remote(all_of_it) for node in self._nodes.values() if node.actor]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=REMOVE)
        self._forget_mark()

    # Nodes ----------------------------------------------------------------------------------------------------------

    def _others(self) -> list[str]:
        import ray

        own = ray.get_runtime_context().get_node_id()
        return [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != own]

    def _look(self) -> list[str]:
        """Prepare nodes that have no actor, forget those that are gone; what went wrong."""
        alive = self._others()
        for name in [name for name in self._nodes if name not in alive]:
            del self._nodes[name]  # what it had told is here; what it had not is gone with it
        for name in alive:
            self._nodes.setdefault(name, _Node(Copy(name, self._attempt.run, self._owners)))
        fresh = {name: node for name, node in self._nodes.items() if node.actor is None and not node.shared}
        problems = self._prepare(fresh) if fresh else []
        for problem in problems:
            self._say(problem)
        self._look_at = time.monotonic() + (START if problems else NODES)
        return problems

    def _prepare(self, fresh: dict[str, _Node]) -> list[str]:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actors = {
            name: ray.remote(MirrorNode)
            .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(name, soft=False))
            .remote(str(self._attempt.folder))
            for name in fresh
        }
        begun, problems = _gather({name: actor.begin.remote(self._mark) for name, actor in actors.items()}, START)
        apart = {name: actors[name] for name, is_apart in begun.items() if is_apart}
        unpacked: dict[str, Any] = dict.fromkeys(apart)
        digest = self._attempt.spec.bundle
        if digest is not None and apart:
            if self._bundle is None:
                self._bundle = ray.put(Path(self._attempt.spec.bundle_path or "").read_bytes())
            refs = {name: actor.unpack.remote(self._bundle, digest) for name, actor in apart.items()}
            unpacked, more = _gather(refs, START)
            problems |= more | {name: problem for name, problem in unpacked.items() if problem is not None}
        for name, is_apart in begun.items():
            if name not in problems:
                fresh[name].shared = not is_apart
                fresh[name].actor = actors[name] if is_apart else None  # which ends the other one
        return [f"node {name[:12]}: {problem}" for name, problem in problems.items()]

    def _forget_mark(self) -> None:
        with suppress(OSError):
            (self._attempt.folder / self._mark).unlink()

    # Questions and answers ------------------------------------------------------------------------------------------

    def _ask(self, nodes: list[_Node], last: bool) -> None:
        now = time.monotonic()
        for node in nodes:
            if node.actor and node.pending is None and (last or now >= node.due):
                node.pending, node.asked_at = node.actor.grown.remote(node.copy.known, last), now

    def _answers(self, nodes: list[_Node], wait: float) -> bool:
        """Whether anybody was asked."""
        import ray

        pending = {node.pending: node for node in nodes if node.pending is not None}
        if not pending:
            return False
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=wait)
        for ref in ready:
            self._take(pending[ref], ref)
        for node in pending.values():
            if node.pending is not None and time.monotonic() - node.asked_at > ANSWER:
                node.actor = node.pending = None
        return True

    def _take(self, node: _Node, ref: Any) -> None:
        import ray

        node.pending = None
        try:
            grown: Grown = ray.get(ref)
            for piece in grown.pieces:
                node.copy.take(piece)
        except ray.exceptions.RayError:  # the node, or its actor, is gone; when it is there, it gets a new one
            node.actor = None
            return
        except OSError as error:
            self._say(f"cannot copy a file of another node: {error.strerror}")
            node.due = time.monotonic() + 10 * POLL
            return
        node.complete = not grown.more
        took = time.monotonic() - node.asked_at
        node.due = 0.0 if grown.more else time.monotonic() + max(POLL, 5 * took)
        if grown.skipped:
            names = f"{grown.skipped[0]} and {len(grown.skipped) - 1} more" if grown.skipped[1:] else grown.skipped[0]
            self._say(f"checkpoints and files over {LARGEST // MIB} MiB stay on their nodes: {names}", key="skipped")

    def _say(self, line: str, key: str | None = None) -> None:
        if (key or line) not in self._said:
            self._said.add(key or line)
            self._tell(line)


def _gather(refs: dict[str, Any], seconds: float) -> tuple[dict[str, Any], dict[str, str]]:
    """(answers, problems) by name."""
    import ray

    ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=seconds)
    answers, problems = {}, {}
    for name, ref in refs.items():
        if ref not in ready:
            problems[name] = f"no answer within {seconds:g} s"
            continue
        try:
            answers[name] = ray.get(ref)
        except ray.exceptions.RayError as error:
            problems[name] = " ".join(str(error).split())[-300:]
    return answers, problems
