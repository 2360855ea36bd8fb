"""A conversation to one text, as the model's own template writes it, rendered in a process of its own.

Knows how to ask the rendering process and how to replace it when it is killed, stuck or gone; the rendering itself is
`template_process`. Knows no HTTP.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.text.reasoning import OPENING, has_thoughts
from app.text.template_process import HEADER, LONGEST_ANSWER, TEXT, UNKNOWN_VARIABLE, frame
from app.text.tokenizer import Tokenizer

SECONDS = 5.0
TRIED_AGAIN_AFTER = 60.0
"""Seconds before a template that did not compile in time is compiled again: the machine may have been busy."""
_ROOT = Path(__file__).parents[2]


class TemplateRefused(ValueError):
    """The template cannot render this conversation; the text is the template's own where it has one."""

    def __init__(self, message: str, about_variables: bool = False) -> None:
        """`about_variables`: the fault lies in the variables given, not in the messages."""
        super().__init__(message)
        self.about_variables = about_variables


class ChatTemplate:
    """The template of one model. The process starts at the first conversation and lives until `close`."""

    def __init__(self, tokenizer: Tokenizer, seconds: float = SECONDS) -> None:
        """`seconds`: the longest render; then the process is ended and the conversation refused."""
        self._source = tokenizer.chat_template
        self._special_tokens = {
            name: token
            for name, token in (("bos_token", tokenizer.bos_token), ("eos_token", tokenizer.eos_token))
            if token
        }
        self._seconds = seconds
        self._process: asyncio.subprocess.Process | None = None
        self._does_not_compile = ""
        self._compile_again = float("inf")
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Task[str]] = set()

    @property
    def has_thoughts(self) -> bool:
        """Whether answers may begin with thoughts that are to be told apart."""
        return has_thoughts(self._source)

    @property
    def knows_developer(self) -> bool:
        """Whether the template has a role `developer` of its own."""
        return self._source is not None and "developer" in self._source

    @property
    def _limits(self) -> str:
        return f"{self._seconds:g} s and 1 GiB of memory"

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as one text of at most LONGEST_TEXT bytes. Raises TemplateRefused."""
        if self._source is None:
            raise TemplateRefused("this model has no chat template; use /v1/completions with a prompt of your own")
        asked = {
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "variables": dict(variables or {}),
        }
        await self._lock.acquire()
        # A client that goes away must not leave half an exchange in the pipe: the exchange is finished without it.
        task = asyncio.create_task(self._exchange(asked))
        self._running.add(task)
        task.add_done_callback(self._finished)
        return await asyncio.shield(task)

    def _finished(self, task: asyncio.Task[str]) -> None:
        self._running.discard(task)
        self._lock.release()

    async def _exchange(self, asked: Mapping[str, Any]) -> str:
        try:
            data = frame(asked)
        except RecursionError as error:
            raise TemplateRefused("what the template is given is nested too deeply", about_variables=True) from error
        try:
            process = await self._started()
            kind, text = await self._ask(process, data, self._seconds + 1)
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            await self.close()
            raise TemplateRefused(
                f"the model's chat template did not render this conversation within {self._limits}"
            ) from error
        if kind != TEXT:
            raise TemplateRefused(text, about_variables=kind == UNKNOWN_VARIABLE)
        return text

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        if self._does_not_compile and time.monotonic() < self._compile_again:
            raise TemplateRefused(self._does_not_compile)
        process = self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "app.text.template_process"),
            cwd=_ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={},
        )
        begin = {"template": self._source, "special_tokens": self._special_tokens, "seconds": self._seconds}
        try:
            kind, text = await self._ask(process, frame(begin), 30.0)
        except (TimeoutError, asyncio.IncompleteReadError) as error:
            await self.close()
            self._does_not_compile = f"the model's chat template did not compile within {self._limits}"
            self._compile_again = time.monotonic() + TRIED_AGAIN_AFTER
            raise TemplateRefused(self._does_not_compile) from error
        self._does_not_compile = "" if kind == TEXT else text
        if self._does_not_compile:
            await self.close()
            raise TemplateRefused(self._does_not_compile)
        return process

    async def _ask(self, process: asyncio.subprocess.Process, data: bytes, seconds: float) -> tuple[bytes, str]:
        assert process.stdin is not None
        assert process.stdout is not None
        async with asyncio.timeout(seconds):
            process.stdin.write(data)
            await process.stdin.drain()
            (length,) = HEADER.unpack(await process.stdout.readexactly(HEADER.size))
            if not 1 <= length <= LONGEST_ANSWER:
                await self.close()
                raise TemplateRefused(f"the template's process answered with {length} bytes; it was ended")
            answer = await process.stdout.readexactly(length)
        return answer[:1], answer[1:].decode(errors="replace")

    async def close(self) -> None:
        """End the process; the next conversation starts another."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def opens_thoughts(prompt: str) -> bool:
    """Whether a rendered prompt ends inside the thoughts of the answer that is to come."""
    return prompt.rstrip().endswith(OPENING)
