"""What a client wrote to token ids, without holding the event loop up or filling the memory.

Knows texts, ids, the tokenizer and how long a text may be; limits in tokens are the door's. Long texts are encoded in
a thread, through the library's batch call, which alone lets go of the interpreter's lock; the longest of them one
after another, because encoding takes hundreds of bytes of memory for each of the text.
"""

import asyncio
import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from app.api.door import Door
from app.api.errors import Invalid
from app.api.schemas import RetentionFields
from app.api.schemas_requests import MAX_PROMPTS
from app.text.detokenizer import Detokenizer
from app.text.template_process import LONGEST_TEXT
from app.text.tokenizer import Tokenizer

MANY = 1 << 18  # ids; more are looked through in a thread
LONG = 4096  # characters; below it encoding takes under a millisecond or two
HUGE = 1 << 16  # characters; above it only one encoding runs at a time
LONGEST_TOGETHER = 4 * LONGEST_TEXT  # bytes of the texts of one request

_ONE_AT_A_TIME = ThreadPoolExecutor(1, "huge-text")

Given = ParamSpec("Given")
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its ids, and the text it came from (None where ids were sent)."""

    ids: tuple[int, ...]
    text: str | None = None


async def encode(tokenizer: Tokenizer, texts: Sequence[str], add_special: bool) -> list[list[int]]:
    """The ids of each text; their sizes were checked."""
    if sum(map(len, texts)) <= LONG:
        return [tokenizer.encode(text, add_special) for text in texts]
    encoded: list[list[int]] = []
    for some in _portions(texts):
        encoded += await in_thread(sum(map(len, some)), _encode_long, tokenizer, some, add_special)
    return encoded


async def in_thread(length: int, work: Callable[Given, Made], /, *given: Given.args, **named: Given.kwargs) -> Made:
    """What `work` makes of a text of `length` characters, in a thread; of a huge one, when its turn has come.

    A client that leaves before its turn gives it up. One that leaves later cannot stop the work, and the next turn
    comes when it is done.
    """
    if length <= HUGE:
        return await asyncio.to_thread(work, *given, **named)

    def alone() -> Made:
        try:
            return work(*given, **named)
        finally:
            _give_memory_back()

    return await asyncio.get_running_loop().run_in_executor(_ONE_AT_A_TIME, alone)


def _give_memory_back() -> None:
    """glibc keeps what was freed in a thread's arena for that thread; other C libraries have no such call."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _portions(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts in their order, as many together as make one long text."""
    some: list[str] = []
    length = 0
    for text in texts:
        size = _size(text)
        if some and length + size > LONGEST_TEXT:
            yield some
            some, length = [], 0
        some.append(text)
        length += size
    yield some


def check_sizes(texts: Sequence[str], field: str) -> None:
    """Raises Invalid where texts are too long to be encoded at all."""
    sizes = [_size(text) for text in texts]
    if max(sizes, default=0) > LONGEST_TEXT:
        said = f"a text of {max(sizes)} bytes is over the limit of {LONGEST_TEXT}; shorten it"
        raise Invalid(said, field, "string_above_max_length")
    if sum(sizes) > LONGEST_TOGETHER:
        said = f"texts of {sum(sizes)} bytes together are over the limit of {LONGEST_TOGETHER} for one request"
        raise Invalid(f"{said}; send several requests", field, "string_above_max_length")


async def check_fits(door: Door, fields: RetentionFields | None, texts: Sequence[str], field: str) -> None:
    """Raises Invalid where a text need not be encoded to know that it is too long for the request's policy."""
    if sum(map(len, texts)) <= LONG:
        return
    check_sizes(texts, field)
    size, context = max(map(_size, texts)), door.ready.context
    if size <= context or door.retention(fields).policy != "none":
        return
    longest = await asyncio.to_thread(lambda: door.tokenizer.longest_token)
    if longest is not None and size > context * longest:
        said = f"the prompt has {size} bytes of text, and the context has {context} tokens of at most {longest} bytes"
        raise Invalid(f"{said}; {door.remedy}", field, "context_length_exceeded")


def _size(text: str) -> int:
    """Bytes of the text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def _encode_long(tokenizer: Tokenizer, texts: Sequence[str], add_special: bool) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.backend.encode_batch(texts, add_special_tokens=add_special)]


async def read_prompts(
    door: Door,
    prompt: str | list[int] | list[str] | list[list[int]],
    add_special: bool,
    retention: RetentionFields | None,
) -> list[Prompt]:
    """The prompts of a completion request. Raises Invalid; ids are not checked against the vocabulary here."""
    tokenizer = door.tokenizer
    given: list[str | list[int]]
    if isinstance(prompt, str):
        given = [prompt]
    elif not prompt:
        raise Invalid("the prompt is an empty list; send a text, ids, or a list of them", "prompt")
    elif isinstance(prompt[0], int):
        given = [prompt]
    else:
        given = [one for one in prompt if not isinstance(one, int)]
    if len(given) > MAX_PROMPTS:
        raise Invalid(f"{len(given)} prompts are more than the limit of {MAX_PROMPTS}", "prompt")
    texts = [one for one in given if isinstance(one, str)]
    await check_fits(door, retention, texts, "prompt")
    encoded = iter(await encode(tokenizer, texts, add_special))

    def made() -> list[Prompt]:
        return [
            Prompt(_begun(tokenizer, next(encoded)), one) if isinstance(one, str) else Prompt(_not_empty(one))
            for one in given
        ]

    return made() if sum(map(len, given)) <= MANY else await asyncio.to_thread(made)


def _begun(tokenizer: Tokenizer, ids: list[int]) -> tuple[int, ...]:
    """The ids of a text; an empty one starts from the begin token."""
    if ids:
        return tuple(ids)
    if tokenizer.bos_id is None:
        raise Invalid("the prompt is empty, and this model has no begin token to start from", "prompt")
    return (tokenizer.bos_id,)


def _not_empty(ids: list[int]) -> tuple[int, ...]:
    if not ids:
        raise Invalid("a prompt of the list holds no token ids", "prompt")
    return tuple(ids)


async def echoes(tokenizer: Tokenizer, prompts: Sequence[Prompt], by_token: bool) -> list[list[str]]:
    """The pieces each prompt is echoed as: what each token adds to its text, or the text in one piece."""
    whole = [prompt.text is not None and not by_token for prompt in prompts]
    if sum(len(prompt.ids) for prompt, one in zip(prompts, whole, strict=True) if not one) <= LONG:
        return _pieces(tokenizer, prompts, whole)
    return await asyncio.to_thread(_pieces, tokenizer, prompts, whole)


def _pieces(tokenizer: Tokenizer, prompts: Sequence[Prompt], whole: Sequence[bool]) -> list[list[str]]:
    return [
        [prompt.text or ""] if one else token_texts(tokenizer, prompt)
        for prompt, one in zip(prompts, whole, strict=True)
    ]


def token_texts(tokenizer: Tokenizer, prompt: Prompt) -> list[str]:
    """What each token of a prompt adds to its text; joined they are the prompt's text.

    A begin token that was only added, and the space that some vocabularies put before a text, add nothing.
    """
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    texts = [detokenizer.push(token) for token in prompt.ids]
    if prompt.text is None:
        return texts
    written = prompt.text
    for place in (0, len(texts) - 1):
        special = tokenizer.is_special(prompt.ids[place])
        if special and not (written.startswith(texts[place]) if place == 0 else written.endswith(texts[place])):
            texts[place] = ""
    joined = "".join(texts)
    if joined == f" {written}":
        place = next(place for place, text in enumerate(texts) if text)
        texts[place] = texts[place][1:]
    return texts
