"""The parity gate can fail: each planted fault is caught, and the place where it was planted is what the gate names.

A fault is a change of text in a copy of the package. Its run has 2 nodes × 4 ranks with sequence parallel 2 in float64;
the reference is one process of the package as it is, so that faults of one process are seen as well.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import corral
from corral.data.arithmetic import write_arithmetic
from corral.e2e.case import Parity
from corral.e2e.parity import compare, parity_checks
from corral.e2e.result import Check, ParityReport
from corral.engine.tiny import write_tiny_model
from corral.workers.local_cluster import LocalCluster
from tests.trainer.parity import parity_overrides
from tests.trainer.runs import Inputs, train

PARITY = Parity(args=[])
STEPS = 2
RECORDED = ("trainer.record_phases=full", "trainer.save_freq=-1", "data.train_batch_size=8")
RECORDED += ("actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.collective_check=False")
# The trainer ends a run whose engine and trainer disagree on a prompt, which some of the faults bring about.
NO_PROBE = ("actor_rollout_ref.rollout.probe_tolerance=1000",)


@dataclass(frozen=True)
class Change:
    """Text of a file of the package, and what stands there instead."""

    file: str
    right: str
    wrong: str


@dataclass(frozen=True)
class Fault:
    """phase, name, rank (where there is one to blame): of the first row that is not equal. hints: what the report says
    about it. step: at which it first shows; the run does no more."""

    changes: tuple[Change, ...]
    phase: str
    name: str
    rank: int | None = None
    hints: tuple[str, ...] = ()
    step: int = 1
    overrides: tuple[str, ...] = ()


FAULTS = {
    "mini-batch normalised per rank": Fault(
        (
            Change(
                "engine/losses.py",
                "_weights(self.update, mode, batch, self.denominators,",
                "_weights(self.update, mode, batch, Denominators.of(batch),",
            ),
        ),
        "gradients",
        "actor/0/statistics",
        hints=("near the data-parallel degree", "divide by counts of its own", "but by no one factor"),
    ),
    "SP gradient off by the SP factor": Fault(
        (Change("engine/engine.py", "* self.parallel.world", "* self.plan.dp"),),
        "gradients",
        "critic/0/gradients",
        hints=("reference = 2 * found, exactly the sequence-parallel degree", "tensors differ"),
    ),
    "one rank with another seed": Fault(
        (
            Change(
                "workers/worker.py",
                "rollout.generate(requests, sampling, step=step)",
                "rollout.generate(requests, sampling, step=step + (self.rank.rank == 5))",
            ),
        ),
        "samples",
        "responses",
        rank=5,
        hints=("all of them were computed by rank 5", "random stream"),
    ),
    "stale rollout weights on one replica": Fault(
        (  # behind the probe's back: the replica gets them, is found to have them, and loses them again
            Change(
                "workers/worker.py",
                "            if self.rank.world > 1 or self._runs_vllm:\n",
                "            copies = rollout._module.named_parameters()\n"
                "            before = [(name, copy.clone()) for name, copy in copies]\n"
                "            if self.rank.world > 1 or self._runs_vllm:\n",
            ),
            Change(
                "workers/worker.py",
                "        return float((here - torch",
                "        if self.rank.rank == 3:\n"
                "            self.rollout.update_weights(before)\n"
                "        return float((here - torch",
            ),
        ),
        "samples",
        "responses",
        rank=3,
        hints=("all of them were computed by rank 3", "an engine without the trainer's weights"),
        step=2,
    ),
    "mask off by one": Fault(
        (
            Change(
                "batch.py",
                "response_mask=torch.ones(len(flat), dtype=torch.bool),",
                "response_mask=torch.tensor([j < len(r) - 1 for r in responses for j in range(len(r))]),",
            ),
        ),
        "samples",
        "response_mask",
        hints=("only last tokens of responses differ", "off by one"),
    ),
    "dropout left on": Fault(
        (
            Change("engine/engine.py", "self.module.eval()", "self.module.train()"),
            Change(
                "engine/engine.py",
                "logits_to_keep=row.predict_at).logits[0]",
                "logits_to_keep=row.predict_at).logits[0]\n"
                "        logits = torch.nn.functional.dropout(logits, 0.1, self.module.training)",
            ),
        ),
        "log_probs",
        "old_log_probs",
        hints=("they are on all ranks", "dropout left on"),
        overrides=NO_PROBE,
    ),
    "a metric that is silently missing": Fault(
        (Change("trainer/ppo.py", 'metrics["actor/entropy"] =', "_ ="),),
        "metrics",
        "actor/entropy",
        hints=("one branch reports",),
    ),
    "a rank that computes in bfloat16": Fault(
        (
            Change(
                "engine/engine.py",
                "logits_to_keep=row.predict_at).logits[0]",
                "logits_to_keep=row.predict_at).logits[0]\n"
                "        logits = logits.bfloat16().to(logits.dtype) if at.rank == 5 else logits",
            ),
        ),
        "log_probs",
        "old_log_probs",
        rank=4,
        hints=("all of them were computed by ranks 4 to 5", "rounding to bfloat16"),
        overrides=NO_PROBE,
    ),
}


@dataclass(frozen=True)
class Runs:
    inputs: Inputs
    reference: Path
    address: str

    def report(self, folder: Path, steps: int, *overrides: str, changes: Sequence[Change] = ()) -> ParityReport:
        """Of the run of eight ranks with the changes made, in folder/run, against as many steps of the reference."""
        source = changed_package(folder / "source", changes)
        split = parity_overrides(self.inputs, folder / "run", split=True, dtype="float64")
        last = f"trainer.total_training_steps={steps}"
        done = train([*split, *RECORDED, last, *overrides], {"RAY_ADDRESS": self.address}, cwd=source)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr
        reference = folder / "reference"
        shutil.copytree(self.reference, reference)
        lines = (reference / "metrics.jsonl").read_text().splitlines(keepends=True)
        (reference / "metrics.jsonl").write_text("".join(lines[:steps]))
        for file in reference.glob("phases/*"):
            if int(file.stem.removeprefix("step-")) > steps:
                file.unlink()
        return compare(reference, folder / "run", PARITY, folder / "divergence")


def changed_package(folder: Path, changes: Sequence[Change]) -> Path:
    """A folder that holds the package with all changes made; each of them has to fit."""
    copy = folder / "corral"
    shutil.copytree(Path(corral.__file__).parent, copy)
    for change in changes:
        source = (copy / change.file).read_text()
        assert source.count(change.right) == 1, f"{change.file} has changed: plant the fault anew"
        (copy / change.file).write_text(source.replace(change.right, change.wrong))
    return folder


def failed(report: ParityReport) -> list[Check]:
    return [check for check in parity_checks(report) if not check.ok]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("parity")
    write_tiny_model(folder / "model", mean_length=12, layers=2)
    write_arithmetic(folder / "data", seed=0, train=64, test=8)
    inputs = Inputs(folder / "model", folder / "data")
    alone = parity_overrides(inputs, folder / "one", split=False, dtype="float64")
    done = train([*alone, *RECORDED, f"trainer.total_training_steps={STEPS}"])
    assert done.returncode == 0, done.stderr
    with LocalCluster.start(nodes=2, devices_per_node=4, resource="CPU") as cluster:
        yield Runs(inputs, folder / "one", cluster.address)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_each_fault_can_be_planted(fault: Fault, tmp_path: Path):
    """So that a change of the package is not found to be in its way by the slow tests alone."""
    copy = changed_package(tmp_path, fault.changes) / "corral"
    for change in fault.changes:
        compile((copy / change.file).read_text(), change.file, "exec")


@pytest.mark.slow
def test_the_package_as_it_is_is_equal_in_every_phase(runs: Runs, tmp_path: Path):
    report = runs.report(tmp_path, STEPS)
    assert report.first is None
    assert failed(report) == []
    assert len(report.compared) == 8
    assert min(report.compared.values()) > 0
    assert not (tmp_path / "divergence").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str, runs: Runs, tmp_path: Path):
    fault = FAULTS[name]
    report = runs.report(tmp_path, fault.step, *fault.overrides, changes=fault.changes)
    first = report.first
    assert first is not None
    assert (first.step, first.phase, first.name) == (fault.step, fault.phase, fault.name)
    assert fault.rank in (None, first.rank)
    assert [hint for hint in fault.hints if hint not in report.hint] == [], report.hint
    assert failed(report)[0].name == fault.phase
    assert fault.name in str(failed(report)[0])
    index = json.loads((tmp_path / "divergence" / "index.json").read_text())
    assert index["first"] == first.model_dump()
