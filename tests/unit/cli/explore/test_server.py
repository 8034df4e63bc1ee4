"""Pages are for this machine's users who have the token."""

import json
import threading
import urllib.error
import urllib.request

import pytest

from shardwright.cli.errors import UsageError
from shardwright.cli.explore.server import PageServer


def refuse(query):
    raise UsageError(f"no {query['what']}")


@pytest.fixture
def server():
    with PageServer(0, {"/": lambda query: f"<p>{query}</p>", "/json": dict, "/no": refuse}) as it:
        thread = threading.Thread(target=it.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield it
        it.shutdown()
        thread.join()


def get(address, **headers):
    request = urllib.request.Request(address, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode(), e.headers


def test_with_the_token_pages_and_json_are_answered(server):
    status, text, headers = get(f"{server.address}&a=1")
    assert (status, text) == (200, "<p>{'a': '1'}</p>")
    assert headers["Referrer-Policy"] == "no-referrer" and headers["Cache-Control"] == "no-store"
    status, text, _ = get(server.address.replace("/?", "/json?") + "&a=1")
    assert (status, json.loads(text)) == (200, {"a": "1"})
    assert get(server.address.replace("/?", "/none?"))[0] == 404
    status, text, _ = get(server.address.replace("/?", "/no?") + "&what=plan")
    assert (status, json.loads(text)) == (400, {"state": "failed", "error": "no plan"})


@pytest.mark.parametrize("path", ["/", "/json", "/none"])
def test_without_the_token_nothing_is(server, path):
    base = f"http://127.0.0.1:{server.server_port}{path}"
    for address in (base, f"{base}?token=", f"{base}?token=x", f"{base}?token=%C3%A9"):
        status, text, _ = get(address)
        assert status == 403 and server.token not in text


def test_a_name_that_resolves_to_loopback_is_refused(server):
    for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1"):
        assert get(server.address, Host=host)[0] == 403
    assert get(server.address, Host=f"localhost:{server.server_port}")[0] == 200


def test_it_listens_on_loopback_only_and_says_when_a_port_is_taken(server):
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(UsageError, match=rf"port {server.server_port} of 127\.0\.0\.1"):
        PageServer(server.server_port, {})
