"""Chat templates: rendered as written, in a process that may be killed, with nothing of the machine in reach."""

import asyncio
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import jinja2
import pytest

from app.text.chat_template import ChatTemplate, TemplateRefused, opens_thoughts
from app.text.template_process import Renderer
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
