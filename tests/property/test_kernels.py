"""The compiled passes give NumPy's bits: whatever the values, the length, the place in memory and the history."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pnode.training import kernels
from p2pnode.training.dispatch.recordio import chunk
from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.encoding.sparse import encode_largest
from p2pnode.training.encoding.table import CODECS, CodecName
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.outer_rule import Addition, Rule, add_compiled, add_in_blocks
from p2pnode.training.shards.state import ShardState
from tests.harness.builders.codec_kinds import LOSSY
from tests.harness.project.repository import ROOT

SOURCE = ROOT / "training" / "kernels" / "kernels.c"
FIXED = settings(derandomize=True, database=None, deadline=None, max_examples=60)

#: Below, at and above a whole number of blocks and of vector registers, and never below what is worth a call.
COUNTS = st.sampled_from([256, 257, 1023, 1024, 1025, 8192, 9215, 9216, 10_007, 16_384, 33_000])
SCALES = st.sampled_from([1.0, 1e-3, 1e30, 1e-31, 1e-40])
#: Compiled codecs whose size depends on the number of values alone.
SIZED = [name for name in LOSSY if CODECS[name].has_fixed_size and codecs.arithmetic(name).is_compiled]
#: Values sent of each 4,096: one, the usual number, more than have a count of one byte, all.
SHARES = st.sampled_from([1, 100, 128, 500, 4096])
AROUND = 64


def payload_of(records: list[bytes]) -> bytes:
    """The payload of a RecordIO chunk."""
    return b"".join(len(record).to_bytes(4, "little") + record for record in records)


def extension() -> dict[str, Any]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (module,) = project["tool"]["setuptools"]["ext-modules"]
    return dict(module)


def flags() -> list[str]:
    found: list[str] = extension()["extra-compile-args"]
    return found


def built(folder: Path, source: Path = SOURCE, *more: str) -> Path:
    library = folder / "kernels.so"
    command = [
        "cc",
        *flags(),
        *more,
        "-Wall",
        "-Wextra",
        "-Werror",
        "-shared",
        "-fPIC",
        str(source),
        "-o",
        str(library),
        "-lm",
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return library


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of this checkout's source, whatever was installed."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here: nothing but NumPy's arithmetic can be tried")
    return built(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def compiled(library: Path) -> kernels.CompiledKernels:
    return kernels.CompiledKernels(library)


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    before = kernels.COMPILED
    yield
    kernels.COMPILED = before


def both(compiled: kernels.CompiledKernels, made: Any) -> tuple[Any, Any]:
    """What `made()` returns with compiled passes, and with NumPy's."""
    kernels.COMPILED = compiled
    first = made()
    kernels.COMPILED = None
    return first, made()


def values_of(seed: int, count: int, scale: float) -> Vector:
    """Noise with zeros of both signs, a denormal, an outlier and a stretch of nothing in it."""
    random = np.random.default_rng(seed)
    values = (random.standard_normal(count) * scale).astype(np.float32)
    values[random.integers(0, count, 40)] = np.resize(np.float32([0.0, -0.0, 1e-45, 3e4 * scale]), 40)
    values[2000:4100] = -0.0
    return values


def encoded(delta: Vector, residual: Vector, codec: CodecName, share: int) -> codecs.Encoded:
    if codec == "sparse":
        return encode_largest(delta, residual, share)
    return codecs.encode_with_feedback(delta, residual, codec)


def same_bits(first: Vector, second: Vector) -> bool:
    return np.array_equal(first.view(np.uint32), second.view(np.uint32))


@FIXED
@given(st.integers(0, 2**32), COUNTS, SCALES)
def test_values_are_rounded_alike(compiled: kernels.CompiledKernels, seed: int, count: int, scale: float) -> None:
    """bfloat16 of any finite values, at any count, is the same bytes."""
    values = values_of(seed, count, scale)

    first, second = both(compiled, lambda: codecs.encode(values, "bfloat16"))

    assert first == second


@pytest.mark.parametrize("codec", LOSSY)
@FIXED
@given(st.integers(0, 2**32), COUNTS, SCALES, SCALES, SHARES, st.integers(0, 9))
@pytest.mark.promise(18)
def test_deltas_are_encoded_alike(
    compiled: kernels.CompiledKernels,
    codec: CodecName,
    seed: int,
    count: int,
    scale: float,
    owed_scale: float,
    share: int,
    levels: int,
) -> None:
    """The bytes of a delta, and what is left of it for the next one, are the same; also with many equal values."""
    delta, owed = values_of(seed, count, scale), values_of(seed + 1, count, owed_scale)
    if levels:
        delta, owed = np.rint(values_of(seed, count, 1.0) * np.float32(levels)), np.zeros_like(owed)

    def made() -> tuple[bytes, Vector]:
        residual = owed.copy()
        return bytes(encoded(delta, residual, codec, share)), residual

    (data, left), (data_too, left_too) = both(compiled, made)

    assert data == data_too
    assert same_bits(left, left_too)


@pytest.mark.parametrize("codec", LOSSY)
@FIXED
@given(st.integers(0, 2**32), COUNTS, SCALES, st.integers(0, 3))
def test_bytes_are_decoded_alike(
    compiled: kernels.CompiledKernels, codec: CodecName, seed: int, count: int, scale: float, at: int
) -> None:
    """The values are the same, also where the bytes begin at an odd address."""
    data = codecs.encode(values_of(seed, count, scale), codec)
    shifted = memoryview(bytearray(at) + data)[at:]

    def made() -> Vector:
        into = np.full(count, np.nan, dtype=np.float32)
        codecs.decode(shifted, codec, into)
        return into

    assert same_bits(*both(compiled, made))


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf, np.float32(3.4e38)])
@pytest.mark.parametrize("place", [0, 5000, 8199])
def test_a_delta_that_is_not_finite_leaves_nothing_behind(
    compiled: kernels.CompiledKernels, codec: CodecName, bad: float, place: int
) -> None:
    """Its values arrive as not finite, so that the owner refuses them, and the residual is zero again."""
    delta, owed = values_of(1, 8200, 1.0), values_of(2, 8200, 1e-3)
    delta[place] = bad
    owed[place] = bad if np.isfinite(bad) else 0.0  # two finite values whose sum is not

    def made() -> tuple[bool, Vector]:
        residual = owed.copy()
        with np.errstate(all="ignore"):
            data = codecs.encode_with_feedback(delta, residual, codec)
        into = np.empty(delta.size, np.float32)
        codecs.decode(data, codec, into)
        return codecs.all_finite(into), residual

    for is_finite, residual in both(compiled, made):
        assert not is_finite
        assert not residual.any()


@pytest.mark.parametrize("codec", [codec for codec in LOSSY if codec != "int4"])  # int4 rounds its scale down
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_value_leaves_nothing_that_is_not_finite(
    compiled: kernels.CompiledKernels, codec: CodecName, sign: int
) -> None:
    """It is finite, and is rounded to infinity: what would be left of it is not carried into the next delta."""
    delta = np.zeros(8200, np.float32)
    delta[5000] = sign * np.finfo(np.float32).max

    def made() -> Vector:
        residual = np.full(8200, 0.25, np.float32)
        codecs.encode_with_feedback(delta, residual, codec)
        return residual

    for residual in both(compiled, made):
        assert not residual.any()


@FIXED
@given(
    st.integers(0, 2**32),
    COUNTS,
    st.integers(0, 300),
    st.sampled_from([0.0, 0.5, 0.9]),
    st.lists(st.tuples(st.sampled_from([0.25, 0.5, 1.0, 1 / 3]), st.booleans()), min_size=1, max_size=9),
)
@pytest.mark.promise(18)
def test_deltas_are_added_alike(
    compiled: kernels.CompiledKernels,
    seed: int,
    count: int,
    buffers: int,
    outer_momentum: float,
    additions: list[tuple[float, bool]],
) -> None:
    """Value and momentum are the same after any sequence of weights. They are so with and without
    momentum, and with buffers of the model behind the parameters."""
    rule = Rule(0.7, outer_momentum)

    def made() -> ShardState:
        state = ShardState(values_of(seed, count + buffers, 1.0), count)
        for step, (weight, has_momentum) in enumerate(additions):
            delta = values_of(seed + step + 1, count + buffers, 1e-2)
            state.apply(DeltaId(b"a" * 20, 0, step), weight, delta, rule, momentum=has_momentum)
        return state

    first, second = both(compiled, made)

    assert same_bits(first.value, second.value)
    assert first.sum_weight == second.sum_weight
    assert (first.momentum is None) == (second.momentum is None)
    assert first.momentum is None or second.momentum is None or same_bits(first.momentum, second.momentum)
    assert first.sound_version == second.sound_version


@FIXED
@given(
    st.integers(0, 2**32),
    COUNTS,
    st.sampled_from([1e-40, 1.0, 2e15, 1e30, 3e38, np.inf, -np.inf, np.nan, -np.nan]),
    st.sampled_from(["value", "momentum", "delta"]),
    st.sampled_from([(True, True), (True, False), (False, True), (False, False)]),
    st.booleans(),
)
def test_an_addition_sees_the_largest_of_what_it_writes(
    compiled: kernels.CompiledKernels,
    seed: int,
    count: int,
    number: float,
    array: str,
    place_in_round: tuple[bool, bool],
    has_momentum: bool,
) -> None:
    """The result of both is the largest magnitude in value and momentum afterwards, wherever it is; a NaN is larger
    than everything."""
    rule, place = Rule(0.7, 0.5), seed % count

    def made() -> tuple[int, list[Vector]]:
        given = {name: values_of(seed + add, count, 1.0) for add, name in enumerate(("value", "momentum", "delta"))}
        given[array][place] = number
        momentum = given["momentum"] if has_momentum else None
        to = Addition(given["value"], momentum, given["delta"], 0.25, *place_in_round)
        with np.errstate(all="ignore"):
            add = add_in_blocks if kernels.COMPILED is None else partial(add_compiled, kernels.COMPILED)
            largest = add(to, rule)
        return largest, [given["value"], *([given["momentum"]] if has_momentum else [])]

    (largest, written), (largest_too, _) = both(compiled, made)

    assert largest == largest_too
    assert largest == max(int((one.view(np.uint32) & np.uint32(0x7FFFFFFF)).max()) for one in written)


@FIXED
@given(st.integers(0, 2**32), COUNTS, st.sampled_from([1e17, 0.999e18, 1.01e18, np.inf, np.nan]), st.booleans())
def test_both_find_the_same_values_out_of_range(
    compiled: kernels.CompiledKernels, seed: int, count: int, number: float, is_negative: bool
) -> None:
    """One bfloat16 value at any place, of either sign, is found by both or by none."""
    values = values_of(seed, count, 1.0)
    values[seed % count] = -number if is_negative else number
    data = (values.view(np.uint32) >> 16).astype("<u2").tobytes()

    first, second = both(compiled, lambda: codecs.arithmetic("bfloat16").is_within(data, count, 1e18))

    assert first == second == (number <= 1e18)


@pytest.mark.parametrize("codec", SIZED)
@pytest.mark.parametrize("count", [8192, 9216 + 3])
def test_nothing_is_written_beside_its_place(compiled: kernels.CompiledKernels, codec: CodecName, count: int) -> None:
    """The bytes before and behind what is written stay as they were."""
    size = CODECS[codec].size_bytes(count)
    data = np.full(size + 2 * AROUND, 0xA5, np.uint8)
    residual, values = (np.full(count + 2 * AROUND, 7.0, np.float32) for _ in range(2))
    inner = slice(AROUND, AROUND + count)
    residual[inner] = 0.0

    compiled.encode_with_feedback(values_of(3, count, 1.0), residual[inner], codec, data[AROUND : AROUND + size])
    compiled.decode(data[AROUND : AROUND + size], codec, values[inner])

    assert (data[:AROUND] == 0xA5).all()
    assert (data[AROUND + size :] == 0xA5).all()
    for array in (residual, values):
        assert (array[:AROUND] == 7.0).all()
        assert (array[AROUND + count :] == 7.0).all()
        assert (array[inner] != 7.0).any()


def test_what_cannot_be_written_is_not_written(compiled: kernels.CompiledKernels) -> None:
    """An array that is read-only for NumPy is so for the compiled passes too."""
    values = values_of(4, 8192, 1.0)
    values.flags.writeable = False

    with pytest.raises(TypeError, match="not writable"):
        compiled.add(values, values_of(5, 8192, 1.0), 1.0, 0.7)


@FIXED
@given(st.integers(0, 2**32), COUNTS, SHARES, st.sampled_from([1.0, 1e-31]))
def test_no_sparse_byte_is_written_beside_its_place(
    compiled: kernels.CompiledKernels, seed: int, count: int, share: int, scale: float
) -> None:
    """The buffer for the most bytes is enough, and what is around it and around the residual stays as it was."""
    size = kernels.sparse_bytes(count, share)
    data = np.full(size + 2 * AROUND, 0xA5, np.uint8)
    residual = np.full(count + 2 * AROUND, 7.0, np.float32)
    inner = slice(AROUND, AROUND + count)
    residual[inner] = 0.0

    delta = values_of(seed, count, scale)
    written, is_finite = compiled.encode_sparse_with_feedback(
        delta, residual[inner], 0.95, data[AROUND : AROUND + size], share
    )

    assert is_finite
    assert 0 < written <= size
    assert (data[:AROUND] == 0xA5).all()
    assert (data[AROUND + written :] == 0xA5).all()
    assert (residual[:AROUND] == 7.0).all()
    assert (residual[AROUND + count :] == 7.0).all()


@settings(FIXED, max_examples=120)
@given(st.integers(0, 2**32), COUNTS, SHARES, st.integers(1, 8), st.sampled_from(["bits", "cut", "more", "noise"]))
def test_both_refuse_the_same_bytes(
    compiled: kernels.CompiledKernels, seed: int, count: int, share: int, faults: int, kind: str
) -> None:
    """Damaged sparse encodings are refused for the same reason, or decoded to the same bits. No byte beside the target
    is written, and none of the target when the encoding is refused."""
    random = np.random.default_rng(seed)
    values = values_of(seed, count, 1.0)
    data = bytearray(encode_largest(values, np.zeros_like(values), share))
    if kind == "bits":
        for place in random.integers(0, len(data), faults):
            data[place] ^= 1 << int(random.integers(0, 8))
    elif kind == "cut":
        del data[int(random.integers(0, len(data))) :]
    elif kind == "more":
        data += random.integers(0, 256, faults, dtype=np.uint8).tobytes()
    else:
        data = bytearray(random.integers(0, 256, int(random.integers(0, 2 * count)), dtype=np.uint8).tobytes())

    def made() -> tuple[str, Vector]:
        around = np.full(count + 2 * AROUND, 7.0, np.float32)
        try:
            codecs.decode(data, "sparse", around[AROUND : AROUND + count])
        except ValueError as error:
            return str(error), around
        return "", around

    (reason, around), (reason_too, around_too) = both(compiled, made)

    assert reason == reason_too
    assert same_bits(around, around_too)
    outside = around if reason else np.concatenate([around[:AROUND], around[AROUND + count :]])
    assert (outside == 7.0).all()


@FIXED
@given(st.integers(0, 2**32), st.integers(0, 40))
def test_both_count_the_same_blocks(compiled: kernels.CompiledKernels, seed: int, kept: int) -> None:
    """Of the beginning of an encoding, cut anywhere, both count as many blocks, or refuse it for the same reason."""
    values = values_of(seed, 10_007, 1.0)
    whole = bytes(encode_largest(values, np.zeros_like(values), 8))
    data = memoryview(whole)[: kept * len(whole) // 40]

    def made() -> int | str:
        try:
            return codecs.arithmetic("sparse").count_values(data, values.size)
        except ValueError as error:
            return str(error)

    first, second = both(compiled, made)

    assert first == second


@pytest.mark.parametrize("codec", SIZED)
def test_sizes_that_do_not_go_together_are_refused(compiled: kernels.CompiledKernels, codec: CodecName) -> None:
    """A momentum of another length, or too few bytes: nothing is changed."""
    values, short = np.ones(9000, np.float32), np.ones(8990, np.float32)
    data = np.zeros(CODECS[codec].size_bytes(8990), np.uint8)
    attempts = [
        lambda: compiled.encode_bfloat16(values, data),
        lambda: compiled.encode_with_feedback(values, values.copy(), codec, data),
        lambda: compiled.encode_with_feedback(short, values, codec, data),
        lambda: compiled.decode(data, codec, values),
        lambda: compiled.encode_sparse_with_feedback(values, values.copy(), 1.0, data[:200], 128),
        lambda: compiled.encode_sparse_with_feedback(short, values, 1.0, data, 128),
        lambda: compiled.add(values, short, 1.0, 0.7),
        lambda: compiled.add_and_accumulate(values, short, values.copy(), 1.0, 0.7),
        lambda: compiled.add_with_momentum(values, short, values.copy(), 1.0, 0.7, 0.5, 0.35),
        lambda: compiled.add_with_momentum(values, values.copy(), short, 1.0, 0.7, 0.5, 0.35),
    ]

    for attempt in attempts:
        with pytest.raises(ValueError, match="not"):
            attempt()

    assert (values == 1.0).all()
    assert (short == 1.0).all()
    assert not data.any()


UNALIGNED = np.zeros(36_001, np.uint8)[1:].view(np.float32)


@pytest.mark.parametrize(
    "vector", [np.zeros(20_000, np.float32)[::2], np.zeros(9000), np.zeros(255, np.float32), UNALIGNED]
)
def test_what_the_passes_cannot_take_is_left_to_numpy(vector: Vector) -> None:
    """Values in pieces, of another type, at odd addresses, or too few to be worth a call."""
    assert not kernels.fits(np.zeros(9000, np.float32), vector) or vector.size < kernels.MIN_VALUES
    assert not kernels.fits(vector)


def test_an_installation_without_a_compiler_succeeds() -> None:
    """The extension is optional, and is where `find` searches."""
    module = extension()

    assert module["optional"] is True
    assert module["name"] == f"{kernels.__name__}._compiled"


def test_no_library_or_a_strange_one_is_numpy(tmp_path: Path) -> None:
    """A folder without a library, with junk in its place, or with a library that lacks the functions."""
    name = f"_compiled{kernels.EXTENSION_SUFFIXES[0]}"

    assert kernels.find(tmp_path) is None
    (tmp_path / name).write_bytes(b"junk")
    assert kernels.find(tmp_path) is None
    if shutil.which("cc") is None:
        return
    other = tmp_path / "other.c"
    other.write_text(f"int contract(void) {{ return {kernels.CONTRACT}; }}\n")
    built(tmp_path, other).rename(tmp_path / name)
    assert kernels.find(tmp_path) is None


def test_a_library_of_another_version_is_not_used(compiled: kernels.CompiledKernels, tmp_path: Path) -> None:
    """One that was left over from an older checkout has the functions, and another contract."""
    older = tmp_path / "older.c"
    text = SOURCE.read_text(encoding="utf-8")
    older.write_text(text.replace(f"#define CONTRACT {kernels.CONTRACT}", "#define CONTRACT 0"), encoding="utf-8")
    (tmp_path / "built").mkdir()
    library = built(tmp_path / "built", older, "-O0")

    with pytest.raises(OSError, match="version 0"):
        kernels.CompiledKernels(library)
    library.rename(tmp_path / f"_compiled{kernels.EXTENSION_SUFFIXES[0]}")
    assert kernels.find(tmp_path) is None


def test_a_library_of_this_version_is_found(library: Path, tmp_path: Path) -> None:
    """Where an installation puts it."""
    shutil.copy(library, tmp_path / f"_compiled{kernels.EXTENSION_SUFFIXES[0]}")

    assert kernels.find(tmp_path) is not None


@FIXED
@given(
    st.one_of(st.binary(max_size=200), st.lists(st.binary(max_size=9)).map(payload_of)),
    st.integers(1, 40),
)
def test_ends_of_records_are_those_of_the_loop(compiled: kernels.CompiledKernels, payload: bytes, count: int) -> None:
    """The ends of records in any bytes, whole payloads or not, are those that the loop in Python finds."""
    found = compiled.record_ends(payload, count)

    assert found.dtype == np.int64
    assert found.tolist() == chunk._scanned(payload, count).tolist()


def test_a_record_of_4_gib_does_not_wrap_around(compiled: kernels.CompiledKernels) -> None:
    """A length of 32 bits leads to an end beyond 32 bits, and nothing behind the payload is read."""
    payload = b"\x00\x00\x00\x00" + b"\xff\xff\xff\xff" + b"abc"

    assert compiled.record_ends(payload, 5).tolist() == [4, 8 + 2**32 - 1]
