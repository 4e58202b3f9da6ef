"""The link of each rank to the others, as a user writes it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_RATES: Final = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Link:
    """Describes what connects a rank, or an emulated node, to the others.

    Args:
        rate_bit_s: bits a second, in each direction
        latency_s: the time of a short message from one to another
    """

    rate_bit_s: float
    latency_s: float = 0.0

    def __str__(self) -> str:
        """Returns what a reader needs to know."""
        return f"{self.rate_bit_s / 1e9:.3g} Gbit/s, {1e6 * self.latency_s:.3g} us a message"

    @property
    def bytes_s(self) -> float:
        """Bytes a second, in each direction."""
        return self.rate_bit_s / 8

    @classmethod
    def parse(cls, text: str, name: str = "network", latency_s: float = 0.0) -> Link:
        """Returns the link that a text such as `1gbit` or `10gbit,1ms` describes.

        Args:
            text: the rate, and maybe the latency
            name: what the option is called
            latency_s: the latency where the text has none
        """
        rate, _, latency = text.partition(",")
        try:
            found = _number(latency, _TIMES) if latency else latency_s
            return cls(_number(rate, _RATES), found)
        except ValueError:
            raise ValueError(
                f"{name} must be a rate and maybe a latency, got {text!r}; try 1gbit or 10gbit,1ms"
            ) from None


def _number(text: str, units: dict[str, float]) -> float:
    match = re.fullmatch(r"([0-9.]+)([a-z]+)", text.strip())
    if match is None or match[2] not in units or not float(match[1]) > 0:
        raise ValueError(text)
    return float(match[1]) * units[match[2]]
