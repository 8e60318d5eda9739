"""How much to keep: a fraction, a number of tokens, or bytes, as users write it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from longspan.registry import Refused

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True)
class Amount:
    """A budget before it meets a prompt. Exactly one unit: ``fraction``, ``tokens`` or ``bytes``."""

    value: float
    unit: str

    def tokens(self, length: int, bytes_per_token: float) -> int:
        """Entries a KV head may keep of `length`: floor(fraction * length), the tokens, or what the bytes hold.

        Args:
            length: tokens seen in this row.
            bytes_per_token: bytes that one entry in every head of every layer takes, over all rows.
        """
        if self.unit == "fraction":
            # A hair above, so that 0.29 * 100 keeps 29 and not 28 for want of the last bit.
            return min(length, int(self.value * length + 1e-9))
        if self.unit == "tokens":
            return min(length, int(self.value))
        return min(length, int(self.value // bytes_per_token))


def parse_amount(value: float | int | str) -> Amount:
    """Read ``0.2``, ``"512 tokens"`` or ``"64 MiB"``.

    Raises:
        Refused: a fraction outside (0, 1], an amount that isn't positive, or an unknown unit.
    """
    expected = 'expected a fraction such as 0.2, tokens such as "512 tokens", or bytes such as "64 MiB"'
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if 0 < value <= 1:
            return Amount(float(value), "fraction")
        near = f'"{int(value)} tokens"' if 1 < value < 2**31 else "0.2"
        raise Refused(f"budget={value!r}: {expected}; a fraction lies in (0, 1], did you mean {near}?")
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
    if match is None:
        raise Refused(f"budget={value!r}: {expected}.")
    number, unit = float(match[1]), match[2].lower()
    if not 0 < number < 2**63:
        raise Refused(f"budget={value!r}: the amount must be positive and no larger than any memory; {expected}.")
    if unit in ("token", "tokens"):
        if number != int(number):
            raise Refused(f'budget={value!r}: tokens come whole; did you mean "{max(1, round(number))} tokens"?')
        return Amount(number, "tokens")
    if unit in _UNITS:
        return Amount(number * _UNITS[unit], "bytes")
    if unit == "":
        return parse_amount(number)
    raise Refused(f"budget={value!r}: unknown unit {match[2]!r}; {expected}.")
