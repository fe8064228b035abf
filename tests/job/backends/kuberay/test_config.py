"""Every way to a cluster that a kubeconfig or a pod describes, and every mistake in it as one line."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from corral.errors import ConfigError
from corral.job.backends.kuberay import exec_plugin
from corral.job.backends.kuberay.config import access_of
from corral.job.service.settings import Kubernetes
from tests.job.backends.kuberay.ways import NOWHERE, access, config, written


def test_files_of_kubeconfig_are_merged_and_the_first_one_wins(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = config(tmp_path / "a", cluster=None, user={"token": "first"}, context={"cluster": "main", "user": "main"})
    (tmp_path / "b" / "token").write_text("second")
    second = config(
        tmp_path / "b",
        cluster={"server": "https://second:6443/"},
        user={"tokenFile": "token"},
        context={"cluster": "main", "user": "main", "namespace": "second"},
        current_context="other",
    )
    environ = {"KUBECONFIG": os.pathsep.join([str(NOWHERE), str(first), str(second)])}
    found = access_of(Kubernetes(), environ, NOWHERE)
    assert (found.server, found.namespace) == ("https://second:6443", "default")
    assert asyncio.run(found.credentials.current()).token == "first"
    turned = access_of(Kubernetes(context="main"), {"KUBECONFIG": f"{second}{os.pathsep}{first}"}, NOWHERE)
    assert turned.namespace == "second"
    assert asyncio.run(turned.credentials.current()).token == "second"  # its path is of its own file's folder


def test_the_settings_win_over_the_environment_and_that_over_home(tmp_path: Path) -> None:
    (tmp_path / ".kube").mkdir()
    config(tmp_path / ".kube", cluster={"server": "https://home"})
    named = config(tmp_path, "named", cluster={"server": "https://named"})
    variable = config(tmp_path, "variable", cluster={"server": "https://variable"})
    environ = {"HOME": str(tmp_path)}
    assert access_of(Kubernetes(), environ, NOWHERE).server == "https://home"
    environ["KUBECONFIG"] = str(variable)
    assert access_of(Kubernetes(), environ, NOWHERE).server == "https://variable"
    assert access_of(Kubernetes(kubeconfig=named), environ, NOWHERE).server == "https://named"


def test_context_and_namespace_can_be_named(tmp_path: Path) -> None:
    path = config(tmp_path)
    document = yaml.safe_load(path.read_text())
    document["clusters"].append({"name": "far", "cluster": {"server": "https://far"}})
    document["contexts"].append({"name": "far", "context": {"cluster": "far", "namespace": "theirs"}})
    path.write_text(yaml.safe_dump(document))
    assert access(path).server == "https://kube.example:6443"
    far = access(path, context="far")
    assert (far.server, far.namespace) == ("https://far", "theirs")
    assert access(path, context="far", namespace="ours").namespace == "ours"


def test_no_cluster_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        access_of(Kubernetes(), {"HOME": str(tmp_path)}, NOWHERE)
    assert str(error.value) == (
        f"no cluster is configured: KUBECONFIG is not set, there is no {tmp_path}/.kube/config and this is no pod of a "
        "cluster; set kubernetes.kubeconfig (--kubeconfig FILE)"
    )
    with pytest.raises(ConfigError, match="KUBECONFIG: none of its files is there: /nonexistent"):
        access_of(Kubernetes(), {"KUBECONFIG": "/nonexistent"}, NOWHERE)
    with pytest.raises(ConfigError, match=r"kubernetes\.kubeconfig: there is no file /nonexistent"):
        access(NOWHERE)
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOME": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"/nonexistent/token: .*automountServiceAccountToken: true"):
        access_of(Kubernetes(), pod, NOWHERE)
    with pytest.raises(ConfigError, match=r"kubernetes\.context: 'far' is of a kubeconfig"):
        access_of(Kubernetes(context="far"), pod, NOWHERE)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"current_context": ""}, "{}: current-context is not set; name one with kubernetes.context (--context)"),
        ({"current_context": "x"}, "{}: current-context: there is no context 'x'; known: main"),
        ({"context": {"cluster": "y"}}, "{}: contexts[main].context.cluster: there is no cluster 'y'; known: main"),
        ({"context": {"user": "main"}}, "{}: contexts[main].context.cluster is missing"),
        (
            {"context": {"cluster": "main", "user": "z"}},
            "{}: contexts[main].context.user: there is no user 'z'; known: main",
        ),
        ({"cluster": {}}, "{}: clusters[main].cluster.server is missing"),
        ({"cluster": {"server": "kube:6443"}}, "{}: clusters[main].cluster: server 'kube:6443' is not a URL"),
        ({"cluster": {"server": "https://me:hunter2@k"}}, "{}: clusters[main].cluster: server holds a user name"),
        ({"cluster": {"server": 6443}}, "{}: clusters[main].cluster.server: a text is expected, not int"),
        (
            {"cluster": {"server": "https://k", "certificate-authority": "ca.pem"}},
            "{}: clusters[main].cluster.certificate-authority: there is no file ",
        ),
        (
            {"cluster": {"server": "https://k", "certificate-authority-data": "?"}},
            "{}: clusters[main].cluster.certificate-authority-data: not base64 of a PEM text",
        ),
        (
            {"cluster": {"server": "https://k", "certificate-authority-data": "aGVsbG8="}},
            "{}: clusters[main].cluster.certificate-authority: no certificate in it",
        ),
        (
            {"cluster": {"server": "https://k", "insecure-skip-tls-verify": "yes"}},
            "{}: clusters[main].cluster.insecure-skip-tls-verify: true or false is expected, not 'yes'",
        ),
        (
            {
                "cluster": {
                    "server": "https://k",
                    "insecure-skip-tls-verify": True,
                    "certificate-authority-data": "aGVsbG8=",
                }
            },
            "{}: clusters[main].cluster: insecure-skip-tls-verify and a certificate-authority; leave one out",
        ),
        (
            {"cluster": {"server": "https://k", "proxy-url": "socks5://p:1"}},
            "{}: clusters[main].cluster.proxy-url: only http and https proxies are supported, not socks5",
        ),
        (
            {"cluster": {"server": "http://kube.example"}, "user": {"token": "hunter2"}},
            "{}: clusters[main].cluster.server: http://kube.example would show the credentials to everyone",
        ),
        ({"user": {"tokenFile": "token"}}, "{}: users[main].user.tokenFile: there is no file "),
        ({"user": {"username": "me", "password": "hunter2"}}, "{}: users[main].user.username: "),
        ({"user": {"auth-provider": {"name": "gcp"}}}, "{}: users[main].user.auth-provider: "),
        ({"user": {"as": "root"}}, "{}: users[main].user.as: impersonation is not supported"),
        (
            {"user": {"client-key-data": "aGVsbG8="}},
            "{}: users[main].user.client-certificate is missing: a certificate and its key belong together",
        ),
        ({"user": {"client-certificate-data": "aGVsbG8="}}, "{}: users[main].user.client-key is missing"),
        (
            {"user": {"client-certificate-data": "aGVsbG8=", "client-key-data": "aGVsbG8="}},
            "{}: users[main].user.client-certificate: not a certificate with its key",
        ),
        ({"user": {"exec": []}}, "{}: users[main].user.exec: a mapping with command and apiVersion is expected"),
        (
            {"user": {"exec": {"command": "sh", "apiVersion": "client.authentication.k8s.io/v1alpha1"}}},
            "{}: users[main].user.exec.apiVersion: 'client.authentication.k8s.io/v1alpha1' is not supported",
        ),
        (
            {"user": {"exec": {"command": "no-such", "apiVersion": exec_plugin.VERSIONS[0], "installHint": "get it"}}},
            "{}: users[main].user.exec.command: no-such is not installed; get it",
        ),
        (
            {"user": {"exec": {"command": "sh", "apiVersion": exec_plugin.VERSIONS[0], "args": "-c"}}},
            "{}: users[main].user.exec.args: a list of texts is expected",
        ),
        (
            {"user": {"exec": {"command": "sh", "apiVersion": exec_plugin.VERSIONS[0], "env": [{"name": "A"}]}}},
            "{}: users[main].user.exec.env[0]: name and value are expected, both texts",
        ),
        (
            {
                "user": {
                    "exec": {"command": "sh", "apiVersion": exec_plugin.VERSIONS[0], "interactiveMode": "Always"},
                }
            },
            "{}: users[main].user.exec.interactiveMode: Always needs a terminal",
        ),
        (
            {"user": {"exec": {"command": "sh", "apiVersion": exec_plugin.VERSIONS[0]}, "token": "hunter2"}},
            "{}: users[main].user.exec: a token or certificate is there as well; leave one out",
        ),
        ({"clusters": "main"}, "{}: clusters: a list is expected"),
        ({"clusters": ["main"]}, "{}: clusters[0]: an entry with name and cluster is expected"),
    ],
)
def test_a_mistake_is_one_line_with_file_field_and_fix(tmp_path: Path, parts: Mapping[str, Any], message: str) -> None:
    path = config(tmp_path, **parts)
    with pytest.raises(ConfigError) as error:
        access(path)
    said = str(error.value)
    assert said.startswith(message.format(path))
    assert "\n" not in said
    assert "hunter2" not in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [\n", ": not YAML, line 2"),
        ("users: [{name: a, user: {token: hunter2}]", ": not YAML, line 1"),
        ("[]", ": not a kubeconfig: a mapping with clusters, users and contexts is expected"),
    ],
)
def test_a_file_that_is_no_kubeconfig(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path / "config", text)
    with pytest.raises(ConfigError) as error:
        access(path)
    assert str(error.value) == f"{path}{message}"
