"""The other nodes of a cluster: an actor on each, which is asked again and again for what its folder has that ours has
not. No answer is waited for by itself, so that a node that is stuck holds up no other."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from corral.job.agent.attempt import Attempt
from corral.job.agent.mirror_copy import Copy
from corral.job.agent.mirror_node import LARGEST, MIB, Grown, MirrorNode

POLL = 1.0  # seconds between questions to a node
NODES = 5.0  # seconds between looks for nodes
ANSWER = 90.0  # seconds a node has for an answer, the start of its actor included; then it is tried anew
BEGIN = 180.0  # seconds that all nodes have to be prepared
AGAIN = 30.0  # seconds until the next try with a node that failed
REMOVE = 5.0


class _Stage(Enum):
    """What a node is asked next; nothing when its folder is the head's."""

    BEGIN = "begin"
    UNPACK = "unpack"
    FOLLOW = "follow"
    SHARED = "shared"


@dataclass
class _Node:
    """name: Ray's. unpacked: it has had the source, which is unpacked once, as the job works in it. pending: the
    question it has not answered. complete: at the last answer it had no more. problem: why it is not prepared."""

    name: str
    copy: Copy
    actor: Any = None
    stage: _Stage = _Stage.BEGIN
    unpacked: bool = False
    pending: Any = None
    asked_at: float = 0.0
    due: float = 0.0
    complete: bool = False
    problem: str | None = None

    def fail(self, problem: str) -> None:
        if self.stage is not _Stage.FOLLOW:
            self.problem = f"node {self.name[:12]}: {problem}"
        self.actor = self.pending = None
        self.stage, self.due = _Stage.BEGIN, time.monotonic() + AGAIN


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
        self._ending = False

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
        self._look()
        deadline = time.monotonic() + BEGIN
        while self._unprepared() and time.monotonic() < deadline:
            self._round(self._nodes.values(), 0.2)
        left = self._unprepared()
        problems = [node.problem for node in self._nodes.values() if node.problem is not None]
        problems += [f"node {node.name[:12]}: no answer within {BEGIN:g} s" for node in left]
        ready = len(self._nodes) - len(problems)
        return len(self._nodes), problems[0] if problems and ready + 1 < spec.nodes else None

    def turn(self, wait: float) -> None:
        """Take what was answered within `wait` seconds, ask whoever is due, look for new nodes."""
        if time.monotonic() >= self._look_at:
            self._look()
        if not self._round(self._nodes.values(), wait):
            time.sleep(wait)

    def last(self, seconds: float) -> bool:
        """Fetch all there is from every node that answers in time; whether that were all."""
        deadline, self._ending = time.monotonic() + seconds, True
        wanted = [node for node in self._nodes.values() if node.stage is not _Stage.SHARED]
        for node in wanted:  # an answer that is under way may be older than the last words
            node.due, node.complete = 0.0, False
            node.pending = None if node.stage is _Stage.FOLLOW else node.pending
        while (left := [node for node in wanted if not node.complete]) and time.monotonic() < deadline:
            if not self._round(left, max(0.0, deadline - time.monotonic())):
                break
        return all(node.complete for node in wanted)

    def remove(self, all_of_it: bool) -> None:
        """The folder on other nodes, or the source alone; of a node that had more to give than came, the source."""
        import ray

        nodes = [node for node in self._nodes.values() if node.actor]
        refs = [node.actor.remove.remote(all_of_it and node.complete) for node in nodes]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=REMOVE)
        with suppress(OSError):
            (self._attempt.folder / self._mark).unlink()

    # Nodes ----------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Take in nodes that are new, forget those that are gone: what they had told is here."""
        import ray

        self._look_at = time.monotonic() + NODES
        own = ray.get_runtime_context().get_node_id()
        alive = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != own]
        for name in [name for name in self._nodes if name not in alive]:
            del self._nodes[name]
        for name in alive:
            self._nodes.setdefault(name, _Node(name, Copy(name, self._attempt.run, self._owners)))

    def _unprepared(self) -> list[_Node]:
        done = (_Stage.FOLLOW, _Stage.SHARED)
        return [node for node in self._nodes.values() if node.stage not in done and node.problem is None]

    def _round(self, nodes: Iterable[_Node], wait: float) -> bool:
        """Ask whoever is due, take what is answered within `wait` seconds; False when nobody is being asked."""
        import ray

        now = time.monotonic()
        for node in nodes:
            if node.pending is None and node.stage is not _Stage.SHARED and now >= node.due:
                node.pending, node.asked_at = self._question(node), now
        pending = {node.pending: node for node in nodes if node.pending is not None}
        if not pending:
            return False
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=wait)
        for ref in ready:
            self._take(pending[ref], ref)
        for node in pending.values():
            if node.pending is not None and time.monotonic() - node.asked_at > ANSWER:
                self._failed(node, f"no answer within {ANSWER:g} s")
        return True

    def _question(self, node: _Node) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if node.actor is None:
            there = NodeAffinitySchedulingStrategy(node.name, soft=False)
            options = ray.remote(MirrorNode).options(num_cpus=0, scheduling_strategy=there)
            node.actor = options.remote(str(self._attempt.folder))
        if node.stage is _Stage.BEGIN:
            return node.actor.begin.remote(self._mark)
        if node.stage is _Stage.UNPACK:
            if self._bundle is None:
                self._bundle = ray.put(Path(self._attempt.spec.bundle_path or "").read_bytes())
            return node.actor.unpack.remote(self._bundle, self._attempt.spec.bundle)
        return node.actor.grown.remote(node.copy.known, self._ending)

    def _take(self, node: _Node, ref: Any) -> None:
        import ray

        node.pending = None
        try:
            answer = ray.get(ref)
        except ray.exceptions.RayError as error:  # the node, or its actor, is gone; if it is there, it gets a new one
            self._failed(node, " ".join(str(error).split())[-300:])
            return
        if node.stage is _Stage.BEGIN:
            wants_source = self._attempt.spec.bundle is not None and not node.unpacked and not self._ending
            node.stage = _Stage.UNPACK if wants_source else _Stage.FOLLOW
            node.problem = None
            if not answer:
                node.stage, node.actor = _Stage.SHARED, None  # which ends it
        elif node.stage is _Stage.UNPACK:
            if answer is not None:
                self._failed(node, answer)
            else:
                node.unpacked, node.stage = True, _Stage.FOLLOW
        else:
            self._copy(node, answer)

    def _copy(self, node: _Node, grown: Grown) -> None:
        try:
            for piece in grown.pieces:
                node.copy.take(piece)
        except OSError as error:
            self._say(f"cannot copy a file of another node: {error.strerror}")
            node.due = time.monotonic() + 10 * POLL
            return
        took = time.monotonic() - node.asked_at
        node.complete = not grown.more
        node.due = 0.0 if grown.more else time.monotonic() + max(POLL, 5 * took)
        if grown.skipped:
            names = f"{grown.skipped[0]} and {len(grown.skipped) - 1} more" if grown.skipped[1:] else grown.skipped[0]
            self._say(f"checkpoints and files over {LARGEST // MIB} MiB stay on their nodes: {names}", key="skipped")

    def _failed(self, node: _Node, problem: str) -> None:
        node.fail(problem)
        if node.problem is not None:
            self._say(node.problem)

    def _say(self, line: str, key: str | None = None) -> None:
        if (key or line) not in self._said:
            self._said.add(key or line)
            self._tell(line)
