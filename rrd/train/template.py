"""A model's own chat template, rendered in a sandbox, and which of what it writes is the assistant's.

Templates are Jinja2, as transformers has them (``chat_template`` in ``tokenizer_config.json``, or
``chat_template.jinja``). They come from outside: they run sandboxed, with limits on time, output and the size of
products, and whoever renders many should do so in a process with a limit on its memory.

What is learned is what the model would have to say itself. Where a template marks that (``{% generation %}``), its
marks count. Elsewhere an answer begins where the prompt for it, ``add_generation_prompt``, ends, and goes up to and
including the special token by which it stops. Nothing a template writes behind the last answer is kept.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from rrd.errors import BadJob
from rrd.text import one_line
from rrd.train.shapes import BadLine, Turn

VERSION = 1
"""Raise it whenever the same template and turns give other spans: it is part of the cache's key."""

SECONDS = 5.0
"""CPU time that one record may take."""
LONGEST = 1 << 20
"""Characters of a template."""
_GROWTH, _ROOM = 20, 1 << 20
"""A rendering may be so many times as long as what it is given, and so many characters longer."""
_PRODUCT = 1 << 20
"""Items of a repeated text or list; bits of a number."""

_BEGIN, _END = "\0rrd generation\0", "\0rrd end\0"
_SENTINEL = "rrd0sentinel0rrd"


class Span(NamedTuple):
    """A stretch of a record: text, or one special token by its id; and whether its tokens carry loss."""

    piece: str | int
    learn: bool


class _Refused(Exception):
    """What the template does is not allowed, or it says itself that it cannot render this."""


class ChatTemplate:
    """One template. ``names``: what it may call its tokens by, such as ``bos_token``. ``stops``: the special tokens."""

    def __init__(self, source: str, names: Mapping[str, str], stops: Iterable[str], *, file: str = "") -> None:
        """Raises BadJob where ``source`` is no template."""
        if len(source) > LONGEST:
            raise BadJob(f"the chat template has {len(source):,} characters, and {LONGEST:,} are the limit", file=file)
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError, ValueError) as e:
            raise BadJob(f"the chat template is no Jinja template: {one_line(str(e), 200)}", file=file,
                         hint="mend or remove it: without one, turns are written as ChatML or plainly") from e
        self._names = dict(names)
        self._marked = bool(re.search(r"{%-?\s*generation\b", source))
        found = sorted({s for s in stops if s}, key=lambda s: (-len(s), s))
        either = "|".join(map(re.escape, found)) or "(?!)"
        self._stop, self._stop_next = re.compile(either), re.compile(rf"\s*(?:{either})")
        self._prompts: bool | None = None

    def spans(self, turns: Sequence[Turn]) -> list[Span]:
        """The rendering in stretches with and without loss, up to the last with. Raises BadLine with the reason."""
        messages = [{"role": t.role, "content": t.text} for t in turns]
        try:
            with _time_limit(SECONDS):
                return list(self._by_marks(turns, messages) if self._marked else self._by_prompts(turns, messages))
        except _Refused as e:
            raise BadLine(f"the chat template {one_line(str(e), 200)}") from e
        except BadLine:
            raise
        except Exception as e:  # whatever code that is not ours raises
            raise BadLine(f"the chat template fails: {one_line(str(e) or type(e).__name__, 200)}") from e

    def _render(self, messages: Sequence[Mapping[str, str]], *, prompt: bool = False) -> str:
        room = _ROOM + _GROWTH * sum(len(m["content"]) for m in messages)
        out: list[str] = []
        for part in self._template.generate(messages=list(messages), add_generation_prompt=prompt, **self._names):
            out.append(part)
            room -= len(part)
            if room < 0:
                raise _Refused("writes far more than it is given")
        return "".join(out)

    # -- by the template's own marks

    def _by_marks(self, turns: Sequence[Turn], messages: Sequence[Mapping[str, str]]) -> Iterator[Span]:
        if any("\0" in m["content"] for m in messages):
            raise _Refused("is not given texts with a NUL")
        parts = re.split(f"{_BEGIN}(.*?){_END}", self._render(messages), flags=re.S)
        learns = [t.learn for t in turns if t.role == "assistant"]
        answers = len(parts) // 2
        if not all(learns) and answers != len(learns):
            raise _Refused(f"marks {answers} answers where there are {len(learns)}, and not all are to be learned")
        last = max((i for i in range(answers) if answers != len(learns) or learns[i]), default=-1)
        for i in range(last + 1):
            yield Span(parts[2 * i], False)
            yield Span(parts[2 * i + 1], answers != len(learns) or learns[i])

    # -- by what is asked and what is answered

    def _by_prompts(self, turns: Sequence[Turn], messages: Sequence[Mapping[str, str]]) -> Iterator[Span]:
        whole, at = self._render(messages), 0
        for i, turn in enumerate(turns):
            if turn.role == "assistant" and turn.learn:
                start = max(at, self._start(whole, messages[:i]))
                end = self._end(whole, start, turn.text, messages[:i])
                yield Span(whole[at:start], False)
                yield Span(whole[start:end], True)
                at = end

    def _start(self, whole: str, before: Sequence[Mapping[str, str]]) -> int:
        """Where the answer to ``before`` begins: behind what the model will be given."""
        asked = _common(whole, self._render(before, prompt=True))
        if self._has_prompts():
            return asked
        head, _ = self._around(before)  # the answer's own heading, if it has one, is given as well
        return len(head) if head[asked:].strip() and whole.startswith(head) else asked

    def _has_prompts(self) -> bool:
        """Whether the template heeds ``add_generation_prompt``."""
        if self._prompts is None:
            asked = [{"role": "user", "content": _SENTINEL}]
            self._prompts = self._render(asked) != self._render(asked, prompt=True)
        return self._prompts

    def _end(self, whole: str, start: int, said: str, before: Sequence[Mapping[str, str]]) -> int:
        """Behind the special token that ends the answer; where there is none, behind what always follows an answer."""
        at = whole.find(said.strip(), start)
        if at < 0:  # a template may leave thoughts out
            if stop := self._stop.search(whole, start):
                return stop.end()
            raise _Refused("does not show the answer")
        end, space = at + len(said.strip()), said[len(said.rstrip()):]
        end += len(space) if whole.startswith(space, end) else 0
        if stop := self._stop_next.match(whole, end):
            return stop.end()
        return end + _common(whole[end:], self._around(before)[1])

    def _around(self, before: Sequence[Mapping[str, str]]) -> tuple[str, str]:
        """What stands before and behind an answer to ``before``."""
        head, found, tail = self._render([*before, {"role": "assistant", "content": _SENTINEL}]).rpartition(_SENTINEL)
        if not found:
            raise _Refused("does not show the answer")
        return head, tail


def _common(a: str, b: str) -> int:
    """How many characters ``a`` and ``b`` begin with together."""
    if a.startswith(b):
        return len(b)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# -- the sandbox ---------------------------------------------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` … ``{% endgeneration %}``: what is between is the assistant's."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call: Any = jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body)
        return call.set_lineno(line)  # type: ignore[no-any-return]

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_BEGIN}{caller()}{_END}"


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Products and powers are limited, too: one line could fill the memory."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        wide = operator == "%" and isinstance(left, (str, bytes)) and _WIDE.search(str(left))
        if operator == "**" or wide or (operator == "*" and _size(left) * _size(right) > _PRODUCT):
            raise _Refused("makes something far too large")
        return super().call_binop(context, operator, left, right)


_WIDE = re.compile(r"\*|[0-9]{4}")  # in a format: a width taken from elsewhere, or of thousands


def _size(value: Any) -> int:
    if isinstance(value, int):
        return max(1, abs(value) if value.bit_length() < 64 else _PRODUCT)
    return max(1, len(value)) if hasattr(value, "__len__") else 1


def _environment() -> jinja2.Environment:
    """As transformers makes it, without its clock: the same turns give the same tokens on every day."""
    env = _Sandbox(trim_blocks=True, lstrip_blocks=True, optimized=False,  # which would compute before any limit is set
                   extensions=[_Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = _to_json
    del env.globals["lipsum"], env.filters["random"]  # chance has no place in what must be the same every time
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda form: _TODAY.strftime(str(form)[:100])
    return env


_TODAY = datetime.datetime(2024, 7, 26)  # what Llama 3's template says where it has no clock


def _raise(message: object) -> NoReturn:
    raise _Refused(f"refuses it: {message}")


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=None if indent is None else min(int(indent), 8),
                      **{k: v for k, v in options.items() if k in ("sort_keys", "separators")})


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Within, CPU time beyond ``seconds`` raises. Only a main thread can be stopped so; others are left alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> NoReturn:
        raise _Refused(f"takes longer than {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.1)  # again and again: what it raises may be caught
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
