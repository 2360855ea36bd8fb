"""The bodies of the requests, each field with range, default and meaning; shared fields are in `schemas`.

Knows shapes only; what the model can do with them is asked at the door.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from app.api.schemas import MAX_LOGPROBS, MAX_TOKENS, Ids, Sampling, Strict, Text, Texts

MAX_PROMPTS = 512
MAX_MESSAGES = 4096
MAX_PARTS = 4096
MAX_STRINGS = 1 << 18
MAX_TEXT = 1 << 20

Prompt = Text | Ids | Texts | Annotated[list[Ids], Field(fail_fast=True)]
"""A text, ids, or a list of either; at the door each becomes the ids of one prompt."""

MODEL = Field(None, description="Name of the model, as /v1/models lists it; default: the one that is served.")


class CompletionRequest(Sampling):
    """Go on after a prompt."""

    model: Text | None = MODEL
    prompt: Prompt = Field(
        description=f"A text, token ids, or a list of at most {MAX_PROMPTS} of either. Required.",
        examples=["Once upon a time"],
    )
    echo: bool | None = Field(False, description="Put the prompt before the answer.")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Tell each token's log-probability and k candidates; null is off. With echo the prompt's too.",
    )
    best_of: int | None = Field(None, ge=1, description="Only as many as `n`: choosing among more is not served.")
    add_special_tokens: bool | None = Field(
        True, description="Begin a text prompt with the begin token where the model was trained so."
    )


class TextPart(Strict):
    """One piece of a message's content."""

    type: Literal["text"] = Field(description="Only text is served.")
    text: Text = Field(description="The piece's text; pieces are joined as they are.")


class Message(Strict):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="Who speaks. `developer` becomes `system` where the model's template does not know it."
    )
    content: Text | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None = Field(
        None,
        description=f"What is said, in one piece or at most {MAX_PARTS} parts; only an assistant may say null.",
    )
    name: Text | None = Field(None, description="Handed to the template, which may show it.")
    reasoning_content: Text | None = Field(None, description="An assistant's thoughts, handed to the template.")


class Chat(Strict):
    """What a chat's prompt is made of."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)] = Field(
        description=f"The conversation so far, 1 to {MAX_MESSAGES} messages.",
        examples=[[{"role": "user", "content": "Hello!"}]],
    )
    add_generation_prompt: bool | None = Field(
        None, description="Begin an assistant's message after the last one. Default: unless continue_final_message."
    )
    continue_final_message: bool | None = Field(False, description="Go on within the last message instead.")
    chat_template_kwargs: dict[Text, Any] | None = Field(
        None, description="Further variables for the model's template; each must be one that the template reads."
    )


class ChatRequest(Sampling, Chat):
    """Answer in a conversation."""

    model: Text | None = MODEL
    max_completion_tokens: int | None = Field(
        None, ge=0, le=MAX_TOKENS, description="Another name of max_tokens; only one of them, or both alike."
    )
    logprobs: bool | None = Field(False, description="Tell each token's log-probability.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="How many candidates a token beside it; needs `logprobs: true`."
    )


class TokenizeRequest(Strict):
    """Ids of a text, or of a conversation under the model's template."""

    model: Text | None = MODEL
    prompt: Text | None = Field(
        None, max_length=MAX_TEXT, description=f"The text, at most {MAX_TEXT} characters; either this or `messages`."
    )
    add_special_tokens: bool | None = Field(
        None, description="Add begin and end tokens as trained. Default: true for a text, false for a conversation."
    )
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)] | None = Field(
        None, description="The conversation; either this or `prompt`."
    )
    add_generation_prompt: bool | None = Field(
        None, description="Begin an assistant's message after the last one. Default: unless continue_final_message."
    )
    continue_final_message: bool | None = Field(False, description="Go on within the last message instead.")
    chat_template_kwargs: dict[Text, Any] | None = Field(None, description="Further variables for the template.")


class DetokenizeRequest(Strict):
    """The text of ids."""

    model: Text | None = MODEL
    tokens: Ids = Field(max_length=MAX_TEXT, description=f"At most {MAX_TEXT} token ids. Required.")
    skip_special_tokens: bool | None = Field(False, description="Leave control tokens out of the text.")
