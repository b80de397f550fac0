"""The pictures of the documents: drawn by docs/pictures, shown in a page, and told to the blind."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from docs.pictures import nexmark
from docs.pictures.__main__ import IMAGES, PICTURES
from docs.pictures.drawing import Box, Picture, TextTooWide
from docs.pictures.results import PAGE, fill_tables

from onceflow.core.state.keys.key_groups import key_group_of

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", PICTURES)
def test_each_file_is_what_the_program_draws(name: str) -> None:
    """`python -m docs.pictures` writes them anew."""
    assert (IMAGES / f"{name}.svg").read_text(encoding="utf-8") == PICTURES[name]().svg()


@pytest.mark.parametrize("name", PICTURES)
def test_each_picture_has_a_title_and_a_description(name: str) -> None:
    root = ET.fromstring(PICTURES[name]().svg())
    for tag in ("title", "desc"):
        assert (root.findtext(SVG + tag) or "").strip() != ""
    assert "http" not in PICTURES[name]().svg().replace("http://www.w3.org/2000/svg", "")


def test_each_picture_stands_in_a_page_with_words_for_it() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {
        file: words
        for page in pages
        for words, file in re.findall(r"!\[([^\]]*)\]\([^)]*?([\w-]+)\.svg\)", page.read_text())
    }
    assert set(shown) == set(PICTURES)
    assert all(len(words.split()) > 5 for words in shown.values())


def test_the_tables_of_results_have_the_figures_of_the_data() -> None:
    """`python -m docs.pictures` fills them anew."""
    page = PAGE.read_text(encoding="utf-8")
    assert page.count("\n<!-- results: ") == 2
    assert fill_tables(page) == page


def test_the_page_on_nexmark_has_the_figures_and_the_queries_that_run() -> None:
    """`python -m docs.pictures` fills it anew."""
    page = nexmark.PAGE.read_text(encoding="utf-8")
    assert page.count("\n<!-- nexmark: ") == 2
    assert nexmark.fill_page(page) == page
    assert all(one["difference"] == "" for one in nexmark.read_results()["queries"])
    turns = nexmark.read_flink_results()["queries"]
    assert {one["difference"] for one in turns} == {""}
    assert [one["query"] for one in turns if one["flink_difference"] != ""] in ([], ["q12"])


def test_a_text_that_leaves_its_box_or_the_picture_is_refused() -> None:
    picture = Picture("title", "description", 200, 100)
    with pytest.raises(TextTooWide, match="shorten it or widen its box"):
        picture.box(Box(10, 10, 60, 30), "a long line of text")
    with pytest.raises(TextTooWide, match="leaves the picture"):
        picture.text(150, 50, "a long line of text")


def test_the_key_of_the_picture_is_in_the_group_that_it_shows() -> None:
    assert key_group_of("erin", 12) == 9
