"""The shared copy of the weights: one file, one set of pages, whole or not there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import make_model

from rrd.models import build, load_base
from rrd.models.store import UNUSED_SECONDS


def weights(store: Path) -> list[Path]:
    return sorted(store.glob("*/weights"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_stored_copy_is_the_model(tmp_path: Path, dtype: torch.dtype) -> None:
    path = make_model(tmp_path / "m")
    own = load_base(path, dtype=dtype)
    for _ in range(2):  # written, then found
        base = load_base(path, dtype=dtype, store_dir=tmp_path / "store")
        assert (base.key, base.digest) == (own.key, own.digest)
        assert all(torch.equal(t, own.tensors[n]) for n, t in base.tensors.items())
        assert all(t.data_ptr() % 64 == 0 for t in base.tensors.values())
    assert len(weights(tmp_path / "store")) == 1


def test_the_store_is_not_read_again_and_a_new_file_makes_a_new_entry(tmp_path: Path) -> None:
    path, store = make_model(tmp_path / "m"), tmp_path / "store"
    first = load_base(path, store_dir=store)
    inode = weights(store)[0].stat().st_ino
    load_base(path, store_dir=store)
    assert weights(store)[0].stat().st_ino == inode
    make_model(path, seed=1)
    assert load_base(path, store_dir=store).digest != first.digest


def test_processes_share_the_pages(tmp_path: Path) -> None:
    """A second process maps what the first one wrote: half of the pages are its own, none is private."""
    path = make_model(tmp_path / "m", hidden=256, layers=4, ffn=512)
    code = (
        "import sys; from rrd.models import load_base\n"
        "base = load_base(sys.argv[1], store_dir=sys.argv[2])\n"
        "s = float(sum(t.float().sum() for t in base.tensors.values()))\n"
        "maps = open('/proc/self/smaps').read().split('/weights\\n')[1].split('VmFlags')[0]\n"
        "fields = dict(line.split(':') for line in maps.splitlines() if ':' in line)\n"
        "print(base.nbytes, *(int(fields[k].split()[0]) * 1024 for k in ('Rss', 'Pss', 'Private_Dirty')))")
    base = load_base(path, store_dir=tmp_path / "store")
    assert all(bool(t.isfinite().all()) for t in base.tensors.values())  # touched
    run = subprocess.run([sys.executable, "-c", code, str(path), str(tmp_path / "store")], check=True,
                         capture_output=True, text=True)
    nbytes, rss, pss, dirty = map(int, run.stdout.split())
    assert rss >= nbytes
    assert pss < 0.6 * rss
    assert dirty == 0


def test_a_torn_entry_is_written_anew(tmp_path: Path) -> None:
    path, store = make_model(tmp_path / "m"), tmp_path / "store"
    load_base(path, store_dir=store)
    for damage in (lambda: weights(store)[0].write_bytes(b"short"), lambda: (store / "x").mkdir(),
                   lambda: weights(store)[0].with_name("meta.json").write_text("{")):
        damage()
        base = load_base(path, store_dir=store)
        assert torch.equal(base.tensors["model.norm.weight"], torch.ones(32))


def test_a_flipped_bit_is_not_trained_on(tmp_path: Path) -> None:
    path, store = make_model(tmp_path / "m"), tmp_path / "store"
    good = load_base(path).tensors
    load_base(path, store_dir=store)
    (file,) = weights(store)
    whole = file.read_bytes()
    for at in (0, len(whole) // 2, len(whole) - 1):
        file = weights(store)[0]
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        base = load_base(path, store_dir=store)
        assert all(torch.equal(t, good[n]) for n, t in base.tensors.items())


def test_a_mapped_model_outlives_its_file(tmp_path: Path) -> None:
    path, store = make_model(tmp_path / "m"), tmp_path / "store"
    model = build(load_base(path, store_dir=store))
    idx = torch.arange(8)[None]
    with torch.no_grad():
        before = model(idx)
        shutil.rmtree(store)
        assert torch.equal(model(idx), before)


def test_what_nobody_asked_for_in_a_month_is_removed_when_another_is_written(tmp_path: Path) -> None:
    store, paths = tmp_path / "store", [make_model(tmp_path / str(i), seed=i) for i in range(3)]
    model, _ = build(load_base(paths[0], store_dir=store)), load_base(paths[1], store_dir=store)
    for meta in store.glob("*/meta.json"):
        os.utime(meta, times=(0, time.time() - UNUSED_SECONDS - 60))
    used = load_base(paths[1], store_dir=store)
    assert len(weights(store)) == 2  # nothing is written, nothing is removed
    load_base(paths[2], store_dir=store)
    assert len(weights(store)) == 2
    written = weights(store)
    assert load_base(paths[1], store_dir=store).digest == used.digest
    assert weights(store) == written  # the one in use was kept
    with torch.no_grad():
        again = build(load_base(paths[0], store_dir=store))
        assert torch.equal(model(torch.arange(8)[None]), again(torch.arange(8)[None]))  # mapped: it lived on
    assert len(weights(store)) == 3


def test_an_entry_that_goes_away_while_it_is_asked_for_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rrd.models import store as module

    path, place = make_model(tmp_path / "m"), tmp_path / "store"
    load_base(path, store_dir=place)
    digest, calls = module._digest, list[object]()

    def slow(entry: Path, *args: Any) -> str | None:
        calls.append(found := digest(entry, *args))
        if len(calls) == 1:
            shutil.rmtree(entry)
        return found

    monkeypatch.setattr(module, "_digest", slow)
    base = load_base(path, store_dir=place)
    assert torch.equal(base.tensors["model.norm.weight"], torch.ones(32))
    assert len(weights(place)) == 1
