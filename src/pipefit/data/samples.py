"""The rows of a user's data set: items by number, checked against the inputs of the model.

A data set is any object with a length and `[index]`, like a map-style torch.utils.data.Dataset. Every rank reads the
rows that it works on, so equal numbers must give equal items in every process. Random draws of an item (augmentation)
are keyed by (seed, step, row): torch's, numpy's and Python's generators are seeded before every item. No torch at
import.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipefit.data.rows import RowSplit, check_held_out
from pipefit.errors import DataError
from pipefit.model.graph import TensorSpec
from pipefit.model.user import seeded_generators

HELD_OUT = -1
"""Used instead of a step number in evaluations, so that an item draws the same random numbers every time."""


@dataclass(frozen=True, slots=True)
class InputField:
    """Shape and dtype of one input, for one row."""

    shape: tuple[int, ...]
    dtype: str
    "`float` for any floating type, else `int64`, `int32` or `bool`."

    @property
    def numpy_dtype(self) -> Any:
        return np.float32 if self.dtype == "float" else np.dtype(self.dtype)


def field_of(tensor: TensorSpec) -> InputField:
    """Return the field of a graph input, whose first dimension is the rows."""
    dtype = "float" if tensor.dtype in ("compute", "float32") else tensor.dtype
    return InputField(tuple(int(size) for size in tensor.shape[1:]), dtype)


class UserSamples:
    """The rows of a data set. `fields` are the model's inputs in their order, by the user's names."""

    def __init__(
        self, dataset: Any, fields: Mapping[str, InputField], *, where: str, batch: int, held_out: float
    ) -> None:
        """Raises DataError if `dataset` is not a data set, has too few rows, or gives items that do not fit."""
        self._dataset, self.fields, self._where = _make_dataset(dataset, where), dict(fields), where
        self.rows = _split_rows(len(self._dataset), batch, held_out, where)
        self.digest = self._compute_digest()

    def take_rows(
        self, rows: NDArray[np.int64], names: Collection[str], seed: int, step: int
    ) -> dict[str, NDArray[Any]]:
        """Return the named inputs of these rows, stacked along a first dimension of rows.

        Raises DataError for an item that does not fit.
        """
        items = [self._checked_item(int(row), seed, step) for row in rows] if names else []
        return {
            name: np.stack([item[name] for item in items])
            if items
            else np.zeros((0, *self.fields[name].shape), self.fields[name].numpy_dtype)
            for name in names
        }

    def _checked_item(self, row: int, seed: int, step: int) -> dict[str, NDArray[Any]]:
        """Read one row and check it."""
        try:
            with seeded_generators(seed, step, row):
                item = self._dataset[row]
        except Exception as error:
            raise _user_code_error("The data set failed to give a row.", f"{self._where}[{row}]", error) from error
        return {name: self._fit_value(name, value, row) for name, value in self._values_by_name(item, row).items()}

    def _values_by_name(self, item: Any, row: int) -> dict[str, Any]:
        names = list(self.fields)
        if isinstance(item, Mapping):
            missing = [name for name in names if name not in item]
            if not missing:
                return {name: item[name] for name in names}
            seen = f"no {', '.join(missing)} among {', '.join(map(str, item))}"
        elif isinstance(item, (tuple, list)):
            if len(item) == len(names):
                return dict(zip(names, item, strict=True))
            seen = f"{len(item)} values"
        else:
            seen = f"a {type(item).__name__}"
        raise DataError(
            "An item of the data set does not have the inputs of the model.",
            where=f"{self._where}[{row}]",
            seen=seen,
            allowed=f"a mapping with {', '.join(names)}, or a tuple of them in this order",
        )

    def _fit_value(self, name: str, value: Any, row: int) -> NDArray[Any]:
        field = self.fields[name]
        try:
            array = _to_numpy(value)
        except (TypeError, ValueError) as error:  # lists of unequal length, types unknown to numpy
            seen = f"a {type(value).__name__}: {str(error).splitlines()[0]}"
        else:
            able = array.dtype.kind in ("fiub" if field.dtype == "float" else "b" if field.dtype == "bool" else "iub")
            if array.shape == field.shape and able:
                return array.astype(field.numpy_dtype, copy=False) if array.dtype != np.float64 else array
            seen = f"{array.dtype} {array.shape}"
        raise DataError(
            "An item of the data set does not fit the model's input.",
            where=f"{self._where}[{row}], {name}",
            seen=seen,
            allowed=f"{field.dtype} {field.shape}, as in the example (without the dimension of rows)",
        )

    def _compute_digest(self) -> str:
        """Return a hash of the length and of up to three rows: equal data sets have equal digests.

        Each of these rows is read twice, to check that reading is deterministic.
        """
        state = hashlib.sha256(str(len(self._dataset)).encode())
        for row in sorted({0, self.rows.count // 2, self.rows.count - 1}):
            first, second = (self._checked_item(row, 0, HELD_OUT) for _ in range(2))
            for name, value in first.items():
                if not np.array_equal(value, second[name], equal_nan=value.dtype.kind == "f"):
                    raise DataError(
                        "A row of the data set differs when it is read again, so ranks would disagree on it.",
                        where=f"{self._where}[{row}], {name}",
                        allowed="items that are a function of their number, and of torch's, numpy's or Python's own "
                        "generator, which is set before every item",
                        next_step="draw from these generators, or from one that is seeded by the number of the item",
                    )
                state.update(np.ascontiguousarray(value).tobytes())
        return state.hexdigest()[:24]


def _to_numpy(value: Any) -> NDArray[Any]:
    """Convert a value to numpy: tensors of any device, with or without gradients; bfloat16 becomes float32."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    return np.asarray(value)


def _make_dataset(dataset: Any, where: str) -> Any:
    """Return the data set; a function or class is called to create it."""
    if isinstance(dataset, type) or (callable(dataset) and not hasattr(dataset, "__getitem__")):
        try:
            dataset = dataset()
        except Exception as error:
            raise _user_code_error("The data set could not be made.", where, error) from error
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return dataset
    raise DataError(
        "This is not a data set with rows by index.",
        where=where,
        seen=type(dataset).__name__,
        allowed="an object with a length and items by number (a map-style torch.utils.data.Dataset), or a function "
        "without arguments that makes one",
    )


def _user_code_error(what: str, where: str, error: Exception) -> DataError:
    """Build the error for an exception of the user's code."""
    text = str(error).strip().splitlines()
    return DataError(what, where=where, seen=f"{type(error).__name__}: {text[0] if text else ''}")


def _split_rows(count: int, batch: int, held_out: float, where: str) -> RowSplit:
    """Split rows into training and evaluation. Evaluation rows fill whole batches; a fraction is rounded to whole
    batches."""
    check_held_out(held_out, "--held-out")
    held_out_count = int(held_out)
    if 0 < held_out < 1:
        held_out_count = max(1, int(count * held_out) // batch) * batch
        held_out_count = held_out_count if count >= held_out_count + batch else 0
    if 0 < held_out_count < batch:
        raise DataError(
            "The rows that are held out do not fill one batch.",
            where="--held-out",
            seen=held_out_count,
            allowed=f"0, a fraction, or at least {batch}, the rows of one step",
        )
    if count - held_out_count < batch:
        raise DataError(
            "The data set is too small for one batch.",
            where=where,
            seen=f"{count} rows, {held_out_count} of them held out",
            allowed=f"at least {batch} rows to train on, those of one step",
            next_step="plan a smaller batch, give more data, or hold out fewer rows",
        )
    return RowSplit(count=count, sequence=1, last_labels=1, held_out=held_out_count)
