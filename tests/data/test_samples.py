"""A user's data set: items by name or in order, equal on every rank, and one clear error for each that does not fit."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from pipefit.data.samples import InputField, UserSamples
from pipefit.errors import DataError
from pipefit.model.user import seeded_generators

FIELDS = {"images": InputField((2, 3), "float"), "labels": InputField((), "int64")}
ROWS = np.array([4, 1, 4])


class Items:
    """Ten rows; `make` gives an item from its number."""

    def __init__(self, make, count: int = 10) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):
        return self.make(index)


def named(index: int):
    return {"labels": index, "images": torch.full((2, 3), float(index)), "path": "not an input"}


def samples(dataset, *, batch: int = 2, held_out: float = 0.0) -> UserSamples:
    return UserSamples(dataset, FIELDS, where="rows.py:rows", batch=batch, held_out=held_out)


def refused(dataset, **options) -> str:
    with pytest.raises(DataError) as found:
        samples(dataset, **options)
    return found.value.full_text()


@pytest.mark.parametrize("make", [named, lambda i: (np.full((2, 3), i, np.float32), np.int64(i))])
def test_items_come_by_name_or_in_order(make):
    taken = samples(Items(make)).take_rows(ROWS, ["images", "labels"], 0, 3)
    assert taken["labels"].tolist() == [4, 1, 4]
    assert taken["labels"].dtype == np.int64
    assert taken["images"][:, 1, 2].tolist() == [4.0, 1.0, 4.0]
    assert samples(Items(make)).digest == samples(lambda: Items(make)).digest
    assert samples(Items(make)).digest != samples(Items(make, 9)).digest


def test_a_device_without_rows_or_wishes_reads_nothing():
    one = samples(Items(named))
    one._dataset.make = None
    assert one.take_rows(np.array([], dtype=np.int64), ["images"], 0, 0)["images"].shape == (0, 2, 3)
    assert one.take_rows(ROWS, [], 0, 0) == {}


def test_tensors_of_any_floating_type_are_rows_also_with_gradients():
    values = torch.rand(2, 3)
    kept = {torch.float16: values.half(), torch.bfloat16: values.bfloat16(), torch.float32: values.requires_grad_()}
    for tensor in kept.values():
        found = samples(Items(lambda index, tensor=tensor: (tensor, index))).take_rows(ROWS, ["images"], 0, 0)["images"]
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found[0], tensor.detach().float().numpy())


def noisy(index: int):
    return torch.randn(2, 3) + random.random() + np.random.rand(), index


def test_what_items_draw_is_keyed_by_seed_step_and_row():
    one, two = samples(Items(noisy)), samples(Items(noisy))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = one.take_rows(ROWS, ["images"], 7, 3)["images"]
    assert torch.equal(state, torch.get_rng_state())
    np.testing.assert_array_equal(first, two.take_rows(ROWS, ["images"], 7, 3)["images"])
    np.testing.assert_array_equal(first[0], first[2])
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first, one.take_rows(ROWS, ["images"], 7, 4)["images"])
    assert not np.array_equal(first, one.take_rows(ROWS, ["images"], 8, 3)["images"])


def test_generators_are_as_they_were_after_an_error():
    before = random.getstate()
    with pytest.raises(OSError, match="gone"), seeded_generators(1, 2):
        random.random()
        raise OSError("gone")
    assert random.getstate() == before


SECRET = np.random.default_rng(3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda i: {"images": torch.zeros(2, 3)}, ["rows.py:rows[0]", "no labels among images", "images, labels"]),
        (lambda i: (torch.zeros(2, 3),), ["rows.py:rows[0]", "1 values", "in this order"]),
        (lambda i: torch.zeros(2, 3), ["rows.py:rows[0]", "a Tensor"]),
        (lambda i: (torch.zeros(3, 2), i), ["rows.py:rows[0], images", "float32 (3, 2)", "float (2, 3)"]),
        (lambda i: (torch.zeros(2, 3), 0.5), ["rows.py:rows[0], labels", "float64 ()", "int64 ()"]),
        (lambda i: ([[1.0], [2.0, 3.0]], i), ["rows.py:rows[0], images", "a list: ", "inhomogeneous", "float (2, 3)"]),
        (lambda i: (torch.zeros(2, 3), [][i]), ["failed to give a row", "rows.py:rows[0]", "IndexError"]),
        (lambda i: (SECRET.normal(size=(2, 3)), i), ["differs when it is read", "rows.py:rows[0], images", "seeded"]),
    ],
)
def test_an_item_that_does_not_fit_is_named(make, words):
    text = refused(Items(make))
    assert all(word in text for word in words), text


def test_what_is_no_data_set_is_refused():
    assert "not a data set with rows by index" in refused(5)
    assert "an object with a length" in refused(lambda: iter([1, 2]))
    text = refused(lambda: [][1])
    assert "could not be made" in text and "rows.py:rows" in text and "IndexError" in text


def test_a_class_of_data_sets_makes_one():
    class Own(Items):
        def __init__(self) -> None:
            super().__init__(named, 5)

    assert samples(Own).rows.count == 5


def test_rows_held_out_fill_batches():
    assert samples(Items(named, 100), batch=4, held_out=0.1).rows.held_out == 8
    assert samples(Items(named, 100), batch=4, held_out=0.01).rows.held_out == 4
    assert samples(Items(named, 5), batch=4, held_out=0.01).rows.held_out == 0
    assert samples(Items(named, 20), batch=4, held_out=6).rows.held_out == 6
    assert "do not fill one batch" in refused(Items(named), batch=4, held_out=3)
    text = refused(Items(named, 10), batch=8, held_out=8)
    assert "too small for one batch" in text
    assert "10 rows, 8 of them held out" in text
    assert "--held-out" in refused(Items(named), held_out=1.5)
