"""A cache of answers keyed by the sizes that their computation read; most answers read few of the available sizes.

An operator other than attention does not depend on the earlier tokens, and a norm not on their split. When costs of
every slice of every cut are requested, such an operator is computed once for each number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class TrackedSymbols(Mapping[str, int]):
    """Sizes by symbol that record which symbols were read."""

    __slots__ = ("read", "symbols")

    def __init__(self, symbols: Mapping[str, int]) -> None:
        self.symbols = symbols
        self.read: dict[str, None] = {}

    def __getitem__(self, symbol: str) -> int:
        self.read[symbol] = None
        return self.symbols[symbol]

    def __iter__(self) -> Iterator[str]:
        self.read |= dict.fromkeys(self.symbols)
        return iter(self.symbols)

    def __len__(self) -> int:
        return len(self.symbols)


class SymbolMemo(Generic[Answer]):
    """Cached answers to one question. Two mappings that agree in all symbols read get the same answer.

    The computation must depend on nothing else that changes.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], dict[tuple[int | None, ...], Answer]] = {}
        "Symbols read -> their values -> the answer."

    def get_or_compute(self, symbols: Mapping[str, int], work_out: Callable[[Mapping[str, int]], Answer]) -> Answer:
        """Return the result of `work_out` for these symbols, cached by the values that it read."""
        for names, answers in self._known.items():
            values = tuple(map(symbols.get, names))
            if values in answers:
                return answers[values]
        reading = TrackedSymbols(symbols)
        answer = work_out(reading)
        names = tuple(reading.read)
        self._known.setdefault(names, {})[tuple(map(symbols.get, names))] = answer
        return answer
