"""Answers kept by what they were worked out from: of all the sizes that a question names, most answers read few.

An operator without attention does not care how many tokens came before, a norm not how they are split; asked for every
slice of every cutting, such an operator is worked out once for each number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class TrackedSymbols(Mapping[str, int]):
    """Sizes by symbol, and which of them were asked for."""

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
    """The answers to one question. Two mappings that agree in all that was read get the same answer: whoever works it
    out reads the same again, as long as it looks at nothing else that changes."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], dict[tuple[int | None, ...], Answer]] = {}
        "Symbols that were read -> their values -> the answer."

    def get_or_compute(self, symbols: Mapping[str, int], work_out: Callable[[Mapping[str, int]], Answer]) -> Answer:
        """What `work_out` says of these symbols, or said when it read the same values."""
        for names, answers in self._known.items():
            values = tuple(map(symbols.get, names))
            if values in answers:
                return answers[values]
        reading = TrackedSymbols(symbols)
        answer = work_out(reading)
        names = tuple(reading.read)
        self._known.setdefault(names, {})[tuple(map(symbols.get, names))] = answer
        return answer
