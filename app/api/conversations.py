"""A conversation of a client to the text of the model's own template, and to its ids.

Knows messages and what the template process refuses; the template prints begin tokens itself, so none is added.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from app.api.door import Door
from app.api.errors import Invalid
from app.api.prompts import Prompt, check_fits, check_sizes, encode
from app.api.schemas import RetentionFields
from app.api.schemas_requests import Message
from app.text.chat_template import ChatTemplate, TemplateRefused


class Conversation(Protocol):
    """The part of a request that makes a conversation."""

    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...


async def render(template: ChatTemplate, body: Conversation, messages: Sequence[Message]) -> str:
    """The conversation as one text. Raises Invalid, with the template's own words where it refuses."""
    goes_on = bool(body.continue_final_message)
    if goes_on and body.add_generation_prompt:
        text = "continue_final_message and add_generation_prompt exclude each other"
        raise Invalid(text, "continue_final_message")
    begins = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
    plain = [_plain(message, place, template.knows_developer) for place, message in enumerate(messages)]
    check_sizes([text for message in plain for text in message.values()], "messages")
    try:
        return await template.render(plain, begins, goes_on, body.chat_template_kwargs)
    except TemplateRefused as error:
        field = "chat_template_kwargs" if error.about_variables and body.chat_template_kwargs else "messages"
        raise Invalid(str(error), field, "template_refused") from error


async def prompt_of(door: Door, text: str, retention: RetentionFields | None) -> Prompt:
    """The ids of a rendered conversation. Raises Invalid where there are none, or certainly too many."""
    await check_fits(door, retention, [text], "messages")
    (ids,) = await encode(door.tokenizer, [text], add_special=False)
    if not ids:
        raise Invalid("the model's chat template makes an empty text of this conversation", "messages")
    return Prompt(tuple(ids), text)


def _plain(message: Message, place: int, knows_developer: bool) -> Mapping[str, Any]:
    if message.content is None and message.role != "assistant":
        raise Invalid("only an assistant's message may have no content", f"messages.{place}.content")
    content = message.content or ""
    if not isinstance(content, str):
        content = "".join(part.text for part in content if part.type == "text")
    role = "system" if message.role == "developer" and not knows_developer else message.role
    plain = {"role": role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    if message.reasoning_content is not None:
        plain["reasoning_content"] = message.reasoning_content
    return plain
