"""The one exception a user may see."""


class StackError(Exception):
    """A fault with its remedy: one line, shown without a traceback, exit code 1."""


def some(names: list[str], limit: int = 3) -> str:
    """Return the first few of `names`, and how many more there are."""
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def count(number: int, noun: str) -> str:
    """Return `1 patch`, `2 patches`."""
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {noun if number == 1 else plural}"
