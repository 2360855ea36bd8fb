"""Makes the tokenizer.json that an older model folder lacks; run as a process of its own, with the folder.

Knows transformers' own conversion and how to put a file in place whole; nothing of vocabularies.
"""

import contextlib
import os
import sys
import tempfile
from pathlib import Path

from model.gguf_file import CheckpointError


def convert(folder: Path) -> Path:
    """Write `folder`/tokenizer.json from what the folder has; raises CheckpointError and leaves nothing behind."""
    from transformers import AutoTokenizer

    target = folder / "tokenizer.json"
    try:
        backend = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        ).backend_tokenizer
        content = backend.to_str()
    except Exception as error:  # the library raises errors of many kinds
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(
            f"{folder} has no tokenizer.json and its tokenizer cannot be converted ({reason}); "
            "add the model's tokenizer.json."
        ) from error
    try:
        handle, name = tempfile.mkstemp(prefix=".tokenizer-", dir=folder)
    except OSError as error:
        raise CheckpointError(
            f"{folder} has no tokenizer.json and cannot be written ({error.strerror}); put one there."
        ) from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
        os.replace(name, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise CheckpointError(f"{target} cannot be written ({error.strerror}); make room, or put one there.") from error
    return target


def main(arguments: list[str]) -> int:
    """The process: 0 and the file's name, or 1 and one sentence on standard error."""
    try:
        print(convert(Path(arguments[0])))
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
