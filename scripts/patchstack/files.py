"""Text files of the checkout, read in one way whatever the locale."""

from pathlib import Path

from .errors import StackError


def read_text(path: Path) -> str:
    """The file's text; raises `StackError` if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as fault:
        raise StackError(
            f"{path} is not UTF-8 text (byte {fault.start}): restore it from git"
        ) from None
