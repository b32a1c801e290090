"""rrd.stack: faulthandler's dump as a line."""

from __future__ import annotations

import faulthandler
import os
import threading

from rrd.stack import INNERMOST, summary

DUMP = '''Fatal Python error: Aborted

Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/rrd/worker/writer.py", line 39 in _run

Current thread 0x00007f0000000002 (most recent call first):
  File "/rrd/train/step.py", line 88 in _micro_step
  File "/rrd/worker/loop.py", line 140 in <listcomp>

Extension modules: torch._C (total: 1)
'''


def test_the_thread_that_was_hit_comes_first() -> None:
    assert summary(DUMP) == ("it stood in _micro_step (step.py:88) < <listcomp> (loop.py:140); "
                             "another thread in wait (threading.py:327) < _run (writer.py:39)")


def test_no_dump_no_words() -> None:
    assert summary("") == summary("Segmentation fault\n") == summary("Thread 0x1 (most recent call first):\n") == ""


def test_a_real_dump_is_understood_and_deep_ones_are_cut() -> None:
    def deep(n: int) -> None:
        if n:
            deep(n - 1)
        else:
            faulthandler.dump_traceback(fd, all_threads=True)

    fd = os.memfd_create("dump")
    waiting = threading.Event()
    thread = threading.Thread(target=waiting.wait)
    thread.start()
    deep(30)
    waiting.set()
    thread.join()
    said = summary(os.pread(fd, 1 << 16, 0).decode())
    os.close(fd)
    assert said.startswith("it stood in deep (test_stack.py:") and "; another thread in wait (threading.py:" in said
    assert said.split("; another")[0].count(" < ") == INNERMOST - 1
