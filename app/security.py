"""Who may call: API keys, kept as digests, compared in constant time, read again when their file changes.

Knows keys and headers; never logs or shows a key. The salt of a key parts the prefix cache between keys
without telling the worker anything about them.
"""

import hashlib
import hmac
import ipaddress
import logging
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

log = logging.getLogger("everstream.security")

RELOAD_SECONDS = 1.0
_COMMENT = re.compile(r"(?:^|[ \t])#.*")  # a # inside a key belongs to the key


class UnsafeBind(Exception):
    """The server would be open to everybody; the text says what to do."""


class Keys:
    """The set of valid API keys; empty means that none is asked for."""

    def __init__(self, keys: str = "", file: Path | None = None) -> None:
        """`keys`: separated by commas. `file`: UTF-8, one key a line; `#` after white space or first begins a comment.

        Raises OSError with a sentence where the file cannot be read, ValueError where a key does not print.
        """
        self._fixed = frozenset(_digests(keys.split(","), "EVERSTREAM_API_KEYS: key"))
        self._file = file
        self._stamp: tuple[int, ...] | None = None
        self._from_file: frozenset[bytes] = frozenset()
        self._checked = 0.0
        if file is not None:
            try:
                self._read(file)
            except (OSError, ValueError) as error:
                why = (error.strerror if isinstance(error, OSError) else "") or str(error)
                raise OSError(
                    f"--api-keys-file {file} cannot be read: {why}; name a text file with a key a line"
                ) from error

    @property
    def required(self) -> bool:
        """A caller must show a key. A key file that has become empty locks everybody out rather than nobody."""
        return bool(self._fixed) or self._file is not None

    def salt(self, authorization: bytes | None) -> str | None:
        """The salt of the caller's key, "" where none is asked for, None where the caller may not come in.

        `authorization`: the header's value as it came, `Bearer <key>`; keys are compared as bytes of UTF-8.
        """
        if not self.required:
            return ""
        self._reload()
        scheme, _, key = (authorization or b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        known = False
        for valid in self._fixed | self._from_file:  # no early exit: the time tells nothing
            known |= hmac.compare_digest(valid, digest)
        if not known or scheme.lower() != b"bearer":
            return None
        return hashlib.sha256(b"everstream prefix salt" + digest).hexdigest()[:32]

    def _reload(self) -> None:
        now = time.monotonic()
        if self._file is None or now - self._checked < RELOAD_SECONDS:
            return
        self._checked = now
        try:
            self._read(self._file)
        except (OSError, ValueError) as error:
            log.error("the API key file cannot be read, the keys read before stay valid: %s", error)

    def _read(self, file: Path) -> None:
        status = file.stat()
        stamp = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
        if stamp == self._stamp:
            return
        text = file.read_bytes().decode("utf-8-sig")  # some editors begin a file with a mark
        lines = [_COMMENT.sub("", line) for line in re.split("\r\n|\r|\n", text)]
        self._from_file = frozenset(_digests(lines, "line"))
        if self._stamp is not None:
            log.info("API keys read again", extra={"keys": len(self._from_file)})
        self._stamp = stamp


def _digests(keys: Iterable[str], what: str) -> Iterator[bytes]:
    """Raises ValueError, which does not show the key, where one holds what headers cannot carry or nobody sees."""
    for number, given in enumerate(keys, 1):
        key = given.strip(" \t\r\n")
        if not key.isprintable():
            raise ValueError(f"{what} {number} holds a character that does not print, so it can be no key")
        if key:
            yield hashlib.sha256(key.encode()).digest()


def check_bind(host: str, keys: Keys, insecure: bool) -> None:
    """Raises UnsafeBind when an address that others can reach would be served without keys."""
    if keys.required or insecure or _is_loopback(host):
        return
    raise UnsafeBind(
        f"{host} can be reached by others and no API key is set: set EVERSTREAM_API_KEYS or --api-keys-file, "
        "listen on 127.0.0.1, or say --insecure if everybody may use this server"
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
