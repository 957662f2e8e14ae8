"""Parse amounts with units ("8GiB", "1h30m", "2%", "500 steps") into numbers, and format numbers as such amounts.

Invalid and ambiguous text is refused with an error that shows the accepted syntax.
"""

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from trimtab.errors import RecipeError

BYTES_SYNTAX = "a size such as 8GiB, 500MB or a number of bytes"
SECONDS_SYNTAX = "a duration such as 90s, 10min, 3h, 1h30m or a number of seconds"
SHARE_SYNTAX = "a share between 0 and 1, such as 0.02 or 2%"
EVERY_SYNTAX = "an interval such as 500 steps, epoch, 2 epochs or 10min"

_NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)"  # no exponents: Fraction("1e999999999") would never finish
_BYTES = {"": 1, "b": 1, "byte": 1, "bytes": 1}
_BYTES |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)}
_BYTES |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)}
_SECONDS = {
    **dict.fromkeys(("d", "day", "days"), 86400),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1),
}


@dataclass(frozen=True)
class Every:
    """An interval of optimizer steps, epochs or seconds; exactly one of the three is set."""

    steps: int | None = None
    epochs: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        given = [amount for amount in (self.steps, self.epochs, self.seconds) if amount is not None]
        if len(given) != 1 or not (given[0] > 0 and math.isfinite(given[0])):
            raise RecipeError(f"{self!r} is not an interval", "set one of steps, epochs and seconds, above 0")

    def __str__(self) -> str:
        if self.steps is not None:
            return f"{self.steps} step{'s' if self.steps != 1 else ''}"
        if self.epochs is not None:
            return "epoch" if self.epochs == 1 else f"{_plain(self.epochs)} epochs"
        return exact_seconds(self.seconds or 0.0)


def parse_bytes(text: str | int) -> int:
    """Parse a number of bytes. GiB is 1024³, GB is 1000³; a bare G is refused because it is used for both.

    Args:
        text: "8GiB", "500 MB", "1024", or an integer number of bytes.

    Raises:
        RecipeError: The text is not a size or is ambiguous.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = re.fullmatch(rf"({_NUMBER})\s*([a-z]*)", _lowered(text))
    if match and match[2] in _BYTES:
        size = Fraction(match[1]) * _BYTES[match[2]]
        if match[2] or size.denominator == 1:
            return int(size)
        raise RecipeError(f"{text!r} is not a whole number of bytes", f"write {BYTES_SYNTAX}")
    if match and match[2] in set("kmgt"):
        letter = match[2].upper()
        raise RecipeError(f"{text!r} may be {match[1]}{letter}iB or {match[1]}{letter}B", f"write {BYTES_SYNTAX}")
    raise RecipeError(f"{text!r} is not a size", f"write {BYTES_SYNTAX}")


def format_bytes(num_bytes: float) -> str:
    """Format bytes for display: "8.0 GiB", "512 B"."""
    sign, size = ("-" if num_bytes < 0 else ""), float(abs(num_bytes))
    if round(size) < 1024:
        return f"{sign}{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if round(size, 1) < 1024:  # rounded first, so that it never shows "1024.0 KiB"
            return f"{sign}{size:.1f} {unit}"
    return f"{sign}{size / 1024:.1f} TiB"


def exact_bytes(num_bytes: int) -> str:
    """Format bytes so that `parse_bytes` returns exactly the same number."""
    for unit, size in (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if num_bytes and num_bytes % size == 0:
            return f"{num_bytes // size}{unit}"
    return f"{num_bytes}B"


def parse_seconds(text: str | int | float) -> float:
    """Parse a duration into seconds.

    Args:
        text: "3h", "10min", "1h30m", "1 h 30 min", "90s", "90", or a number of seconds.

    Raises:
        RecipeError: The text is not a duration, or is ambiguous ("1:30").
    """
    if isinstance(text, int | float) and not isinstance(text, bool) and 0 <= text < math.inf:
        return float(text)
    words = _lowered(text)
    if re.fullmatch(_NUMBER, words):
        return float(words)
    _refuse_clock(words, SECONDS_SYNTAX)
    parts = re.findall(rf"({_NUMBER})\s*([a-z]+)\s*", words)
    sizes = [_SECONDS.get(unit, 0) for _, unit in parts]
    whole = re.fullmatch(rf"(?:{_NUMBER}\s*[a-z]+\s*)+", words)
    if not whole or 0 in sizes or sizes != sorted(set(sizes), reverse=True):
        raise RecipeError(f"{text!r} is not a duration", f"write {SECONDS_SYNTAX}")
    return float(sum(Fraction(amount) * size for (amount, _), size in zip(parts, sizes, strict=True)))


def format_seconds(seconds: float) -> str:
    """Format seconds for display in the two largest units: "1 h 30 min", "42 s", "0.5 s"."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if seconds < 9.95:
        return f"{seconds:.1f} s".replace(".0 ", " ")
    if round(seconds) < 3600:
        return _two_units(round(seconds), 60, ("min", "s"))
    if round(seconds / 60) < 24 * 60:
        return _two_units(round(seconds / 60), 60, ("h", "min"))
    return _two_units(round(seconds / 3600), 24, ("d", "h"))


def exact_seconds(seconds: float) -> str:
    """Format seconds so that `parse_seconds` returns exactly the same number: "1h30min", "0.25s"."""
    if seconds != int(seconds):
        return f"{_plain(seconds)}s"
    words, rest = "", int(seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        amount, rest = divmod(rest, size)
        words += f"{amount}{unit}" if amount else ""
    return words or "0s"


def parse_share(text: str | float) -> float:
    """Parse a fraction between 0 and 1; "2%", "0.02" and 0.02 are equal.

    Raises:
        RecipeError: The text is not a number between 0 and 1.
    """
    share = math.nan
    if isinstance(text, int | float) and not isinstance(text, bool):
        share = float(text)
    elif match := re.fullmatch(rf"({_NUMBER}(?:e-?[0-9]+)?)\s*(%?)", _lowered(text)):
        share = float(Decimal(match[1]) / (100 if match[2] else 1))
    if not 0 <= share <= 1:
        raise RecipeError(f"{text!r} is not a share", f"write {SHARE_SYNTAX}")
    return share


def parse_every(text: str | int) -> Every:
    """Parse an interval.

    Args:
        text: "500 steps", "epoch", "2 epochs", "0.5 epochs", "10min"; a bare number is a number of steps.

    Raises:
        RecipeError: The text is not an interval, or the interval is not positive.
    """
    every: Every | None = None
    words = _lowered(text).removeprefix("every ")
    match = re.fullmatch(rf"({_NUMBER})?\s*(steps?|epochs?)?", words)
    if match and match[0]:
        amount = float(match[1] or 1)
        if (match[2] or "step").startswith("epoch"):
            every = Every(epochs=amount) if 0 < amount < math.inf else None
        elif amount >= 1 and amount.is_integer():
            every = Every(steps=int(amount))
        elif amount and not match[2]:
            raise RecipeError(f"{text!r} is not a whole number of steps", f"write {EVERY_SYNTAX}; or {words} epochs")
    elif re.fullmatch(rf"(?:{_NUMBER}\s*(?:{'|'.join(_SECONDS)})\s*)+", words):
        seconds = parse_seconds(words)
        every = Every(seconds=seconds) if seconds else None
    _refuse_clock(words, EVERY_SYNTAX)
    if every is None:
        raise RecipeError(f"{text!r} is not an interval", f"write {EVERY_SYNTAX}")
    return every


def _lowered(text: object) -> str:
    """Normalize text for matching; anything but text and numbers becomes "", which no pattern matches."""
    is_amount = isinstance(text, str | int | float) and not isinstance(text, bool)
    return str(text).strip().lower() if is_amount else ""


def _refuse_clock(words: str, allowed: str) -> None:
    """Refuse "1:30": YAML 1.1 reads it as 90, a clock as 1 h 30 min."""
    if clock := re.fullmatch(r"([0-9]+):([0-9]{1,2})", words):
        hours, minutes = f"{clock[1]}h{clock[2]}m", f"{clock[1]}m{clock[2]}s"
        raise RecipeError(f"'{words}' may be {hours} or {minutes}", f"write {allowed}")


def _plain(amount: float) -> str:
    """Format a number without a trailing ".0" and without an exponent."""
    return str(int(amount)) if float(amount).is_integer() else f"{Decimal(repr(float(amount))):f}"


def _two_units(count: int, size: int, names: tuple[str, str]) -> str:
    major, minor = divmod(count, size)
    return " ".join(f"{amount} {name}" for amount, name in zip((major, minor), names, strict=True) if amount)
