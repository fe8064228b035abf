"""Which service, with which token, and to whom the token is never sent."""

from __future__ import annotations

import pytest

from corral.errors import ConfigError
from corral.job.client.endpoint import endpoint

SECRET = "s3cret-token"


@pytest.mark.parametrize(
    ("option", "env", "url"),
    [
        (None, {}, "http://127.0.0.1:8470"),
        (None, {"SUBMITTER_URL": "http://sub:1/"}, "http://sub:1"),
        (None, {"SUBMITTER_URL": "http://sub:1", "CORRAL_URL": "https://c/base/"}, "https://c/base"),
        ("localhost:99", {"CORRAL_URL": "https://c"}, "http://localhost:99"),
    ],
)
def test_where(option, env, url):
    assert endpoint(option, env=env).url == url


@pytest.mark.parametrize(
    "url", ["ftp://x", "http://", "http://x:port", "http://x/?q=1", "https://u:p@x", "file:///etc"]
)
def test_no_url_of_a_service(url):
    with pytest.raises(ConfigError) as caught:
        endpoint(url, env={})
    assert "p@x" not in str(caught.value)


def test_the_token_comes_from_variable_or_file_and_is_not_shown(tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    for env in ({"CORRAL_TOKEN": SECRET}, {"CORRAL_TOKEN_FILE": str(file)}):
        found = endpoint("https://c", env=env)
        assert found.token == SECRET
        assert SECRET not in repr(found)


def test_a_token_crosses_no_network_in_clear():
    env = {"CORRAL_TOKEN": SECRET}
    for url in ("http://corral.example", "http://10.0.0.8", "http://localhost.example"):
        with pytest.raises(ConfigError, match="--insecure") as caught:
            endpoint(url, env=env)
        assert SECRET not in str(caught.value)
        assert endpoint(url, insecure=True, env=env).token == SECRET
        assert endpoint(url, env={}).token is None
    for url in ("http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1", "https://corral.example"):
        assert endpoint(url, env=env).token == SECRET


@pytest.mark.parametrize("token", ["two words", "a\nX-Evil: 1", "ünï", "a\x00"])
def test_what_is_no_token(token):
    with pytest.raises(ConfigError) as caught:
        endpoint("https://c", env={"CORRAL_TOKEN": token})
    assert token not in str(caught.value)


def test_a_token_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        endpoint("https://c", env={"CORRAL_TOKEN_FILE": str(tmp_path / "none")})
