"""A case whose Ray head is none of its nodes trains on the nodes, and on them only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from corral.e2e.read import SHIPPED
from tests.e2e.small import Project

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = "run_qwen3_06b_ppo_multinode.sh"
SIZE = ["trainer.n_gpus_per_node=2", "data.max_prompt_length=256", "data.max_response_length=32"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_nodes_with_a_head_of_its_own_equal_one_process(tmp_path: Path) -> None:
    project = Project(tmp_path / "project")
    shutil.copy(EXAMPLES / SCRIPT, project.root / SCRIPT)
    case = yaml.safe_load((SHIPPED / "two-node-ppo.yaml").read_text())
    del case["rollouts"], case["expect"]["metrics"]
    case |= {"name": "separate", "source": ".", "paths": [SCRIPT]}
    case["topology"] = {"nodes": 2, "devices_per_node": 2, "head": "separate"}
    case["args"] += SIZE
    case["parity"]["args"] = [*SIZE, *case["parity"]["args"]]
    case["env"] = {"MODEL_PATH": "{model}", "DATA_DIR": "{data}"}
    case["expect"]["plan"] = {"topology.world": 4, "actor.sp": 2, "actor.dp": 2}
    (project.root / "e2e/separate.yaml").write_text(yaml.safe_dump(case))

    done = project.run("separate")
    assert done.code == 0, done.out[-3000:] + done.err[-2000:]
    job = project.folder("separate") / "job"
    checked = json.loads((job / "preflight.json").read_text())
    assert [node["name"] for node in checked["nodes"]] == ["node-0", "node-1"]
    assert sorted(path.relative_to(job).as_posix() for path in job.glob("logs/node-*/rank-*.log")) == [
        f"logs/node-{rank // 2}/rank-{rank}.log" for rank in range(4)
    ]
