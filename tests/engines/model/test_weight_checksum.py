"""The checksum that goes with every version: what it sees, and that nothing but the bytes decides it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from rlmux.engines.model import weight_checksum
from rlmux.engines.model.weight_checksum import WHOLE, Sample, weights_checksum

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool]
LENGTHS = [0, 1, 3, 4096, 8192, 8193, 70_001, 300_000]


def drawn(length: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed)).mul(9).to(dtype)


def by_hand(tensors: Mapping[str, Tensor]) -> str:
    """The definition, in whole numbers of Python."""
    stream = hashlib.shake_128(b"rlmux weights").digest(2 * 4096 * 8)
    numbers = [int.from_bytes(stream[at : at + 8], "little") | 1 for at in range(0, len(stream), 8)]
    digest, small, large = hashlib.blake2b(digest_size=16), b"", []
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        data += bytes(-len(data) % 8)
        if len(data) < 16 * 4096 * 8:
            small += data
        else:
            large.append(data)
    for data in [*large, small]:
        lower, upper = [], []
        for begin in range(0, len(data), 4096 * 8):
            row = data[begin : begin + 4096 * 8]
            words = [int.from_bytes(row[at : at + 8], "little", signed=True) for at in range(0, len(row), 8)]
            lower.append(sum(word * number for word, number in zip(words, numbers, strict=False)))
            upper.append(sum((word >> 32) * number for word, number in zip(words, numbers[4096:], strict=False)))
        digest.update(b"".join((each % 2**64).to_bytes(8, "little") for each in [*lower, *upper]))
    return digest.hexdigest()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_it_is_what_whole_numbers_say(length: int, dtype: torch.dtype) -> None:
    tensor = drawn(length, dtype)
    assert weights_checksum({"w": tensor}) == by_hand({"w": tensor})


def test_small_and_large_tensors_are_what_whole_numbers_say() -> None:
    sizes = {"e": 140_000, "a": 3, "norm": 64, "d": 131_072, "b": 0, "c": 9_001}
    tensors = {name: drawn(size, torch.bfloat16 if name == "c" else torch.float32) for name, size in sizes.items()}
    assert weights_checksum(tensors) == by_hand(tensors)


def test_neither_threads_nor_the_rows_at_once_nor_the_kind_of_product_change_it(monkeypatch):
    tensors = {"a": drawn(300_000), "b": drawn(70_001, torch.bfloat16)}
    found = {weights_checksum(tensors)}
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        found.add(weights_checksum(tensors))
    finally:
        torch.set_num_threads(num_threads)
    monkeypatch.setattr(weight_checksum, "_ROWS_AT_ONCE", {"cpu": 3})
    found.add(weights_checksum(tensors))
    monkeypatch.setattr(weight_checksum, "_products", lambda rows, numbers: (rows * numbers).sum(1))
    found.add(weights_checksum(tensors))
    assert len(found) == 1, "a GPU multiplies and adds, a core has a product of matrices"


def test_every_bit_of_a_word_is_seen_wherever_it_is():
    words = torch.randint(-(2**62), 2**62, (9_000,), generator=torch.Generator().manual_seed(1))
    found = {weights_checksum({"w": words})}
    for place in (0, 1, 4095, 4096, 8999):
        for bit in range(64):
            changed = words.clone()
            changed[place] ^= -(2**63) if bit == 63 else 1 << bit
            found.add(weights_checksum({"w": changed}))
    assert len(found) == 1 + 5 * 64


@pytest.mark.parametrize("stride", [1, 2], ids=["any", "every second"])
def test_signs_that_change_in_pairs_are_seen(stride: int):
    """The sign of every second float32 is the highest bit of a word: a sum that wraps keeps its parity alone."""
    weights, draw = drawn(20_000), random.Random(2)
    found = {weights_checksum({"w": weights})}
    for _ in range(200):
        changed = weights.clone()
        for place in draw.sample(range(1, 4000, stride), 2):
            changed[place] *= -1
        found.add(weights_checksum({"w": changed}))
    all_changed = weights.clone()
    all_changed[1::2] *= -1
    found.add(weights_checksum({"w": all_changed}))
    assert len(found) == 202


def test_words_and_rows_that_change_places_are_seen():
    weights = drawn(40_000)
    rows = weights[: 4 * 8192].view(4, 8192)
    moved = {
        "two words": torch.cat([weights[2:4], weights[:2], weights[4:]]),
        "two halves of a word": torch.cat([weights[1:2], weights[:1], weights[2:]]),
        "two rows": torch.cat([rows[[1, 0, 2, 3]].flatten(), weights[4 * 8192 :]]),
        "all by one": weights.roll(1),
        "backwards": weights.flip(0),
    }
    found = {name: weights_checksum({"w": each}) for name, each in moved.items()}
    assert len({*found.values(), weights_checksum({"w": weights})}) == 6


def test_it_sees_names_types_shapes_and_lengths_but_not_order():
    one, two = torch.ones(4), torch.zeros(4)
    same = {weights_checksum({"a": one, "b": two}), weights_checksum({"b": two, "a": one})}
    others = {
        weights_checksum({"a": two, "b": one}),
        weights_checksum({"a": one, "b": -two}),
        weights_checksum({"a": one.view(2, 2), "b": two}),
        weights_checksum({"a": one, "c": two}),
        weights_checksum({"a": one.view(torch.int32), "b": two}),
        weights_checksum({"a": one, "b": torch.zeros(5)}),
        weights_checksum({"a": one}),
        weights_checksum({}),
    }
    assert len(same) == 1
    assert len(same | others) == 9


def test_views_are_summed_as_copies_of_them_are():
    whole = drawn(5_000)
    for view in (whole[1:], whole[3:4_000], whole.view(50, 100).t(), whole[::3], whole.to(torch.bfloat16)[5:9]):
        assert weights_checksum({"w": view}) == weights_checksum({"w": view.clone()})


LAYERS = {f"layer.{number:02}": drawn(10, seed=number) for number in range(40)}


def test_small_weights_and_the_first_version_are_covered_whole() -> None:
    large = {name: torch.empty(17_000_000, device="meta") for name in "ab"}
    assert Sample.of_version(7, LAYERS) == Sample.of_version(1, large) == WHOLE
    assert Sample.of_version(7, large) == Sample(every=2, first=1)


def test_a_large_models_sample_names_itself_and_covers_each_tensor_once_in_16_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_checksum, "_SAMPLED_ABOVE_BYTES", 100)
    seen = []
    for version in range(2, 18):
        sample = Sample.of_version(version, LAYERS)
        before = weights_checksum(LAYERS, sample)
        assert before.startswith(f"16.{version % 16}-")
        assert Sample.of_checksum(before) == sample
        seen += [name for name in LAYERS if weights_checksum(LAYERS | {name: -LAYERS[name]}, sample) != before]
    assert sorted(seen) == sorted(LAYERS)


def test_a_sample_covers_names_and_shapes_of_all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_checksum, "_SAMPLED_ABOVE_BYTES", 100)
    sample = Sample.of_version(3, LAYERS)
    other_shape = LAYERS | {"layer.00": LAYERS["layer.00"].view(2, 5)}
    fewer = {name: tensor for name, tensor in LAYERS.items() if name != "layer.00"}
    assert len({weights_checksum(each, sample) for each in (LAYERS, other_shape, fewer)}) == 3
