"""Chat templates: rendered as written, in a process that may be killed, with nothing of the machine in reach."""

import asyncio
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import jinja2
import pytest

from app.text import chat_template
from app.text.chat_template import ChatTemplate, TemplateRefused, opens_thoughts
from app.text.template_process import LONGEST_TEXT, Renderer
from tests.tiny_text import byte_tokenizer

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@asynccontextmanager
async def template(tokenizer, source, seconds=5.0):
    made = ChatTemplate(replace(tokenizer, chat_template=source), seconds)
    try:
        yield made
    finally:
        await made.close()


def render(source, messages=HI, add=True, goes_on=False, **variables):
    return Renderer(source, {"bos_token": "<s>"}).render(messages, add, goes_on, variables)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n{% endif %}\n{% endfor %}", "user\n"),  # trims blocks
        ("{{ bos_token }}{{ messages[0]['content'] | tojson }}", '<s>"Hi"'),
        ("{{ {'a': 'é<&>'} | tojson(indent=1) }}", '{\n "a": "é<&>"\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% set ns = namespace(found=false) %}{% set ns.found = 1 %}{{ ns.found }}{{ dict(a=1) }}", "1{'a': 1}"),
        ("{% generation %}x{% endgeneration %}{{ tools is none }}{{ documents is none }}", "xTrueTrue"),
        ("{{ 'go' if add_generation_prompt else 'stop' }}{{ unknown_variable }}", "go"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_what_templates_are_given(source, text):
    assert render(source) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}", "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}",
        "{{ namespace(__init__=1) }}", "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ messages[0].missing.more }}", "{{ cycler.__init__.__globals__ }}",
        "{% include 'x' %}", "{% import 'os' as os %}",
        "{{ ('' | attr('__class__')).mro() }}", "{{ '{0.__class__.__mro__}'.format('') }}",
    ],
)  # fmt: skip
def test_what_templates_may_not_do(source):
    with pytest.raises((jinja2.TemplateError, TypeError, ValueError)):
        assert not render(source)


def test_going_on_within_the_last_message():
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}{{ '!' if add_generation_prompt }}"
    last = [*HI, {"role": "assistant", "content": "I am "}]
    assert render(source, last, goes_on=True) == "[user]Hi[end][assistant]I am "
    trimmed = source.replace("m.content }}", "m.content | trim }}")
    assert render(trimmed, last, goes_on=True) == "[user]Hi[end][assistant]I am"
    assert render(source, [*HI, {"role": "assistant", "content": ""}], goes_on=True) == "[user]Hi[end][assistant]"
    with pytest.raises(jinja2.TemplateError, match="cannot be continued"):
        render("{{ messages[0].role }}", last, goes_on=True)


def test_only_variables_that_the_template_reads():
    assert render("{{ mood }}", mood="x") == "x"
    for name in ("mod", "messages", "bos_token", "tools", "add_generation_prompt"):
        renderer = Renderer("{{ mood }}{{ messages }}{{ bos_token }}{{ tools }}", {"bos_token": "<s>"})
        with pytest.raises(jinja2.TemplateError, match=name):
            renderer.render(HI, True, False, {name: 1})


async def test_the_templates_own_words_come_through(tokenizer):
    async with template(tokenizer, "{{ raise_exception('roles must alternate') }}") as made:
        for _ in range(2):
            with pytest.raises(TemplateRefused, match="roles must alternate"):
                await made.render(HI)
    async with template(tokenizer, "{% if %}") as made:
        with pytest.raises(TemplateRefused, match="does not compile"):
            await made.render(HI)
    async with template(tokenizer, None) as made:
        with pytest.raises(TemplateRefused, match="no chat template"):
            await made.render(HI)


async def test_a_template_that_never_ends_is_killed_and_replaced(tokenizer):
    source = (
        "{% if messages[0].content == 'spin' %}"
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
        "{% elif messages[0].content == 'fill' %}{{ 'x' * 10 ** 11 }}{% else %}fine{% endif %}"
    )
    async with template(tokenizer, source, seconds=0.3) as made:
        assert await made.render(HI) == "fine"
        for content in ("spin", "fill", "spin"):
            start = time.monotonic()
            with pytest.raises(TemplateRefused):
                await made.render([{"role": "user", "content": content}])
            assert time.monotonic() - start < 5
            assert await made.render(HI) == "fine"


TOO_LONG = (
    "{{ 'x' * (messages | length * 10 ** 8) }}",
    "{{ '\u00e9' * 600000 }}",
    "{% for n in range(99999) %}12345678901{% endfor %}",
)


@pytest.mark.parametrize("source", TOO_LONG)
async def test_a_text_over_the_limit_is_refused_where_it_is_made(tokenizer, source):
    source = f"{{% if messages[0].content == 'long' %}}{source}{{% else %}}fine{{% endif %}}"
    async with template(tokenizer, source) as made:
        with pytest.raises(TemplateRefused, match=f"over {LONGEST_TEXT} bytes; shorten it"):
            await made.render([{"role": "user", "content": "long"}])
        assert await made.render(HI) == "fine"


async def test_a_text_at_the_limit_is_whole(tokenizer):
    text = '"\n' * (LONGEST_TEXT // 2)
    async with template(tokenizer, "{{ messages[0].content }}") as made:
        assert await made.render([{"role": "user", "content": text}]) == text


async def test_an_answer_over_the_limit_is_not_read(tokenizer, tmp_path, monkeypatch):
    """Whatever a template made of its process: the process is ended, its gigabyte is never held."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nprintf '\\100\\0\\0\\0'\nexec cat /dev/zero\n")
    program.chmod(0o755)
    async with template(tokenizer, "x", seconds=20) as made:
        monkeypatch.setattr(sys, "executable", str(program))
        start = time.monotonic()
        with pytest.raises(TemplateRefused, match="answered with 1073741824 bytes"):
            await made.render(HI)
        assert time.monotonic() - start < 5
        monkeypatch.undo()
        assert await made.render(HI) == "x"


REFUSALS = {
    "long words": ("{{ raise_exception('x' * (messages | length * 50000000)) }}", "refuses: x{1000}$"),
    "no words": ("{{ raise_exception(range(3)) }}", r"refuses: range\(0, 3\)$"),
    "a long key": ("{{ {}['x' * (messages | length * 50000000)].y }}", "refuses: .{1,1000}$"),
    "a long list": (
        "{% set x = 'x' * (messages | length * 300000000) %}{{ [x, x, x] | join }}",
        "refuses: it takes more than 1 GiB of memory",
    ),
    "itself": ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "refuses: it is nested too deeply, or calls itself"),
    "depth": ("{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}", "does not compile: it is nested too deeply"),
    "blocks": ("{% for a in [1] %}" * 40 + "{% endfor %}" * 40, "does not compile: SyntaxError: too many statically"),
    "a long constant": ("{{ 'x' * 950000000 }}", "does not compile: it takes more than 1 GiB of memory"),
    "an endless constant": ("{{ 9 ** (9 ** 9) }}", "did not compile within 1 s"),
}


@pytest.mark.parametrize(("source", "says"), REFUSALS.values(), ids=REFUSALS)
async def test_what_goes_wrong_is_one_short_sentence(tokenizer, source, says, capfd):
    async with template(tokenizer, source, seconds=1 if "within 1 s" in says else 20) as made:
        start = time.monotonic()
        with pytest.raises(TemplateRefused, match=says) as refused:
            await made.render(HI)
        assert time.monotonic() - start < 15, "on a busy machine, and below the limit of 20"
    assert len(str(refused.value)) < 1100
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("source", ["{{ 9 ** (9 ** 9) }}", "{% if %}"])
async def test_a_template_that_does_not_compile_is_not_compiled_for_every_client(tokenizer, source, monkeypatch):
    says = "did not compile within 1 s" if "9" in source else "does not compile: "
    async with template(tokenizer, source, seconds=1) as made:
        with pytest.raises(TemplateRefused, match=says):
            await made.render(HI)
        monkeypatch.setattr(sys, "executable", "/nowhere")  # what would start it again fails
        for _ in range(50):
            with pytest.raises(TemplateRefused, match=says):
                await made.render(HI)


async def test_a_template_that_did_not_compile_in_time_is_tried_again_later(tokenizer, monkeypatch):
    monkeypatch.setattr(chat_template, "TRIED_AGAIN_AFTER", 0.0)
    async with template(tokenizer, "{{ 9 ** (9 ** 9) }}", seconds=0.5) as made:
        with pytest.raises(TemplateRefused, match="did not compile"):
            await made.render(HI)
        made._source = "fine"  # as if the machine had been busy
        assert await made.render(HI) == "fine"


async def test_clients_that_leave_before_their_turn_are_not_rendered(tokenizer):
    source = "{% if messages[0].content == 'spin' %}{{ 9 ** (9 ** (messages | length * 9)) }}{% endif %}fine"
    async with template(tokenizer, source, seconds=1) as made:
        assert await made.render(HI) == "fine"
        waiting = [asyncio.create_task(made.render([{"role": "user", "content": "spin"}])) for _ in range(8)]
        await asyncio.sleep(0.1)
        for task in waiting:
            task.cancel()
        start = time.monotonic()
        assert await made.render(HI) == "fine"
        assert time.monotonic() - start < 4
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_killed_process_is_replaced(tokenizer):
    async with template(tokenizer, "{{ messages[0].content }}") as made:
        assert await made.render(HI) == "Hi"
        made._process.kill()
        await made._process.wait()
        assert await made.render(HI) == "Hi"


async def test_a_client_that_leaves_does_not_mix_up_the_answers(tokenizer):
    async with template(tokenizer, "{{ messages[0].content }}") as made:
        await made.render(HI)
        tasks = [asyncio.create_task(made.render([{"role": "user", "content": f"{n}" * 1000}])) for n in range(20)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        left = await asyncio.gather(*tasks, return_exceptions=True)
        assert [text for text in left if isinstance(text, str)] == [f"{n}" * 1000 for n in range(1, 20, 2)]
        assert await made.render(HI) == "Hi"


async def test_any_text_survives_the_way_there_and_back(tokenizer):
    text = "\x00 \u2028 🥹 \\ud800 \"'{{ }} </script> \r\n" + "나" * 100_000
    async with template(tokenizer, "{{ messages[0].content }}") as made:
        assert await made.render([{"role": "user", "content": text}]) == text


def test_the_process_imports_neither_torch_nor_the_web():
    code = "import app.text.template_process, sys; print(*sorted(m for m in sys.modules if '.' not in m))"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "fastapi", "transformers", "tokenizers", "pydantic", "numpy"} & set(seen)


def test_where_thoughts_are_opened():
    assert opens_thoughts("<|assistant|><think>\n")
    assert not opens_thoughts("<|assistant|>\n")
