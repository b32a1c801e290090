from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from toy_tokenizer import plain_dir

from rrd.errors import Damaged
from rrd.train.data import Dataset, order, prepare
from rrd.train.step import NO_LABEL

ROWS = [{"prompt": "a " * n, "completion": "die " * (n % 3 + 1)} for n in range(1, 8)]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    done = prepare(str(tmp_path / "d.jsonl"), plain_dir(tmp_path / "m"), seq_len=64, cache_dir=tmp_path / "c")
    assert Dataset.open(done.path).digest == done.digest
    return done.path


def test_labels_are_the_next_tokens_of_the_completion(cache: Path) -> None:
    data = Dataset.open(cache)
    assert len(data) == len(ROWS)
    for i in range(len(data)):
        idx, labels = data.sample(i)
        assert idx.dtype == labels.dtype == torch.int64
        assert len(idx) == len(labels)
        assert (idx >= 0).all()
        learned = labels != NO_LABEL
        assert learned[-1], "the end token is learned"
        assert torch.equal(labels[:-1][learned[:-1]], idx[1:][learned[:-1]])
        first = int(learned.nonzero()[0])
        assert learned[first:].all(), "one stretch of prompt, one of completion"
        assert first >= i, "the prompt grows with i"


def test_an_order_is_a_permutation_that_depends_on_seed_and_epoch_alone() -> None:
    orders = [order(s, e, 100) for s, e in [(0, 0), (0, 1), (1, 0), (2**40, 0)]]
    assert all(sorted(o.tolist()) == list(range(100)) for o in orders)
    assert len({tuple(o.tolist()) for o in orders}) == 4
    torch.manual_seed(5)
    assert torch.equal(order(0, 0, 100), orders[0])
    assert order(7, 3, 6).tolist() == [3, 1, 5, 4, 0, 2], "a checkpoint's position means this order for ever"


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 20])
def test_positions_run_through_epochs(cache: Path, batch_size: int) -> None:
    """Batches of any size see the same samples in the same order, and a fresh reader goes on from any position."""
    data, n, seed = Dataset.open(cache), len(ROWS), 3
    expected = [data.sample(int(order(seed, e, n)[i])) for e in range(4) for i in range(n)]
    for position in range(0, len(expected) - batch_size, batch_size):
        idx, labels = Dataset.open(cache).batch_at(position, batch_size, seed)
        longest = max(len(x) for x, _ in expected[position : position + batch_size])
        assert idx.shape == labels.shape == (batch_size, longest)
        for b in range(batch_size):
            x, y = expected[position + b]
            assert torch.equal(idx[b, : len(x)], x)
            assert torch.equal(labels[b, : len(y)], y)
            assert (labels[b, len(y) :] == NO_LABEL).all()


def test_evaluation_sees_every_sample_once(cache: Path) -> None:
    data = Dataset.open(cache)
    seen = [data.in_file(at, 3) for at in range(0, len(data), 3)]
    assert [len(b.idx) for b in seen] == [3, 3, 1]
    assert sum(int((b.labels != NO_LABEL).sum()) for b in seen) == sum(
        int((data.sample(i)[1] != NO_LABEL).sum()) for i in range(len(data)))


@pytest.mark.parametrize(("epochs", "batch", "accum", "steps"), [
    (1, 1, 1, 7), (1.0, 2, 1, 4), (2, 7, 1, 2), (3, 2, 2, 6), (0.01, 1, 1, 1), (1 / 7, 1, 1, 1),
    (10.0, 7, 1, 10), (0.1, 1, 1, 1),
])
def test_total_steps(cache: Path, epochs: float, batch: int, accum: int, steps: int) -> None:
    assert Dataset.open(cache).total_steps(epochs, batch, accum) == steps


def test_a_tenth_of_an_epoch_is_a_tenth(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Dataset.open(cache)
    monkeypatch.setattr(Dataset, "__len__", lambda _: 10)
    assert [data.total_steps(epochs, 1, 1) for epochs in (0.1, 1.1, 2.3)] == [1, 11, 23]


def test_a_cache_that_is_not_whole_is_not_opened(cache: Path) -> None:
    (cache / "tokens.bin").write_bytes(b"1234")
    with pytest.raises(Damaged, match=r"tokens\.bin has 4 bytes"):
        Dataset.open(cache)
