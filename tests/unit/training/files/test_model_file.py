"""The model's file: header, dtypes, parts, and damage."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.files.model_file import (
    VECTOR_DTYPES,
    BadModelFile,
    TensorFile,
    TensorInfo,
    converted,
    file_pieces,
    model_pieces,
)
from p2pnode.training.trainer_link.interface import ModelDescription, TensorSource


def description(*tensors: TensorSource, fixed: str = "", **local: bytes) -> ModelDescription:
    return ModelDescription("", fixed, tensors, local)


def whole(found: Iterable[bytes | bytearray | memoryview]) -> bytes:
    return b"".join(bytes(piece) for piece in found)


def headed(header: bytes) -> bytes:
    """A file with this header, and values of 64 bytes."""
    return len(header).to_bytes(8, "little") + header + bytes(64)


def nothing(_name: str) -> tuple[Vector, ...]:
    return ()


def test_a_file_loads_as_safetensors_whatever_the_order_of_its_tensors(tmp_path: Path) -> None:
    """Narrow types before wide ones, empty tensors and scalars: all load with names, dtypes, shapes and values."""
    state = {
        'a "fläg"': torch.tensor([True, False, True]),
        "half": torch.randn(3).to(torch.bfloat16),
        "a.weight": torch.randn(2, 3),
        "count": torch.tensor(7),
        "none": torch.zeros(0, 4),
        "wide": torch.randn(2, dtype=torch.float64),
    }
    infos = [TensorInfo(name, str(value.dtype)[6:], tuple(value.shape)) for name, value in state.items()]

    def raw(info: TensorInfo) -> list[bytes]:
        value = state[info.name].reshape(-1)
        return [value.view(torch.uint8).numpy().tobytes()] if value.numel() else []

    (tmp_path / "m.safetensors").write_bytes(whole(file_pieces(infos, raw)))
    loaded = load_file(tmp_path / "m.safetensors")

    assert loaded.keys() == state.keys()
    for name, value in state.items():
        assert loaded[name].dtype == value.dtype
        assert torch.equal(loaded[name], value)
    with safe_open(tmp_path / "m.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize("dtype", VECTOR_DTYPES)
def test_values_are_rounded_as_torch_rounds_them(dtype: str) -> None:
    """Ties, overflow, infinities and NaN give torch's bits."""
    values = np.concatenate(
        [
            np.random.default_rng(3).standard_normal(1000, np.float32),
            np.array([0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 1e30, -1e30, 65520.0, np.inf, -np.inf], np.float32),
        ]
    )
    kind = getattr(torch, dtype)

    wanted = torch.from_numpy(values).to(kind).view(torch.uint8).numpy().tobytes()

    assert bytes(converted(values, dtype)) == wanted
    with_nan = torch.frombuffer(bytearray(converted(np.array([1.0, np.nan], np.float32), dtype)), dtype=kind)
    assert torch.isnan(with_nan).tolist() == [False, True]


def test_a_dtype_that_the_vector_has_not_is_refused() -> None:
    """Rounded to eight bits the values would be others."""
    with pytest.raises(BadModelFile, match="float8_e5m2"):
        converted(np.zeros(1, np.float32), "float8_e5m2")


def test_a_tensor_file_is_read_in_pieces_and_has_the_digest_of_its_content(tmp_path: Path) -> None:
    """What safetensors wrote is read back; another value, dtype or name gives another digest."""
    state = {"b": torch.arange(6, dtype=torch.float32).reshape(2, 3), "a": torch.tensor(5)}

    def opened(tensors: dict[str, torch.Tensor]) -> TensorFile:
        save_file(tensors, tmp_path / "t.safetensors")
        return TensorFile.of(io.BytesIO((tmp_path / "t.safetensors").read_bytes()))

    file = opened(state)
    assert whole(file.read("a")) == (5).to_bytes(8, "little")
    assert np.concatenate(list(file.values("b"))).tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(BadModelFile, match="int64, not float32"):
        list(file.values("a"))
    with pytest.raises(BadModelFile, match="the tensor c is missing"):
        list(file.read("c"))

    digests = {
        opened(changed).digest()
        for changed in (
            state,
            {**state, "a": torch.tensor(6)},
            {**state, "a": torch.tensor(5, dtype=torch.int32)},
            {"b": state["b"], "c": state["a"]},
            {**state, "b": state["b"].reshape(3, 2)},
        )
    }
    assert len(digests) == 5
    assert file.digest() == opened(state).digest()


@pytest.mark.parametrize(
    ("damaged", "reason"),
    [
        (b"", "no header"),
        (b"\xff" * 64, "no header"),
        (b"\x10" + bytes(7) + b"x" * 16, "cannot be read"),
        ((2).to_bytes(8, "little") + b"[]", "cannot be read"),
        (
            headed(b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}'),
            "size of its tensor a",
        ),
        (headed(b'{"a":{"dtype":"F32","shape":[],"data_offsets":[-4,0]}}'), "cannot be read"),
        (headed(b'{"a":{"dtype":"F3","shape":[],"data_offsets":[0,4]}}'), "cannot be read"),
        (headed(b'{"a":{"dtype":"F32","shape":[20],"data_offsets":[0,80]}}'), "ends before its tensor a"),
        ((10**18).to_bytes(8, "little") + bytes(64), "no header"),
    ],
)
def test_a_damaged_file_is_refused(damaged: bytes, reason: str) -> None:
    """The reason names what is wrong; no other exception escapes."""
    with pytest.raises(BadModelFile, match=reason):
        TensorFile.of(io.BytesIO(damaged))


def test_a_file_that_becomes_shorter_is_noticed_when_it_is_read() -> None:
    """Its header was whole, and so were its values then."""
    file = io.BytesIO(whole(file_pieces([TensorInfo("a", "float32", (4,))], lambda _: [bytes(16)])))
    tensors = TensorFile.of(file)
    file.truncate(file.seek(0, io.SEEK_END) - 1)

    with pytest.raises(BadModelFile, match="ends within the tensor a"):
        list(tensors.read("a"))


def test_a_model_is_joined_from_vector_fixed_and_local_tensors(tmp_path: Path) -> None:
    """Each entry has its source's values in its own dtype; aliases repeat them."""
    save_file({"frozen": torch.full((2,), 3.0, dtype=torch.float16)}, tmp_path / "fixed.safetensors")
    fixed = TensorFile.of(io.BytesIO((tmp_path / "fixed.safetensors").read_bytes()))
    described = description(
        TensorSource("w", "bfloat16", (2, 2), "vector", "w"),
        TensorSource("tied", "float32", (2, 2), "vector", "w"),
        TensorSource("base", "float16", (2,), "fixed", "frozen"),
        TensorSource("n", "int64", (), "local", "n"),
        fixed="digest",
        n=(9).to_bytes(8, "little"),
    )
    values = np.array([1, 2, 3, 4 + 2**-9], np.float32)

    raw = whole(model_pieces(described, lambda name: [values[:3], values[3:]] if name == "w" else [], fixed))
    (tmp_path / "m.safetensors").write_bytes(raw)
    loaded = load_file(tmp_path / "m.safetensors")

    assert loaded["w"].dtype == torch.bfloat16
    assert torch.equal(loaded["w"], torch.from_numpy(values).reshape(2, 2).to(torch.bfloat16))
    assert torch.equal(loaded["tied"], torch.from_numpy(values).reshape(2, 2))
    assert loaded["base"].tolist() == [3, 3]
    assert loaded["n"].item() == 9


def test_a_part_of_another_size_or_a_missing_file_is_refused() -> None:
    """Such a file would load with values of another tensor."""
    short = description(TensorSource("w", "float32", (2,), "vector", "w"))
    frozen = description(TensorSource("w", "float32", (2,), "fixed", "w"), fixed="digest")

    with pytest.raises(BadModelFile, match="has 4 bytes, and 8 are needed"):
        whole(model_pieces(short, lambda _: [np.zeros(1, np.float32)], None))
    with pytest.raises(BadModelFile, match="frozen tensors is missing"):
        whole(model_pieces(frozen, nothing, None))
