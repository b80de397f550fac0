"""Tests the requests that need no token, and the requests that the endpoint refuses."""

from __future__ import annotations

import re

import pytest
from tests.unit.runtime.test_job_api import INSTANCE, TOKEN, Job

from onceflow.core.runtime.driver.http_server import Request, Response
from onceflow.core.runtime.driver.job_api import JobApi
from onceflow.core.runtime.driver.web_page import WebPage

API = JobApi(Job(), INSTANCE, TOKEN, ["driver.example"])


def ask(path: str, method: str = "GET", **headers: str) -> Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = Request(method, path, {"host": "127.0.0.1:8081", **named}, b"{}")
    return API.refuse(request) or API.answer(request)


def test_the_page_needs_no_token_and_every_datum_does() -> None:
    page = ask("/")
    assert page.status == 200
    assert page.headers["Content-Type"].startswith("text/html")
    for path in re.findall(rb'(?:href|src)="(page/[^"]+)"', page.body):
        assert ask(f"/{path.decode()}").status == 200
    assert ask("/v1/overview").status == 401
    assert ask("/page/../job_api.py").status == 401
    assert ask("/page/nothing.js").status == 401


def test_modules_import_only_files_that_are_there() -> None:
    page = WebPage()
    names = ["main.js"]
    for name in names:
        assert page.has(f"/page/{name}")
        text = page.answer(Request("GET", f"/page/{name}", {})).body.decode()
        found = re.findall(r'from "\./([^"]+)"', text)
        names += [one for one in found if one not in names]
    assert len(names) > 5


@pytest.mark.parametrize("path", ["/", "/page/main.js", "/v1/overview"])
def test_every_answer_forbids_scripts_and_frames_of_others(path: str) -> None:
    headers = ask(path).headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"


def test_the_page_has_no_inline_script_or_style_and_loads_nothing_from_elsewhere() -> None:
    text = ask("/").body.decode()
    assert re.findall(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", text) == []
    assert re.findall(r"(?:https?:)?//", text) == []


def test_a_browser_that_has_a_file_is_not_sent_it_again() -> None:
    first = ask("/page/page.css")
    again = ask("/page/page.css", if_none_match=first.headers["ETag"])
    assert (again.status, again.body) == (304, b"")


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("127.0.0.1:8081", True),
        ("[::1]:8081", True),
        ("10.1.2.3", True),
        ("LOCALHOST:8081", True),
        ("Driver.example:8081", True),
        ("evil.example:8081", False),
        ("driver.example.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("[::1", False),
    ],
)
def test_a_name_that_is_not_ours_gets_neither_page_nor_data(host: str, is_own: bool) -> None:
    token = f"Bearer {TOKEN}"
    assert ask("/", host=host).status == (200 if is_own else 421)
    assert ask("/v1/overview", host=host, authorization=token).status == (200 if is_own else 421)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://127.0.0.1:8081"}, 202),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec_fetch_site": "same-origin"}, 202),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site", "sec_fetch_mode": "no-cors"}, 403),
    ],
)
def test_another_site_cannot_ask_even_with_the_token(headers: dict[str, str], status: int) -> None:
    token = f"Bearer {TOKEN}"
    assert ask("/v1/checkpoint", "POST", authorization=token, **headers).status == status


def test_a_link_of_another_site_opens_the_page() -> None:
    assert ask("/", sec_fetch_site="cross-site", sec_fetch_mode="navigate").status == 200
