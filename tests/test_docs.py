"""The README and docs/: what they link to, name and show is there."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rrd.cli.app import COMMANDS
from rrd.config import Config, GateConfig, LaneConfig
from rrd.helper.config import GroupConfig, HelperConfig
from rrd.job import JobSpec
from rrd.journal import Kind

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])
PICTURES = sorted(ROOT.glob("docs/**/*.svg"))

KEYS = {key for table in (JobSpec, Config, LaneConfig, GateConfig) for key in table.model_fields}
KEYS |= {f.name for table in (HelperConfig, GroupConfig) for f in dataclasses.fields(table)}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts make them."""
    heads = re.findall(r"^#+ (.+)$", _prose(page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def _prose(text: str) -> str:
    """The text without its blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def _blocks(text: str, *languages: str) -> list[str]:
    return [body for name, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S) if name in languages]


def links(page: Path) -> list[str]:
    text = _prose(page.read_text())
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?:src|srcset|href)=\"([^\"]+)\"", text)


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        assert target.is_relative_to(ROOT), f"{link} leads out of the repository"
        if anchor:
            assert anchor in anchors(target), f"{link}: no such heading"


@pages
def test_commands_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    named = set(re.findall(r"(?:`|\$ |bin/)rrd ([a-z][a-z-]*)", text))
    named |= {name for block in _blocks(text, "", "bash") for name in re.findall(r"^rrd ([a-z][a-z-]*)", block, re.M)}
    assert named <= set(COMMANDS), f"no such command: {sorted(named - set(COMMANDS))}"


@pages
def test_make_targets_that_are_named_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"(?:`|\$ |^)make ([a-z][a-z-]*)", page.read_text(), re.M))
    assert named <= targets, f"no such target: {sorted(named - targets)}"


@pages
def test_options_of_rrd_that_are_named_exist(page: Path) -> None:
    import importlib

    for name, options in re.findall(r"`rrd ([a-z]+)((?: [^`\n]*)?)`", page.read_text()):
        command = getattr(importlib.import_module(f"rrd.cli.{COMMANDS[name][0]}"), name.replace("-", "_"))
        known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
        assert set(re.findall(r"--[a-z-]+", options)) <= known, f"rrd {name}{options}"


@pages
def test_keys_in_toml_examples_exist(page: Path) -> None:
    for block in _blocks(page.read_text(), "toml"):
        keys = set(re.findall(r"^([a-z_]+) *=", block, re.M))
        assert keys <= KEYS, f"no such key: {sorted(keys - KEYS)}"


@pages
def test_keys_set_in_prose_exist(page: Path) -> None:
    keys = set(re.findall(r"`([a-z_]+) = [^`]*`", page.read_text()))
    assert keys <= KEYS, f"no such key: {sorted(keys - KEYS)}"


@pages
def test_files_of_ours_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:rrd|tests|units|etc|docs|packaging)/[\w./-]+\.\w+)`", page.read_text())
    assert [n for n in named if not (ROOT / n).exists()] == []


@pages
def test_message_ids_that_are_named_exist(page: Path) -> None:
    known = {kind.value for kind in Kind}
    assert set(re.findall(r"MESSAGE_ID=([0-9a-f]{32})", page.read_text())) <= known


@pytest.mark.parametrize("page", [*PAGES, *PICTURES], ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_names_the_place_where_it_was_written(page: Path) -> None:
    for line in page.read_text().split("\n"):
        assert not re.search(r"(?<![\w.])/(?:work|tmp|root/)|\.\./shared", line.replace("below `/root`", "")), line


def test_every_page_is_reached_from_the_readme() -> None:
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        seen.add(page)
        found = {(page.parent / link.partition("#")[0]).resolve() for link in links(page) if "://" not in link}
        todo += [p for p in found if p.suffix == ".md" and p not in seen and p.exists()]
    assert set(PAGES) <= seen, f"nothing leads to {[str(p) for p in set(PAGES) - seen]}"


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").read_text().count("\n") <= 200


@pytest.mark.parametrize("picture", PICTURES, ids=lambda p: p.name)
def test_pictures_stand_alone_and_say_what_they_show(picture: Path) -> None:
    svg = ElementTree.parse(picture).getroot()
    kinds = {element.tag.rpartition("}")[2] for element in svg.iter()}
    assert {"title", "desc"} <= kinds
    assert not kinds & {"script", "image", "foreignObject"}
