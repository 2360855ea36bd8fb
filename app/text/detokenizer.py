"""Token ids, one at a time, to text that is complete at every moment.

Works on bytes, not on the `tokenizers` library's streaming decoder, which can raise "Invalid prefix" and can hold
text back through invalid bytes. Knows bytes and UTF-8; does not know stop strings, streams or requests.
"""

import codecs
from typing import Protocol

_Utf8 = codecs.getincrementaldecoder("utf-8")


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
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._decoder = _Utf8(errors="replace")

    def push(self, token: int) -> str:
        """The characters that became complete with this token; an id that no token has adds nothing."""
        if self._skip_special and self._tokenizer.is_special(token):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """What is still to be shown at the end; an incomplete character is dropped."""
        held = self._decoder.getstate()[0]
        self._decoder.reset()
        # Python waits for a third byte behind half a surrogate (ED A0 to ED BF), which no byte can complete.
        shown = held.decode(errors="replace")
        return shown if len(shown) > 1 else ""
