"""Profiles: what is in a file holds, or is refused with the file, the key and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from corral.errors import ConfigError
from corral.job.backends.profile import (
    OF_ONE_NODE,
    NodeProfile,
    amount,
    asked_profile,
    load,
    profile_names,
    profile_of,
    shown,
)
from corral.job.service.settings import Kubernetes, Nodes, Settings
from corral.workers.node_env import HCCL_IF_IP, RANK_TABLE_FILE

SHIPPED = ["ascend-a2", "ascend-a3", "cpu", "gpu"]


def settings(folder: Path | None = None, backend: str = "kuberay", profile: str = "cpu") -> Settings:
    return Settings(
        Path("/data"),
        backend=backend,  # type: ignore[arg-type]
        nodes=Nodes(profiles_dir=folder),
        kubernetes=Kubernetes(profile=profile),
    )


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return path


def test_what_comes_with_corral():
    assert profile_names(None) == SHIPPED
    for name in SHIPPED:
        profile = load(name, None)
        assert profile.about
        assert not profile.image, "a name without a registry would be looked for where anybody can push"
        assert not OF_ONE_NODE & profile.env.keys()
    a2, a3 = load("ascend-a2", None), load("ascend-a3", None)
    assert (a2.accelerator.per_node, a3.accelerator.per_node) == (8, 16)
    assert a3.model_dump(exclude={"name", "about", "accelerator"}) == a2.model_dump(
        exclude={"name", "about", "accelerator"}
    )
    assert int(a2.env["HCCL_EXEC_TIMEOUT"]) > int(a2.env["HCCL_CONNECT_TIMEOUT"])


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_shown_is_the_whole_profile(name, tmp_path):
    write(tmp_path, "copy", shown(load(name, None)))
    assert load("copy", tmp_path).model_dump(exclude={"name"}) == load(name, None).model_dump(exclude={"name"})


def test_interfaces_may_have_one_name_on_all_nodes(tmp_path):
    """The launcher takes a name over where a node has such an interface, and says so where it has not."""
    write(tmp_path, "lab", "extends: ascend-a2\nenv: {HCCL_SOCKET_IFNAME: bond0, GLOO_SOCKET_IFNAME: auto}\n")
    assert load("lab", tmp_path).env["HCCL_SOCKET_IFNAME"] == "bond0"
    assert {HCCL_IF_IP, RANK_TABLE_FILE} <= OF_ONE_NODE


def test_ones_own_win_and_may_extend_what_they_replace(tmp_path):
    write(tmp_path, "ascend-a2", "extends: ascend-a2\naccelerator: {resource: huawei.com/ascend-1980}\nenv: {A: b}\n")
    found = load("ascend-a2", tmp_path)
    assert found.accelerator.resource == "huawei.com/ascend-1980"
    assert found.accelerator.per_node == 8, "mappings are merged"
    assert found.env["A"] == "b"
    assert "HCCL_CONNECT_TIMEOUT" in found.env
    assert load("ascend-a3", tmp_path).accelerator.resource == "huawei.com/ascend-1980", "it extends ascend-a2"
    assert load("ascend-a2", None).accelerator.resource == "huawei.com/Ascend910"
    write(tmp_path, "lab", "extends: ascend-a2\nenv: {A: null}\ndriver_mounts: []\n")
    assert "A" not in load("lab", tmp_path).env, "null takes a key away"
    assert load("lab", tmp_path).driver_mounts == (), "lists are replaced"
    assert profile_names(tmp_path) == sorted([*SHIPPED, "lab"])


def test_a_changed_file_is_read_again(tmp_path):
    import os

    path = write(tmp_path, "lab", "extends: cpu\nmemory: 5Gi\n")
    assert load("lab", tmp_path).memory == "5Gi"
    path.write_text("extends: cpu\nmemory: 6Gi\n")
    os.utime(path, ns=(1, 1))
    assert load("lab", tmp_path).memory == "6Gi"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kind: cpu\ncolour: red\n", "colour is no key of a profile"),
        ("kind: cpu\nhead: {disk: 1Gi}\n", "head.disk is no key of a profile"),
        ("kind: gpu\n", "kind gpu needs an `accelerator`"),
        ("extends: gpu\nkind: cpu\n", "kind cpu has none; leave `accelerator` out"),
        ("extends: gpu\nkind: npu\n", "kind npu with accelerator.ray GPU; make them agree"),
        ("kind: tpu\n", "kind: Input should be 'cpu', 'gpu' or 'npu'"),
        ("{}\n", "kind: Field required"),
        ("name: x\nkind: cpu\n", "name is the file's own, lab; leave the key out"),
        ("kind: cpu\nenv: {HCCL_IF_IP: 10.0.0.1}\n", "env: HCCL_IF_IP is right on one node at most"),
        ("kind: cpu\nenv: {CUDA_VISIBLE_DEVICES: '0'}\n", "CUDA_VISIBLE_DEVICES is right on one node at most"),
        ("kind: cpu\nenv: {RANK_TABLE_FILE: /x}\n", "RANK_TABLE_FILE is right on one node at most"),
        ("kind: cpu\nenv: {LD_PRELOAD: /x}\n", "LD_PRELOAD controls the loader"),
        ("kind: cpu\nenv: {CORRAL_AGENT_TOKEN: x}\n", "CORRAL_AGENT_TOKEN controls"),
        ("kind: cpu\nenv: {A: 1}\n", "env.A: 1 has to be a text; put it in quotes"),
        ("kind: cpu\nenv: {A-B: x}\n", "'A-B' is not a variable name"),
        ("extends: ascend-a2\nenv: {HCCL_EXEC_TIMEOUT: '600'}\n", "has to be over HCCL_CONNECT_TIMEOUT=600; raise it"),
        ("kind: cpu\nenv: {HCCL_CONNECT_TIMEOUT: '60'}\n", "HCCL_CONNECT_TIMEOUT=60 is outside of 120 to 7200"),
        ("kind: cpu\nray_start_params: {num-cpus: '4'}\n", "num-cpus follows from the job"),
        ("kind: cpu\nray_start_params: {metrics-export-port: '4'}\n", "metrics-export-port follows from the job"),
        ("kind: cpu\nray_start_params: {temp-dir: /x; id}\n", "'temp-dir' is no option of `ray start`"),
        ("kind: cpu\nshm: 17Gi\n", "shm 17Gi is over memory 16Gi"),
        ("kind: cpu\nhead: {shm: 17Gi}\n", "head.shm 17Gi is over head.memory 16Gi"),
        ("kind: cpu\nmemory: a lot\n", "memory: "),
        ("kind: cpu\nrun_as_user: 0\n", "run_as_user: "),
        ("kind: cpu\nmounts: [{path: /x}]\n", "mount /x has to name either `host`"),
        ("kind: cpu\nmounts: [{path: /x, claim: a, host: /b}]\n", "mount /x has to name either `host`"),
        ("kind: cpu\nmounts: [{path: /x, claim: a, type: File}]\n", "`type` is of a path of the host"),
        ("kind: cpu\nmounts: [{path: /x, host: /a/../b}]\n", "holds `..`"),
        ("kind: cpu\nmounts: [{path: /x, host: /a}, {path: /x, host: /b}]\n", "/x is mounted twice"),
        ("kind: cpu\nmounts: [{path: /dev/shm, host: /a}]\n", "/dev/shm is mounted twice"),
        ("kind: cpu\nports: {first: 2000, last: 2010}\n", "hold no block of 500"),
        ("kind: cpu\ntimeouts: {start: 0}\n", "timeouts.start: "),
        ("extends: nope\n", "extends 'nope', which is not known; there are ascend-a2"),
        ("extends: lab\n", "extends 'lab', which is not known"),
        ("extends: [cpu]\n", "extends has to be the name of one profile"),
        ("- a\n", "has to be a mapping of a profile's keys"),
        ("a: [1\n", "is not YAML"),
        ("\x00", "is not YAML"),
    ],
)
def test_each_mistake_is_one_line_with_the_file(text, said, tmp_path):
    path = write(tmp_path, "lab", text)
    with pytest.raises(ConfigError) as caught:
        load("lab", tmp_path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_profile_costs_nothing(tmp_path):
    laughs = "".join(f"  - &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    for text, said in (
        ("kind: cpu\nabout: " + "x" * (300 << 10), "is over 256 KiB"),
        ("kind: cpu\nabout: 2026-13-45", "is not YAML"),
        ("[" * 900, "is not YAML"),
        (f"kind: cpu\nenv:\n  A:\n  - &a0 x\n{laughs}", "has to be a text; put it in quotes"),
    ):
        path = write(tmp_path, "odd", text)
        with pytest.raises(ConfigError, match=said) as caught:
            load("odd", tmp_path)
        assert str(path) in str(caught.value)
        assert len(str(caught.value)) < 1000


def test_profiles_that_extend_each_other(tmp_path):
    write(tmp_path, "one", "extends: two\n")
    write(tmp_path, "two", "extends: one\n")
    with pytest.raises(ConfigError, match="end the circle"):
        load("one", tmp_path)


@pytest.mark.parametrize("name", ["nope", "../cpu", "", "CPU", "a/b", "x" * 100])
def test_a_name_that_is_none_names_those_there_are(name):
    with pytest.raises(ConfigError, match="is not known here; there are ascend-a2, ascend-a3, cpu, gpu"):
        load(name, None)


@pytest.mark.parametrize(
    ("name", "kind", "usual", "found"),
    [
        (None, "auto", "gpu", "gpu"),
        (None, "gpu", "gpu", "gpu"),
        (None, "npu", "ascend-a3", "ascend-a3"),
        (None, "gpu", "cpu", "gpu"),
        ("ascend-a2", "auto", "cpu", "ascend-a2"),
        ("ascend-a2", "npu", "cpu", "ascend-a2"),
    ],
)
def test_whose_profile_it_is(name, kind, usual, found):
    assert profile_of(name, kind, settings(profile=usual)).name == found


def test_a_kind_that_several_profiles_have_or_none(tmp_path):
    with pytest.raises(ConfigError, match="ascend-a2, ascend-a3"):
        profile_of(None, "npu", settings())
    with pytest.raises(ConfigError, match="profile cpu is of kind cpu, and the job asks for npu"):
        profile_of("cpu", "npu", settings())


@pytest.mark.parametrize("backend", ["local", "ray"])
def test_backends_that_make_no_nodes_take_a_profile_when_it_is_named(backend):
    assert asked_profile(None, "gpu", settings(backend=backend)) is None
    assert asked_profile("gpu", "auto", settings(backend=backend)).kind == "gpu"
    with pytest.raises(ConfigError, match="'nope' is not known here"):
        asked_profile("nope", "auto", settings(backend=backend))


@pytest.mark.parametrize(
    ("text", "number"), [("500m", 0.5), ("64", 64), ("1.5", 1.5), ("2k", 2000), ("1Ki", 1024), ("512Gi", 512 << 30)]
)
def test_amounts(text, number):
    assert float(amount(text)) == number


@pytest.mark.parametrize("text", ["", "Gi", "-1", "1 Gi", "1g", "1e3", "0x1"])
def test_what_is_no_amount(text):
    with pytest.raises(ValueError, match="no quantity"):
        amount(text)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="does not exist; make it"):
        load("cpu", tmp_path / "nowhere")


def test_the_files_are_in_the_package():
    """As data of the package, beside the module, each a mapping with words for people."""
    from importlib.resources import files

    there = {each.name for each in files("corral.job.backends").joinpath("profiles").iterdir()}
    assert there == {f"{name}.yaml" for name in SHIPPED}
    assert all(yaml.safe_load((files("corral.job.backends") / "profiles" / each).read_text()) for each in there)


def test_the_page_has_every_key():
    page = (Path(__file__).parents[3] / "docs" / "profiles.md").read_text(encoding="utf-8")
    table = page.partition("## Keys")[2].partition("\n\nContainers")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    keys = [key.strip("` ") for row in rows for key in row.split(",")]
    assert sorted(keys) == sorted(set(NodeProfile.model_fields) - {"name"})
