"""The man pages say what the program says, and man renders them without a complaint."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rrd.cli.app import COMMANDS
from rrd.cli.manual import PAGES, pages, render
from rrd.config import Config, GateConfig, LaneConfig
from rrd.job import JobSpec

needs_man = pytest.mark.skipif(shutil.which("man") is None or shutil.which("groff") is None,
                               reason="needs man and groff (apt-get install man-db groff)")


def shown(name: str, tmp_path: Path) -> str:
    """A page as man shows it; fails if it has anything to say about the source."""
    source = tmp_path / name
    source.write_text(render(name))
    done = subprocess.run(["man", "--warnings", "-E", "UTF-8", "-l", str(source)], capture_output=True, text=True,
                          env={**os.environ, "MANWIDTH": "100", "MAN_KEEP_FORMATTING": "", "PAGER": "cat"}, check=True)
    assert done.stderr == ""
    return re.sub(".\b", "", done.stdout)


@needs_man
@pytest.mark.parametrize("name", PAGES)
def test_man_has_nothing_to_complain_about(name: str, tmp_path: Path) -> None:
    text = shown(name, tmp_path)
    for heading in ("NAME", "SYNOPSIS", "DESCRIPTION", "SEE ALSO"):
        assert re.search(f"^{heading}$", text, re.M)


@needs_man
def test_every_command_with_its_options_is_there(tmp_path: Path) -> None:
    text = shown("rrd.1", tmp_path)
    for name in COMMANDS:
        assert re.search(rf"^   rrd {name}( |$)", text, re.M), name
    assert "--replace" in text and "Take the place of other job files of that name." in text
    assert re.search(r"^   rrd bench ops ", text, re.M), "commands below commands, too"
    assert re.search(r"^       78 +The configuration or a job file is bad", text, re.M)


@needs_man
def test_every_key_is_there_with_its_default_and_kind(tmp_path: Path) -> None:
    text = shown("rrd-job.5", tmp_path)
    for key in JobSpec.model_fields:
        assert re.search(rf"^       {key}( |$)", text, re.M), key
    said = " ".join(text.split())
    assert "lr Learning rate after warm-up. (number above 0 to 10; default 0.0002)" in said
    assert re.search(r" model Base model: [^(]+\(text; must be given\)", said)
    assert re.search(r' on_nan [^(]+\("stop" or "skip"; default "stop"; live\)', said)
    text = shown("rrd.toml.5", tmp_path)
    for key in {*Config.model_fields, *LaneConfig.model_fields, *GateConfig.model_fields} - {"lane", "gate"}:
        assert re.search(rf"^       {key}( |$)", text, re.M), key


def test_pages_lie_where_man_looks() -> None:
    assert set(pages()) == {"man1/rrd.1", "man5/rrd.toml.5", "man5/rrd-job.5", "man8/rrd-gate.8"}
