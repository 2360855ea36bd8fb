"""How a request ends badly: refused before its stream begins, or broken off after it.

Knows sentences, codes and HTTP's status numbers, which travel with them; knows no stream.
"""

POISONED = "poisoned"
QUEUE_TIMEOUT = "queue_timeout"


class Refused(Exception):
    """No stream begins: `status` 400 (with `param`), 429 or 503 (with `retry_after` in seconds)."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after


class Broken(Exception):
    """The stream ends early by a fault or a limit; `status` and `retry_after` (seconds) serve an answer of which
    nothing was sent yet."""

    def __init__(
        self, message: str, code: str = "internal_error", status: int = 500, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status
        self.retry_after = retry_after


def broken_by(error: Exception) -> Broken:
    """What a stream ends with by this error; of what nobody expected only its kind is told, and it is the cause."""
    if isinstance(error, Broken):
        return error
    broken = Broken(f"the server failed at this stream ({type(error).__name__}); its log says why")
    broken.__cause__ = error
    return broken
