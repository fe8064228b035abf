"""docs/kuberay-manifest.md shows what its own command, settings and profile make, to the letter."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from pydantic import TypeAdapter

from corral.cli import build_parser
from corral.job.backends.kuberay.manifest import manifest, to_yaml
from corral.job.backends.kuberay.patches import ALLOWED
from corral.job.client.submit import Entry, request_of
from corral.job.core.admission import resources_of
from corral.job.service.launch import placement_of
from corral.job.service.settings import Settings
from corral.job.service.submission import node_profile, with_defaults
from tests.job.backends.kuberay import jobs
from tests.job.backends.kuberay.jobs import ID, OWNER
from tests.job.backends.kuberay.strict import needs_schema, pod_problems, problems

PAGE = Path(__file__).parents[4] / "docs" / "kuberay-manifest.md"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
_BLOCK = re.compile(r"^```(yaml|bash)\n(.*?)^```$", re.M | re.S)


def page() -> tuple[str, list[str]]:
    """The command, and the YAML blocks: settings, profile, then the manifest in parts."""
    found = _BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    (command,) = [text for language, text in found if language == "bash"]
    return command, [text for language, text in found if language == "yaml"]


@pytest.fixture
def made(tmp_path: Path) -> str:
    command, (settings, profile, *_) = page()
    (tmp_path / "lab-a2.yaml").write_text(profile)
    service = yaml.safe_load(settings) | {"data_dir": "/data"}
    service["nodes"]["profiles_dir"] = tmp_path
    where = TypeAdapter(Settings).validate_python(service)
    args = build_parser().parse_args(shlex.split(command.replace("\\\n", " "))[1:])
    script, *rest = args.words[1:] if args.words[0] == "--" else args.words
    asked = request_of(args, None, None, Entry(f"/{script}", None, rest))
    asked = with_defaults(asked.model_copy(update={"commit_sha": COMMIT}), where.profile, node_profile(asked, where))
    return to_yaml(manifest(ID, resources_of(asked), placement_of(asked), where, OWNER))


def test_the_page_shows_the_manifest(made):
    _, (_, _, *parts) = page()
    assert "".join(parts) == made


def test_the_patches_that_it_shows_work():
    (text,) = re.findall(r"^```json\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    found = jobs.made(2, 16, jobs.settings(profile="ascend-a3"), jobs.placement(*json.loads(text)))
    assert [jobs.container(pod)["resources"]["limits"]["cpu"] for pod in jobs.pods(found)] == ["64", "64"]


def test_it_names_what_may_be_patched():
    said = PAGE.read_text(encoding="utf-8").partition("- Allowed are")[2].partition("kubernetes.patch_paths")[0]
    allowed = {path.partition("/template/")[2].removeprefix("spec/") for path in ALLOWED if "/template/" in path}
    assert all(f"`{path}`" in said for path in allowed - {"metadata/annotations"})


@needs_schema
def test_what_the_page_shows_is_valid(made):
    found = yaml.safe_load(made)
    assert problems(found) == []
    assert pod_problems(found) == []
