"""Chat templates as models bring them: rendered as transformers does, learned where the model must speak, and tame."""

from __future__ import annotations

import time
from array import array
from pathlib import Path
from typing import Any

import pytest
from toy_tokenizer import byte_level, save

from rrd.errors import BadJob
from rrd.train.read import Record
from rrd.train.shapes import BadLine, Turn
from rrd.train.template import ChatTemplate
from rrd.train.tokenize import load_tokenizer

CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
          "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
MISTRAL = ("{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
           "{{ raise_exception('roles must alternate') }}{% endif %}{% if m['role'] == 'user' %}"
           "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}{{ ' ' + m['content'] | trim + eos_token }}"
           "{% endif %}{% endfor %}")
GEMMA = ("{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
         "{% endif %}{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
         "{{ '<start>' + role + '\n' + m['content'] | trim + '<end>\n' }}{% endfor %}"
         "{% if add_generation_prompt %}{{'<start>model\n'}}{% endif %}")
THINKS = ("{%- for m in messages %}{%- set said = m.content %}"  # as Qwen3 and DeepSeek-R1: thoughts stay in the last
          "{%- if m.role == 'assistant' and not loop.last %}{%- set said = said.split('</think>')[-1].lstrip('\n') %}"
          "{%- endif %}{{- '<|im_start|>' + m.role + '\n' + said + '<|im_end|>\n' }}{%- endfor %}"
          "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}")
MARKED = ("{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}"
          "{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
          "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}")
HEADED = "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n\n{% endfor %}"  # knows no prompt, no stop

SPECIAL = ["<|im_start|>", "<|im_end|>", "<start>", "<end>", "<s>", "</s>"]
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
TALK = [("user", "hi"), ("assistant", "yo"), ("user", "more"), ("assistant", "ok ")]


def spans(source: str, *turns: tuple[Any, ...]) -> list[tuple[object, bool]]:
    found = ChatTemplate(source, NAMES, SPECIAL).spans([Turn(*t) for t in turns])
    return [(piece, learn) for piece, learn in found]


def learned(source: str, *turns: tuple[Any, ...]) -> list[object]:
    return [piece for piece, learn in spans(source, *turns) if learn]


@pytest.mark.parametrize(("source", "expected"), [
    (CHATML, ["yo<|im_end|>", "ok <|im_end|>"]), (MISTRAL, [" yo</s>", " ok</s>"]),
    (GEMMA, ["yo<end>", "ok<end>"]), (MARKED, ["yo<|im_end|>", "ok <|im_end|>"]), (HEADED, ["yo\n\n", "ok \n\n"])])
def test_what_the_model_must_say_is_learned(source: str, expected: list[str]) -> None:
    assert learned(source, *TALK) == expected


def test_the_whole_reads_as_transformers_writes_it(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    for i, source in enumerate((CHATML, MISTRAL, GEMMA, THINKS, MARKED, HEADED)):
        where = save(byte_level(SPECIAL), tmp_path / str(i), **NAMES, chat_template=source)
        peer = PreTrainedTokenizerFast.from_pretrained(where)
        said = [{"role": r, "content": c} for r, c in TALK]
        theirs = peer.apply_chat_template(said, tokenize=False)
        ours = "".join(str(piece) for piece, _ in spans(source, *TALK))
        assert theirs.startswith(ours)
        assert theirs[len(ours):].strip() == "", "only what comes behind the last answer is left out"
        [tokens] = load_tokenizer(where).encode([Record(1, tuple(Turn(*t) for t in TALK))])
        assert isinstance(tokens, array)
        ids = peer.apply_chat_template(said, tokenize=True, return_dict=True, return_assistant_tokens_mask=True) \
            if source is MARKED else None
        if ids is not None:
            n = len(tokens)
            assert [t if t >= 0 else ~t for t in tokens] == ids["input_ids"][:n]
            assert [int(t >= 0) for t in tokens] == ids["assistant_masks"][:n]
            assert 1 not in ids["assistant_masks"][n:]


def test_thoughts_are_learned_where_they_are_shown() -> None:
    talk = [("user", "a"), ("assistant", "<think>\nhm\n</think>\nyo"), ("user", "b"),
            ("assistant", "<think>\nah\n</think>\nok")]
    assert learned(THINKS, *talk) == ["yo<|im_end|>", "ah\n</think>\nok<|im_end|>"], "the prompt ends with <think>"
    assert learned(THINKS, ("user", "a"), ("assistant", "yo")) == ["yo<|im_end|>"]


def test_an_answer_that_is_only_context_is_not_learned() -> None:
    talk = [("user", "hi"), ("assistant", "yo", False), ("user", "more"), ("assistant", "ok")]
    for source in (CHATML, MARKED):
        assert learned(source, *talk) == ["ok<|im_end|>"]
        assert "yo" in "".join(str(piece) for piece, learn in spans(source, *talk) if not learn)


def test_a_record_ends_with_the_templates_own_stop(tmp_path: Path) -> None:
    where = save(byte_level(SPECIAL), tmp_path, eos_token="</s>", bos_token="<s>", add_bos_token=True,
                 chat_template=CHATML)
    tok = load_tokenizer(where)
    chat, text = tok.encode([Record(1, tuple(Turn(*t) for t in TALK)), Record(2, (Turn("text", "a die"),))])
    assert isinstance(chat, array) and isinstance(text, array)
    assert tok.closed(chat)[-1] == SPECIAL.index("<|im_end|>")
    assert chat[0] == ~SPECIAL.index("<|im_start|>"), "a template writes its start token by itself"
    assert tok.closed(text)[-1] == SPECIAL.index("</s>")
    assert text[0] == ~SPECIAL.index("<s>")


def test_where_templates_are_found(tmp_path: Path) -> None:
    tok = byte_level(SPECIAL)
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": MISTRAL}]
    several = save(tok, tmp_path / "1", **NAMES, chat_template=named)
    own = save(tok, tmp_path / "2", **NAMES, chat_template=MISTRAL)
    (tmp_path / "2" / "chat_template.jinja").write_text(GEMMA)
    none = save(tok, tmp_path / "3", **NAMES)
    digests = [load_tokenizer(w).digest for w in (several, own, none)]
    assert len(set(digests)) == 3
    for where, stop in ((several, "</s>"), (own, "<end>"), (none, "</s>")):
        [tokens] = load_tokenizer(where).encode([Record(1, (Turn("user", "a"), Turn("assistant", "b")))])
        assert isinstance(tokens, array)
        assert load_tokenizer(where).closed(tokens)[-1] == SPECIAL.index(stop)


def test_the_day_changes_nothing() -> None:
    assert learned("{{ strftime_now('%d %b %Y') }}" + CHATML, ("user", "a"), ("assistant", "b")) == ["b<|im_end|>"]
    assert "26 Jul 2024" in str(spans("{{ strftime_now('%d %b %Y') }}" + CHATML, ("user", "a"), ("assistant", "b"))[0])


@pytest.mark.parametrize(("source", "reason"), [
    (MISTRAL, "refuses it: roles must alternate"), ("{{ x.y.z }}", "fails: 'x' is undefined"),
    ("{{ ''.__class__.__mro__ }}" + CHATML, "fails: access to attribute"),
    ("{{ messages.append(1) }}" + CHATML, "fails"), ("{% include '/etc/passwd' %}", "fails"),
    ("{{ 'a' * 10000000000 }}", "far too large"), ("{{ [0] * 10000000000 }}", "far too large"),
    ("{{ 7 ** 999999999 }}", "far too large"), ("{{ '%1000000000d' % 1 }}", "far too large"),
    ("{% for i in range(99999) %}{{ messages[0].content }}" + "a" * 40 + "{% endfor %}", "far more than it is given"),
    ("{% for i in range(9999999) %}{% endfor %}", "fails: Range too big"), ("nothing", "does not show the answer"),
    ("{{ cycler.__init__.__globals__ }}" + CHATML, "fails"), ("{{ lipsum(5) }}", "fails"),
    ("{{ messages | map('random') | list }}" + CHATML, "fails")])
def test_a_template_that_misbehaves_is_a_sentence(source: str, reason: str) -> None:
    with pytest.raises(BadLine, match=reason):
        spans(source, ("assistant", "first"), ("assistant", "second"))


def test_a_template_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rrd.train.template.SECONDS", 0.3)
    start = time.process_time()
    with pytest.raises(BadLine, match=r"takes longer than 0\.3 s"):
        spans("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", *TALK)
    assert time.process_time() - start < 20


@pytest.mark.parametrize("source", ["{% for", "{{ a b }}", "{% nonsense %}", "{{" * 5000, "x" * (1 << 21)])
def test_what_is_no_template_is_refused_by_file(tmp_path: Path, source: str) -> None:
    where = save(byte_level(SPECIAL), tmp_path, **NAMES)
    (tmp_path / "chat_template.jinja").write_text(source)
    with pytest.raises(BadJob, match=r"chat_template\.jinja: the chat template"):
        load_tokenizer(where)
