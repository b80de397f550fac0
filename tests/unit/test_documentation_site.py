"""The published site: every version has its pages, and its switcher leads to the same page."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import expect
from tests.support.chromium import open_tab, start_chromium

DOCS = Path(__file__).parents[2] / "docs"
CONF = """
import runpy
globals().update(runpy.run_path({conf!r}))
version = release = {version!r}
html_theme_options["switcher"]["version_match"] = version
"""


def lay_out(site: Path, *url: str) -> list[dict[str, object]]:
    """Run what script/docs runs after the pages; return what the switcher reads."""
    subprocess.run([sys.executable, str(DOCS / "versions.py"), str(site), *url], check=True)
    entries: list[dict[str, object]] = json.loads((site / "versions.json").read_text())
    return entries


def put_version(site: Path, version: str) -> None:
    (site / version).mkdir()
    (site / version / "index.html").write_text(f"<p>{version}")


def test_stable_is_the_newest_final_version_and_the_others_stay_in_their_order(
    tmp_path: Path,
) -> None:
    for version in ("0.9.0", "0.10.0", "0.11.0rc1"):
        put_version(tmp_path, version)
    assert lay_out(tmp_path, "https://docs.test/onceflow/") == [
        {"version": "0.11.0rc1", "url": "https://docs.test/onceflow/0.11.0rc1/"},
        {
            "name": "0.10.0 (stable)",
            "version": "0.10.0",
            "url": "https://docs.test/onceflow/stable/",
            "preferred": True,
        },
        {"version": "0.9.0", "url": "https://docs.test/onceflow/0.9.0/"},
    ]
    assert (tmp_path / "stable" / "index.html").read_text() == "<p>0.10.0"
    assert "url=stable/" in (tmp_path / "index.html").read_text()
    put_version(tmp_path, "0.11.0")
    lay_out(tmp_path)
    assert (tmp_path / "stable" / "index.html").read_text() == "<p>0.11.0"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """Serve the versions 0.1.0 and 0.2.0 of a site with few pages; yield its address."""
    site = tmp_path / "site"
    for version, guides in (("0.1.0", ["old", "kept"]), ("0.2.0", ["kept"])):
        source = tmp_path / version
        (source / "guides").mkdir(parents=True)
        (source / "conf.py").write_text(CONF.format(conf=str(DOCS / "conf.py"), version=version))
        listed = "\n".join(f"guides/{name}" for name in guides)
        (source / "index.md").write_text(f"# Start\n\n```{{toctree}}\n{listed}\n```\n")
        for name in guides:
            (source / "guides" / f"{name}.md").write_text(f"# {name} in {version}\n")
        build = [sys.executable, "-m", "sphinx", "-b", "html", "--fail-on-warning", "--quiet"]
        subprocess.run([*build, str(source), str(site / version)], check=True, timeout=120)
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        lay_out(site, url)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield url
        server.shutdown()
        thread.join(30)


@pytest.mark.servers
def test_the_switcher_leads_to_the_same_page_of_another_version(served: str) -> None:
    with start_chromium() as browser, open_tab(browser) as tab:
        page = tab.page
        page.goto(served)
        expect(page).to_have_url(f"{served}stable/")
        page.goto(f"{served}0.1.0/guides/kept.html")
        warning = page.locator("#bd-header-version-warning")
        expect(warning).to_contain_text("0.1.0")
        switcher = page.locator(".version-switcher__button").first
        expect(switcher).to_have_text("0.1.0")
        switcher.click()
        page.locator(".version-switcher__menu a", has_text="0.2.0 (stable)").first.click()
        expect(page).to_have_url(f"{served}stable/guides/kept.html")
        expect(page.locator("h1")).to_contain_text("kept in 0.2.0")
        expect(warning).to_be_hidden()
        expect(page.locator(".version-switcher__button").first).to_have_text("0.2.0 (stable)")
        # A page that the other version lacks: its first one is shown.
        page.goto(f"{served}0.1.0/guides/old.html")
        page.locator(".version-switcher__button").first.click()
        page.locator(".version-switcher__menu a", has_text="0.2.0 (stable)").first.click()
        expect(page.locator("h1")).to_contain_text("Start")
