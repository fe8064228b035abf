"""How a client shows who it is, and whom it trusts: tokens, plugins, certificates, proxies, a pod's own account."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from corral.job.backends.kuberay import exec_plugin
from corral.job.backends.kuberay.client import PODS, KubeClient
from corral.job.backends.kuberay.config import access_of
from corral.job.backends.kuberay.errors import KubeError, Unauthorized
from corral.job.backends.kuberay.informer import Informer
from corral.job.service.settings import Kubernetes
from tests.job.backends.kube.api import FakeKube
from tests.job.backends.kuberay.near import BRISK, QUICK, run, until
from tests.job.backends.kuberay.ways import Authority, access, asked, config, written


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    return Authority(tmp_path_factory.mktemp("authority"))


def test_a_pod_uses_its_service_account_and_follows_its_token(tmp_path: Path, authority: Authority) -> None:
    with FakeKube(tokens=["first"], tls=authority.server()) as kube:
        for name, text in (("token", "first\n"), ("namespace", "corral"), ("ca.crt", authority.text("ca.pem"))):
            (tmp_path / name).write_text(text)
        host, port = kube.url.removeprefix("https://").split(":")
        environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port, "HOME": str(tmp_path)}
        found = access_of(Kubernetes(), environ, tmp_path)
        assert found.namespace == "corral"
        asked(found)
        fresh = kube.expire_tokens()
        os.replace(written(tmp_path / "new", fresh), tmp_path / "token")
        asked(found)
        assert [one.authorization for one in kube.requests] == ["Bearer first", f"Bearer {fresh}"]


def test_a_pod_with_an_ipv6_server(tmp_path: Path, authority: Authority) -> None:
    written(tmp_path / "token", "t")
    written(tmp_path / "ca.crt", authority.text("ca.pem"))
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "HOME": str(tmp_path)}
    found = access_of(Kubernetes(namespace="mine"), environ, tmp_path)
    assert (found.server, found.namespace) == ("https://[fd00::1]:443", "mine")


def test_a_token_file_wins_over_a_token_and_is_read_again(tmp_path: Path) -> None:
    written(tmp_path / "token", "from the file\n")
    found = access(config(tmp_path, user={"tokenFile": "token", "token": "inline"})).credentials
    assert asyncio.run(found.current()).token == "from the file"
    written(tmp_path / "token", "later")
    assert asyncio.run(found.current()).token == "later"
    written(tmp_path / "token", "")
    with pytest.raises(Unauthorized, match=f"{tmp_path}/token: the token file is empty"):
        asyncio.run(found.current())
    (tmp_path / "token").unlink()
    with pytest.raises(Unauthorized, match=f"{tmp_path}/token: the token cannot be read"):
        asyncio.run(found.current())


def plugin(tmp_path: Path, script: str, **fields: Any) -> dict[str, Any]:
    """A plugin that counts its runs in the file `runs`."""
    path = written(tmp_path / "plugin", f"#!/bin/sh\ncd '{tmp_path}'\necho run >> runs\n{script}\n")
    path.chmod(0o700)
    return {"exec": {"apiVersion": exec_plugin.VERSIONS[0], "command": "./plugin", **fields}}


def printed(tmp_path: Path, version: str = "client.authentication.k8s.io/v1", **status: object) -> str:
    """A script that prints this credential."""
    text = json.dumps({"apiVersion": version, "kind": "ExecCredential", "status": status})
    written(tmp_path / "credential", text)
    return "cat credential"


def runs(tmp_path: Path) -> int:
    return (tmp_path / "runs").read_text().count("run")


def test_a_plugin_gives_the_token_and_is_asked_again_when_it_is_refused(tmp_path: Path) -> None:
    with FakeKube(tokens=["first"]) as kube:
        user = plugin(tmp_path, printed(tmp_path, token="first"))
        found = access(kube.kubeconfig(tmp_path / "config", user=user))
        asked(found)
        asked(found)
        assert runs(tmp_path) == 1
        printed(tmp_path, token=kube.expire_tokens())
        asked(found)
        assert runs(tmp_path) == 2
        kube.expire_tokens()
        with pytest.raises(Unauthorized, match="401 Unauthorized"):
            asked(found)
        assert runs(tmp_path) == 3


def test_a_plugin_that_is_gone_for_a_moment_does_not_end_a_watch(tmp_path: Path) -> None:
    """As while it is updated: later it is there again, and what follows the cluster goes on."""

    async def life(kube: FakeKube, path: Path) -> None:
        client = KubeClient(access(path), QUICK)
        informer = Informer(client, PODS, pace=BRISK)
        program = tmp_path / "plugin"
        program.rename(tmp_path / "away")
        informer.start()
        await until(lambda: "cannot be started" in informer.trouble)
        (tmp_path / "away").rename(program)
        await until(informer.synced.is_set)
        assert informer.items() == []
        await informer.close()
        await client.close()

    with FakeKube(tokens=["t"]) as kube:
        user = plugin(tmp_path, printed(tmp_path, token="t"))
        path = config(tmp_path, cluster={"server": kube.url}, user=user)
        run(lambda: life(kube, path))


def test_many_calls_at_once_ask_a_plugin_once(tmp_path: Path) -> None:
    with FakeKube(tokens=["first"]) as kube:
        found = access(kube.kubeconfig(tmp_path / "config", user=plugin(tmp_path, printed(tmp_path, token="first"))))

        async def life() -> None:
            client = KubeClient(found, QUICK)
            await asyncio.gather(*(client.list(PODS) for _ in range(8)))
            printed(tmp_path, token=kube.expire_tokens())
            await asyncio.gather(*(client.list(PODS) for _ in range(8)))
            await client.close()

        run(life)
        assert runs(tmp_path) == 2


@pytest.mark.parametrize(("seconds", "again"), [(3600, False), (-1, True), (None, False)])
def test_a_credential_is_made_anew_when_it_ends(tmp_path: Path, seconds: float | None, again: bool) -> None:
    ends = None if seconds is None else (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
    script = printed(tmp_path, token="t", expirationTimestamp=ends)
    found = access(config(tmp_path, user=plugin(tmp_path, script))).credentials
    for _ in range(2):
        assert asyncio.run(found.current()).token == "t"
    assert runs(tmp_path) == (2 if again else 1)


def test_a_plugin_is_told_where_it_is_and_gets_its_environment_without_a_shell(tmp_path: Path) -> None:
    script = 'printf "%s|" "$@" "$EXTRA" "$INHERITED" > seen\nprintf "%s" "$KUBERNETES_EXEC_INFO" > info\n'
    user = plugin(
        tmp_path,
        script + printed(tmp_path, version=exec_plugin.VERSIONS[1], token="t"),
        apiVersion=exec_plugin.VERSIONS[1],
        args=["a b", "$HOME; exit 1", "*"],
        env=[{"name": "EXTRA", "value": "more"}],
        provideClusterInfo=True,
    )
    path = config(tmp_path, user=user)
    found = access(path, {**os.environ, "INHERITED": "yes"}).credentials
    assert asyncio.run(found.current()).token == "t"
    assert (tmp_path / "seen").read_text() == "a b|$HOME; exit 1|*|more|yes|"
    assert json.loads((tmp_path / "info").read_text()) == {
        "apiVersion": "client.authentication.k8s.io/v1beta1",
        "kind": "ExecCredential",
        "spec": {"interactive": False, "cluster": {"server": "https://kube.example:6443"}},
    }


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'please log in' >&2; exit 3", "exit code 3: please log in"),
        ("echo 'cannot use eyJhbGciOiJSUzI1NiIsImtpZCI6IjEifQ' >&2; exit 1", r"exit code 1: cannot use \*\*\*"),
        ("exit 1", "exit code 1$"),
        ("echo hello", "what it prints is no ExecCredential with a status"),
        ('echo \'{"apiVersion": 1, "status": null}\'', "what it prints is no ExecCredential with a status"),
        ('echo \'{"apiVersion": "v2", "status": {"token": "t"}}\'', "it prints v2, and apiVersion is client"),
        ("sed s/token/other/ credential", "it prints neither a token nor a certificate with its key"),
    ],
)
def test_what_a_plugin_does_wrong_is_one_line(tmp_path: Path, script: str, message: str) -> None:
    printed(tmp_path, token="t")
    path = config(tmp_path, user=plugin(tmp_path, script))
    with pytest.raises(
        Unauthorized, match=rf"^{path}: users\[main\]\.user\.exec: {tmp_path}/plugin: {message}"
    ) as error:
        asyncio.run(access(path).credentials.current())
    assert error.value.reason == "ExecPlugin"


def test_a_plugin_that_does_not_end_is_ended(tmp_path: Path) -> None:
    user = plugin(tmp_path, "echo $$ > pid; exec sleep 600")
    made = exec_plugin.plugin_of(user["exec"], "here", tmp_path, {}, os.environ)

    async def life() -> None:
        with pytest.raises(Unauthorized, match=r"here: .*plugin: no answer in 0\.5 s"):
            await exec_plugin.ExecPlugin(replace(made, seconds=0.5)).current()

    run(life)
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("form", ["files", "data", "insecure"])
def test_a_server_is_trusted_and_a_certificate_shown(tmp_path: Path, authority: Authority, form: str) -> None:
    shown = {"client-certificate": "client.pem", "client-key": "client.key"}
    trusted: dict[str, Any] = {"certificate-authority": str(authority.folder / "ca.pem")}
    user: dict[str, Any] = {name: str(authority.folder / file) for name, file in shown.items()}
    if form == "data":
        trusted = {"certificate-authority-data": authority.data("ca.pem")}
        user = {f"{name}-data": authority.data(file) for name, file in shown.items()}
    elif form == "insecure":
        trusted = {"insecure-skip-tls-verify": True}
    with FakeKube(tls=authority.server(ask_client=True)) as kube:
        asked(access(kube.kubeconfig(tmp_path / "config", user=user, cluster=trusted)))
        bare = access(kube.kubeconfig(tmp_path / "config", cluster=trusted))
        with pytest.raises(KubeError, match="does not answer"):
            asked(bare, retry=0.05)


def test_a_server_that_is_not_trusted_is_named_at_once(tmp_path: Path, authority: Authority) -> None:
    with FakeKube(tls=authority.server()) as kube:
        path = kube.kubeconfig(tmp_path / "config")
        began = time.monotonic()
        with pytest.raises(KubeError, match=f"{path}: the server is not trusted: .*CERTIFICATE_VERIFY_FAILED"):
            asked(access(path), retry=3600.0)
        assert time.monotonic() - began < 60
        assert kube.requests == []


def test_the_name_in_a_certificate_can_be_another_than_the_servers(tmp_path: Path, authority: Authority) -> None:
    trusted = {"certificate-authority-data": authority.data("ca.pem")}
    with FakeKube(tls=authority.server("other")) as kube:
        path = kube.kubeconfig(tmp_path / "config", cluster=trusted)
        with pytest.raises(KubeError, match="the server is not trusted"):
            asked(access(path))
        named = kube.kubeconfig(tmp_path / "config", cluster=trusted | {"tls-server-name": "kube.example"})
        asked(access(named))


def test_a_certificate_of_a_plugin_is_replaced_when_it_is_refused(tmp_path: Path, authority: Authority) -> None:
    """The connection that showed the first certificate would show it again."""
    pair = {"clientCertificateData": authority.text("client.pem"), "clientKeyData": authority.text("client.key")}
    other = {"clientCertificateData": authority.text("other.pem"), "clientKeyData": authority.text("other.key")}
    with FakeKube(tls=authority.server(ask_client=True)) as kube:
        trusted = {"certificate-authority-data": authority.data("ca.pem")}
        user = plugin(tmp_path, printed(tmp_path, **pair))
        found = access(kube.kubeconfig(tmp_path / "config", user=user, cluster=trusted))

        async def life() -> None:
            client = KubeClient(found, QUICK)
            await client.list(PODS)
            printed(tmp_path, **other)
            kube.faults.status(401)
            await client.list(PODS)
            await client.close()

        run(life)
        assert runs(tmp_path) == 2
        assert kube.connected == 3
        printed(tmp_path, **pair | {"clientKeyData": authority.text("other.key")})
        kube.faults.status(401)
        with pytest.raises(Unauthorized, match=r"client certificate: .*KEY_VALUES_MISMATCH"):
            asked(found)


def test_calls_go_through_the_proxy_that_is_named(tmp_path: Path) -> None:
    with FakeKube() as proxy:
        cluster = {"server": "http://kube.invalid", "proxy-url": proxy.url}
        asked(access(config(tmp_path, cluster=cluster)))
        assert proxy.requests[0].target == "http://kube.invalid/api/v1/namespaces/default/pods/nothing"


def test_a_proxy_of_the_environment_does_not_see_what_is_for_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeKube() as proxy, FakeKube() as kube:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        asked(access(kube.kubeconfig(tmp_path / "config")))
        asked(access(config(tmp_path, "far", cluster={"server": "http://kube.invalid"})))
        assert (len(kube.requests), len(proxy.requests)) == (1, 1)
