"""Token ids, one at a time, to text that is complete at every moment.

Works on bytes, not on the `tokenizers` library's streaming decoder, which can raise "Invalid prefix" and can hold
text back through invalid bytes. Knows bytes and UTF-8; does not know stop strings, streams or requests.
"""

from codecs import utf_8_decode
from typing import Protocol


class Vocabulary(Protocol):
    """What is asked of a tokenizer here."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for inside a text."""

    def is_special(self, token: int) -> bool:
        """Whether the id is a control token, not text."""


class Detokenizer:
    """The text of one output. A character is shown when its last byte is there.

    Bytes that can no longer become a character turn into U+FFFD at once, so at most three are ever held back
    (a maximal subpart gives one U+FFFD, as in Unicode 16, section 3.9, and as the library's own whole decode).
    """

    def __init__(self, tokenizer: Vocabulary, skip_special_tokens: bool = True) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._is_special = tokenizer.is_special if skip_special_tokens else None
        self._held = b""

    def push(self, token: int) -> str:
        """The characters that became complete with this token; an id that no token has adds nothing."""
        if self._is_special is not None and self._is_special(token):
            return ""
        data = self._held + self._token_bytes(token)
        text, length = utf_8_decode(data, "replace", False)
        self._held = data[length:]
        return text

    def finish(self) -> str:
        """What is still to be shown at the end; an incomplete character is dropped."""
        held, self._held = self._held, b""
        # Python waits for a third byte behind half a surrogate (ED A0 to ED BF), which no byte can complete.
        shown = held.decode(errors="replace")
        return shown if len(shown) > 1 else ""
