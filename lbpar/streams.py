"""Standard streams that a command may write to whatever they are: closed, full, without a reader, or of few characters."""

from __future__ import annotations

import codecs
import errno
import io
import os
import select
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager

ERRORS = "lbpar.ascii"
"""Name of the error handler that writes what an encoding lacks in ASCII, as far as there is a form for it."""

_FORMS = str.maketrans(
    {"×": "x", "·": "*", "µ": "u", "→": "->", "≥": ">=", "≤": "<=", "–": "-", "—": "-", "…": "...", "‖": "||"}
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READER_GONE = 141  # as of a program that the signal for it ended


@contextmanager
def standard_streams() -> Iterator[None]:
    """Around a command's main, also as a decorator: nothing that it prints ends in a traceback.

    What the stream's encoding lacks is written in ASCII; streams that were closed are as good as the null device; a reader that is
    gone (``| head -1``) ends the command quietly, as it does others.

    Raises
    ------
    SystemExit
        Nobody reads standard output any more, or it cannot be written, for example on a full disk.
    """
    _open_closed()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ERRORS)
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # here, not when Python ends and can only complain
    except BrokenPipeError:
        if not _reader_gone():
            raise
        _discard()
        raise SystemExit(_READER_GONE) from None
    except OSError as error:
        if error.filename is not None or error.errno not in _FULL:
            raise
        _discard()
        print(f"lbpar: error: standard output or a file cannot be written: {error.strerror}.", file=sys.stderr)
        raise SystemExit(1) from None


def _open_closed() -> None:
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            # Opened in this order it gets the closed number itself, so that no data file gets it, and then a library's warning.
            null = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(null, mode, encoding="utf-8", closefd=null > fd))


def _to_ascii(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_form, error.object[error.start : error.end])), error.end


def _form(character: str) -> str:
    plain = unicodedata.normalize("NFKD", character.translate(_FORMS))
    return "".join(c for c in plain if c.isascii()) or character.encode("ascii", "backslashreplace").decode()


codecs.register_error(ERRORS, _to_ascii)


def _reader_gone() -> bool:
    """Whether standard output is a pipe that nobody reads."""
    try:
        look = select.poll()
        look.register(sys.stdout.fileno(), 0)
        return any(events & (select.POLLERR | select.POLLHUP) for _, events in look.poll(0))
    except (OSError, ValueError):
        return False


def _discard() -> None:
    """What is still to be written to standard output goes nowhere."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
