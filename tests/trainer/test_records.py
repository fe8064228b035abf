"""What a run leaves in its folder, and what it does with what an earlier run left there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from corral.config.resolve import resolve
from corral.errors import InfraError
from corral.trainer.records import RECORDS, Records
from tests.trainer.runs import Inputs, metrics, samples, train_here


@pytest.fixture(scope="module")
def run_dir(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one run of two steps."""
    folder = tmp_path_factory.mktemp("records") / "run"
    assert train_here(inputs.overrides(folder, "trainer.total_training_steps=2", "reward.num_workers=1")) == 0
    return folder


def test_the_plan_and_the_configuration(run_dir: Path, inputs: Inputs):
    plan = json.loads((run_dir / "plan.json").read_text())
    assert plan["topology"]["world"] == 1
    assert plan["samples_per_step"] == 8
    assert plan["actor_update"]["optimizer_steps"] == 2
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert config["data"]["train_batch_size"] == 8
    assert config["actor_rollout_ref"]["model"]["path"] == str(inputs.model)


def test_config_yaml_describes_the_run_completely(run_dir: Path, tmp_path: Path):
    """Given back leaf by leaf, it makes the same plan."""
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    del config["data"]["val_files"]  # a file that is named has to be there, also when nothing reads it
    again = resolve(list(_as_overrides(config)), {}).plan.as_dict()
    recorded = json.loads((run_dir / "plan.json").read_text())
    for plan in (again, recorded):  # these tell which keys were set by hand
        del plan["unused"]
        del plan["notices"]
    assert json.loads(json.dumps(again)) == recorded


def _as_overrides(node: object, path: str = ""):
    if isinstance(node, dict) and node:
        for name, child in node.items():
            yield from _as_overrides(child, f"{path}.{name}" if path else name)
    elif isinstance(node, str):
        yield f'{path}="{node}"'
    elif node not in ({}, []):
        yield f"{path}={json.dumps(node)}"


def test_one_line_of_metrics_a_step(run_dir: Path):
    assert [step["step"] for step in metrics(run_dir)] == [1, 2]
    assert [step["training/global_step"] for step in metrics(run_dir)] == [1, 2]
    assert all(step["timing_s/step"] >= step["timing_s/gen"] > 0 for step in metrics(run_dir))


def test_the_samples_of_each_step(run_dir: Path):
    for step in (1, 2):
        rows = samples(run_dir, step)
        assert len(rows) == 8
        assert {row["step"] for row in rows} == {step}
        assert all(len(row["values"]) == len(row["response_ids"]) <= 24 for row in rows)


def test_the_trace_opens_and_names_the_phases_of_driver_and_ranks(run_dir: Path):
    trace = json.loads((run_dir / "trace.json").read_text())
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    assert set(threads.values()) == {"driver", "rank-0"}
    done: dict[str, list[str]] = {"driver": [], "rank-0": []}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            done[threads[event["pid"], event["tid"]]].append(event["name"])
    assert done["driver"].count("step") == done["driver"].count("update_actor") == 2
    assert done["rank-0"].count("update_actor") == done["rank-0"].count("update_critic") == 2
    assert {"build", "start_rollout", "generate", "old_log_prob", "values", "update_weights"} <= set(done["rank-0"])


def test_the_progress_of_the_rank(run_dir: Path):
    progress = json.loads((run_dir / "progress" / "rank-0.json").read_text())
    assert (progress["rank"], progress["state"]) == (0, "idle")


def test_earlier_records_are_moved_and_never_overwritten(inputs: Inputs, tmp_path: Path):
    folder = tmp_path / "run"
    (folder / "earlier" / "1").mkdir(parents=True)
    (folder / "earlier" / "1" / "metrics.jsonl").write_text("the oldest\n")
    left = []
    for _ in range(2):
        assert train_here(inputs.overrides(folder, "reward.num_workers=1")) == 0
        left.append((folder / "metrics.jsonl").read_text())
    assert (folder / "earlier" / "1" / "metrics.jsonl").read_text() == "the oldest\n"
    assert (folder / "earlier" / "2" / "metrics.jsonl").read_text() == left[0]
    assert {file.name for file in (folder / "earlier" / "2").iterdir()} >= {"plan.json", "config.yaml", "trace.json"}
    assert not (folder / "earlier" / "3").exists()
    assert (folder / "metrics.jsonl").read_text() == left[1]


def test_a_refused_run_leaves_earlier_records_where_they_are(inputs: Inputs, run_dir: Path):
    before = (run_dir / "metrics.jsonl").read_bytes()
    assert train_here(inputs.overrides(run_dir, "trainer.nnode=1")) == 78
    assert train_here(inputs.overrides(run_dir, "data.train_batch_size=128")) == 1
    assert (run_dir / "metrics.jsonl").read_bytes() == before
    assert not (run_dir / "earlier").exists()


def test_every_kind_of_record_moves(tmp_path: Path):
    for name in RECORDS:
        (tmp_path / name).write_text(name)
    Records(tmp_path).close()
    assert {file.name: file.read_text() for file in (tmp_path / "earlier" / "1").iterdir()} == {n: n for n in RECORDS}


def test_metrics_are_on_disk_line_by_line(tmp_path: Path):
    records = Records(tmp_path)
    records.metrics(1, {"a": 0.1 + 0.2})
    assert metrics(tmp_path) == [{"step": 1, "a": 0.1 + 0.2}]
    records.metrics(2, {"a": 1e-300})
    assert metrics(tmp_path)[1] == {"step": 2, "a": 1e-300}
    records.close()


@pytest.mark.parametrize("path", ["/proc/corral", "/dev/null/run"])
def test_a_folder_that_cannot_be_made(path: str):
    with pytest.raises(InfraError, match=r"run folder /.*; choose another with trainer.default_local_dir"):
        Records(path)


def test_records_elsewhere(inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """CORRAL_RUN_DIR takes the records; saved weights stay with the checkpoints."""
    monkeypatch.setenv("CORRAL_RUN_DIR", str(tmp_path / "records"))
    assert train_here(inputs.overrides(tmp_path / "run", "trainer.save_freq=1", "reward.num_workers=1")) == 0
    assert (tmp_path / "records" / "metrics.jsonl").exists()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert (tmp_path / "run" / "global_step_1" / "actor" / "huggingface" / "model.safetensors").exists()
