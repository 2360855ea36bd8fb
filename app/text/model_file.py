"""A tokenizer from a folder's `tokenizer.model`, read as it is: converting it to `tokenizers` changes its ids.

Knows what transformers' tokenizers of this kind keep beside that file; does not know folders or where texts begin.
"""

from collections.abc import Mapping
from typing import Any

from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken

from app.text.sentence_pieces import SentencePieces, marks

# Tokenizers of transformers whose ids are those of the file; others (XGLM's) move them.
_PLAIN = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")


def build(model: bytes, config: Mapping[str, Any], added: Mapping[str, Any]) -> SentencePieces | None:
    """The vocabulary, or None where the folder's tokenizer is of a class that reads the file in another way.

    `config` and `added`: the contents of tokenizer_config.json and added_tokens.json, as far as there are any.
    Raises ValueError, a clause, where the file is no sentencepiece model: transformers makes nothing of it silently.
    """
    kind = config.get("tokenizer_class")
    if kind is not None and str(kind).removesuffix("Fast") not in _PLAIN:
        return None
    try:
        processor = SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise ValueError("it is no model of sentencepiece") from error
    if not processor.get_piece_size():
        raise ValueError("it is empty")
    tokens = {number: str(processor.id_to_piece(number)) for number in range(processor.get_piece_size())}
    whole = {
        number: AddedToken(token, normalized=False, special=True)
        for number, token in tokens.items()
        if processor.is_control(number) or processor.is_unknown(number)
    }
    whole |= _added(config, added)
    tokens |= {number: token.content for number, token in whole.items()}
    size = max(tokens) + 1
    spelled = [tokens.get(number, "") for number in range(size)]
    # Absent is taken as `legacy`, which is what transformers did when such folders were made.
    return SentencePieces(model, spelled, marks(whole, size), one_prefix=config.get("legacy") is False)


def _added(config: Mapping[str, Any], added: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Tokens that were added after the training, by id."""
    rows: dict[int, dict[str, Any]] = {
        number: {"content": content} for content, number in added.items() if isinstance(number, int)
    }
    decoder = config.get("added_tokens_decoder")
    for number, row in (decoder if isinstance(decoder, dict) else {}).items():
        if number.isdecimal() and isinstance(row, dict) and isinstance(row.get("content"), str):
            rows[int(number)] = row
    return {
        number: AddedToken(
            row["content"],
            normalized=False,
            **{flag: row.get(flag) is True for flag in ("special", "lstrip", "rstrip", "single_word")},
        )
        for number, row in rows.items()
        if row["content"]
    }
