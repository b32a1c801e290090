"""Rows of parquet files, where pyarrow is there (the extra ``parquet``): the same shapes as JSON lines have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from rrd.errors import BadJob
from rrd.text import one_line
from rrd.train.read import BadLines, open_regular
from rrd.train.shapes import BadLine, Record, turns_of

_ROWS = 512
"""Rows that are taken out of a file at a time."""
_MOST_ROWS = 1 << 20


class ParquetFile:
    """The rows from ``begin`` to before ``end``. As ``rrd.train.read.DataFile``, in rows; lines are rows, from 1."""

    kind = "parquet"
    sha256 = ""
    """Rows are not stretches of the file; only the whole of it has a digest."""

    def __init__(self, path: str, begin: int, end: int) -> None:
        self.path, self.begin, self.position, self.end, self.line = path, begin, begin, end, 0
        self._file = open_regular(path, what="the data file")
        self._parquet = _opened(path, self._file)

    def __enter__(self) -> ParquetFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._parquet.close()
        self._file.close()

    def records(self, bad: BadLines) -> Iterator[Record]:
        """The usable rows in order; the others go to ``bad``."""
        for row in self._rows():
            self.position += 1
            self.line += 1
            try:
                if not isinstance(row, dict):
                    raise BadLine(str(row))
                yield Record(self.line, turns_of({k: v for k, v in row.items() if v is not None}))
            except BadLine as e:
                bad.add(self.line, str(e))

    def _rows(self) -> Iterator[Any]:
        """Rows as dictionaries; what cannot be decoded is a sentence in its place."""
        meta, first = self._parquet.metadata, 0
        for g in range(meta.num_row_groups):
            rows = meta.row_group(g).num_rows
            if first < self.end and first + rows > self.begin:
                yield from self._group(g, max(0, self.begin - first), min(rows, self.end - first))
            first += rows

    def _group(self, g: int, begin: int, end: int) -> Iterator[Any]:
        at = 0
        try:
            for batch in self._parquet.iter_batches(_ROWS, row_groups=[g], use_threads=False):
                a, b = max(begin - at, 0), min(end - at, batch.num_rows)
                at += batch.num_rows
                if a < b:
                    yield from batch.slice(a, b - a).to_pylist()
                if at >= end:
                    break
        except Exception as e:  # pyarrow's many kinds, for files that are damaged
            raise _unusable(self.path, e) from e


def row_ranges(path: str, size: int) -> list[tuple[int, int]]:
    """Stretches of rows of about ``size`` bytes each, by the file's own account; at least one."""
    with open_regular(path, what="the data file") as f:
        meta = _opened(path, f).metadata
        rows: int = meta.num_rows
        nbytes = sum(meta.row_group(g).total_byte_size for g in range(meta.num_row_groups))
    step = max(1, min(_MOST_ROWS, size * rows // max(1, nbytes)))
    return [(begin, min(begin + step, rows)) for begin in range(0, rows, step)] or [(0, 0)]


def _opened(path: str, f: Any) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as e:
        raise BadJob("parquet is read with pyarrow, which is not installed", file=path,
                     hint="pip install 'rrd[parquet]', or write it as JSON lines: one object a line") from e
    try:
        os.lseek(f.fileno(), 0, os.SEEK_SET)
        return parquet.ParquetFile(f, memory_map=False, pre_buffer=False)
    except Exception as e:
        raise _unusable(path, e) from e


def _unusable(path: str, e: Exception) -> BadJob:
    return BadJob(f"not a usable parquet file: {one_line(str(e).split(chr(10))[0], 200)}", file=path,
                  hint="write it again, or as JSON lines: one object a line")
