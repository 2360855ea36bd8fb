"""The room of text and people: HTTP, templates, tokenizer, streams. Never imports torch or transformers."""
