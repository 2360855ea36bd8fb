"""What a client wrote to token ids, without holding the event loop up.

Knows texts, ids and the tokenizer; limits of the model are the door's. Long texts are encoded in a thread, through
the library's batch call, which alone lets go of the interpreter's lock.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from app.api.errors import Invalid
from app.api.schemas_requests import MAX_PROMPTS
from app.text.detokenizer import Detokenizer
from app.text.tokenizer import Tokenizer

LONG = 4096  # characters; below it encoding takes under a millisecond or two


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its ids, and the text it came from (None where ids were sent)."""

    ids: tuple[int, ...]
    text: str | None = None


async def encode(tokenizer: Tokenizer, texts: Sequence[str], add_special: bool) -> list[list[int]]:
    """The ids of each text."""
    if sum(map(len, texts)) <= LONG:
        return [tokenizer.encode(text, add_special) for text in texts]
    return await asyncio.to_thread(_encode_long, tokenizer, texts, add_special)


def _encode_long(tokenizer: Tokenizer, texts: Sequence[str], add_special: bool) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.backend.encode_batch(texts, add_special_tokens=add_special)]


async def read_prompts(
    tokenizer: Tokenizer, prompt: str | list[int] | list[str] | list[list[int]], add_special: bool
) -> list[Prompt]:
    """The prompts of a completion request. Raises Invalid; ids are not checked against the vocabulary here."""
    given: list[str | list[int]]
    if isinstance(prompt, str):
        given = [prompt]
    elif not prompt:
        raise Invalid("the prompt is an empty list; send a text, ids, or a list of them", "prompt")
    elif isinstance(prompt[0], int):
        given = [[token for token in prompt if isinstance(token, int)]]
    else:
        given = [one for one in prompt if not isinstance(one, int)]
    if len(given) > MAX_PROMPTS:
        raise Invalid(f"{len(given)} prompts are more than the limit of {MAX_PROMPTS}", "prompt")
    texts = [one for one in given if isinstance(one, str)]
    encoded = iter(await encode(tokenizer, texts, add_special))
    return [
        Prompt(_begun(tokenizer, next(encoded)), one) if isinstance(one, str) else Prompt(_not_empty(one))
        for one in given
    ]


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
