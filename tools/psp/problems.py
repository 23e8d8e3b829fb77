"""Problems for simulated nodes, in NumPy: softmax regression, the PSP chapter's network, factorisation.

A `Problem` computes the change that one step of a node makes to a vector, `float32[size]`. Batches depend only on seed,
node and step, so that every barrier trains on the same data in the same order.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from p2pnode.training.errors import TrainingError

Vector = NDArray[np.float32]


class Problem(Protocol):
    """One problem; `better` is "higher" or "lower", the direction in which `score` improves."""

    name: str
    better: str
    size: int

    def initial(self) -> Vector:
        """The common initial vector."""

    def delta(self, vector: Vector, node: int, step: int) -> Vector:
        """The change of this vector by one step of a node."""

    def score(self, vector: Vector) -> float:
        """Accuracy, or error."""


class BadData(TrainingError):
    """A data set is missing or not as expected; the message names the file."""


def batch_of(seed: int, node: int, step: int, count: int, size: int) -> NDArray[np.int64]:
    """`size` random indices below `count`."""
    return np.random.default_rng((seed, node, step)).integers(0, count, size)


class SoftmaxRegression:
    """One linear layer with cross entropy on the images; 7,850 parameters."""

    name, better = "softmax regression", "higher"

    def __init__(self, data: Images, seed: int, *, learning_rate: float = 0.1, batch: int = 32) -> None:
        self._data, self._seed, self._rate, self._batch = data, seed, learning_rate, batch
        self.size = 784 * 10 + 10

    def initial(self) -> Vector:
        return np.zeros(self.size, np.float32)

    def delta(self, vector: Vector, node: int, step: int) -> Vector:
        rows = batch_of(self._seed, node, step, len(self._data.labels), self._batch)
        x, labels = self._data.images[rows], self._data.labels[rows]
        error = softmax(self._logits(vector, x))
        error[np.arange(len(rows)), labels] -= 1.0
        scale = np.float32(-self._rate / len(rows))
        return np.concatenate([(x.T @ error).ravel(), error.sum(axis=0)]) * scale

    def score(self, vector: Vector) -> float:
        return accuracy(self._logits(vector, self._data.test_images), self._data.test_labels)

    def _logits(self, vector: Vector, x: Vector) -> Vector:
        return x @ vector[:7840].reshape(784, 10) + vector[7840:]


class MatrixFactorisation:
    """Ratings as products of K factors of users and items, on synthetic ratings; the error is the sum of squares over
    all of them. (The published run uses MovieLens, which this program may not distribute.)"""

    name, better = "matrix factorisation", "lower"

    def __init__(
        self, seed: int, *, users: int = 300, items: int = 200, factors: int = 10, learning_rate: float = 0.004,
        regularisation: float = 0.02, batch: int = 64,
    ) -> None:  # fmt: skip
        generator = np.random.default_rng(seed)
        self._seed, self._shape, self._factors = seed, (users, items), factors
        self._rate, self._weight, self._batch = learning_rate, regularisation, batch
        self.size = (users + items) * factors
        true = generator.standard_normal((users + items, factors)).astype(np.float32)
        count = users * items // 4
        self._user = generator.integers(0, users, count)
        self._item = generator.integers(0, items, count)
        self._rating = np.einsum("ij,ij->i", true[self._user], true[users + self._item])
        self._rating += 0.1 * generator.standard_normal(count).astype(np.float32)

    def initial(self) -> Vector:
        generator = np.random.default_rng((self._seed, 1))
        return (0.3 * generator.standard_normal(self.size)).astype(np.float32)

    def delta(self, vector: Vector, node: int, step: int) -> Vector:
        rows = batch_of(self._seed, node, step, len(self._rating), self._batch)
        table = vector.reshape(-1, self._factors)
        user, item = self._user[rows], self._shape[0] + self._item[rows]
        error = (self._rating[rows] - np.einsum("ij,ij->i", table[user], table[item]))[:, None]
        change = np.zeros_like(table)
        np.add.at(change, user, self._rate * (error * table[item] - self._weight * table[user]))
        np.add.at(change, item, self._rate * (error * table[user] - self._weight * table[item]))
        return change.ravel()

    def score(self, vector: Vector) -> float:
        table = vector.reshape(-1, self._factors)
        products = np.einsum("ij,ij->i", table[self._user], table[self._shape[0] + self._item])
        return float(((self._rating - products) ** 2).sum())


class Cnn:
    """The chapter's network: convolution 5×5 with 32 maps, ReLU, max pooling 2×2, dropout 0.1, dense 1024 ReLU, 10.

    6.4 M parameters, plain SGD. The vector is kernels, their biases, and the two dense layers, in this order.
    """

    name, better = "the chapter's network", "higher"
    MAPS, POOLED, HIDDEN = 32, 14 * 14 * 32, 1024

    def __init__(
        self, data: Images, seed: int, *, learning_rate: float = 0.05, batch: int = 64, hidden: int = HIDDEN,
        dropout: float = 0.1, tests: int = 1000,
    ) -> None:  # fmt: skip
        self._data, self._seed, self._rate, self._batch = data, seed, learning_rate, batch
        self._dropout, self._tests, self._hidden = dropout, tests, hidden
        self._shapes = [(25, self.MAPS), (self.MAPS,), (self.POOLED, hidden), (hidden,), (hidden, 10), (10,)]
        self.size = sum(int(np.prod(shape)) for shape in self._shapes)

    def initial(self) -> Vector:
        generator = np.random.default_rng((self._seed, 2))
        parts = []
        for shape in self._shapes:
            scale = np.sqrt(2.0 / shape[0]) if len(shape) == 2 else 0.0
            parts.append((scale * generator.standard_normal(shape)).astype(np.float32).ravel())
        return np.concatenate(parts)

    def delta(self, vector: Vector, node: int, step: int) -> Vector:
        rows = batch_of(self._seed, node, step, len(self._data.labels), self._batch)
        generator = np.random.default_rng((self._seed, node, step, 3))
        keep = (generator.random((len(rows), self.POOLED)) >= self._dropout).astype(np.float32) / (1 - self._dropout)
        gradient = self.gradient(vector, self._data.images[rows], self._data.labels[rows], keep)
        gradient *= np.float32(-self._rate)
        return gradient

    def gradient(self, vector: Vector, images: Vector, labels: NDArray[np.int64], keep: Vector) -> Vector:
        """The gradient of the mean cross entropy; `keep` float32[batch, 6272] is the dropout mask."""
        _, _, dense, _, last, _ = self._parts(vector)
        patches, convolved, chosen, pooled = self._convolved(vector, images)
        dropped = pooled * keep
        hidden = np.maximum(dropped @ dense + self._parts(vector)[3], 0)
        error = softmax(hidden @ last + self._parts(vector)[5])
        error[np.arange(len(labels)), labels] -= 1.0
        error /= np.float32(len(labels))
        out: Vector = np.empty(self.size, np.float32)
        d_kernels, d_bias, d_dense, d_dense_bias, d_last, d_last_bias = self._parts(out)
        np.matmul(hidden.T, error, out=d_last)
        d_last_bias[:] = error.sum(axis=0)
        d_hidden = (error @ last.T) * (hidden > 0)
        np.matmul(dropped.T, d_hidden, out=d_dense)
        d_dense_bias[:] = d_hidden.sum(axis=0)
        d_pooled = (d_hidden @ dense.T) * keep
        # Max pooling and ReLU pass the error only to the largest of four inputs, and only if it is positive.
        spread = chosen * d_pooled.reshape(len(labels), 14, 1, 14, 1, self.MAPS)
        spread = (spread * (convolved > 0)).reshape(-1, self.MAPS)
        np.matmul(patches.T, spread, out=d_kernels)
        d_bias[:] = spread.sum(axis=0)
        return out

    def loss(self, vector: Vector, images: Vector, labels: NDArray[np.int64], keep: Vector) -> float:
        """Mean cross entropy."""
        chances = softmax(self._logits(vector, images, keep))
        return float(-np.log(chances[np.arange(len(labels)), labels]).mean())

    def score(self, vector: Vector) -> float:
        logits = [
            self._logits(vector, self._data.test_images[start : start + 250], np.float32(1.0))
            for start in range(0, self._tests, 250)
        ]
        return accuracy(np.concatenate(logits), self._data.test_labels[: self._tests])

    def _logits(self, vector: Vector, images: Vector, keep: Any) -> Vector:
        _, _, dense, dense_bias, last, last_bias = self._parts(vector)
        pooled = self._convolved(vector, images)[3]
        hidden = np.maximum((pooled * keep) @ dense + dense_bias, 0)
        return np.asarray(hidden @ last + last_bias, np.float32)

    def _convolved(self, vector: Vector, images: Vector) -> tuple[Vector, Vector, Vector, Vector]:
        """Patches; convolution [batch, 14, 2, 14, 2, maps]; one-hot choice of the pooling; pooled [batch, 6272]."""
        count = len(images)
        kernels, bias = self._parts(vector)[:2]
        padded = np.pad(images.reshape(count, 28, 28), ((0, 0), (2, 2), (2, 2)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (5, 5), axis=(1, 2))
        patches = np.ascontiguousarray(windows).reshape(-1, 25)
        convolved = (patches @ kernels + bias).reshape(count, 14, 2, 14, 2, self.MAPS)
        largest = convolved.max(axis=(2, 4), keepdims=True)
        chosen = (convolved == largest).astype(np.float32)
        chosen /= chosen.sum(axis=(2, 4), keepdims=True)
        pooled = np.maximum(largest, 0).reshape(count, self.POOLED)
        return patches, convolved, chosen, pooled

    def _parts(self, vector: Vector) -> list[Any]:
        """The layers as views of the vector."""
        views, start = [], 0
        for shape in self._shapes:
            stop = start + int(np.prod(shape))
            views.append(vector[start:stop].reshape(shape))
            start = stop
        return views


class Images:
    """The MNIST files of a folder: images float32[n, 784] in 0…1, labels int64[n]; the first `limit` if given."""

    def __init__(self, folder: Path, *, limit: int = 0) -> None:
        self.images, self.labels = _pair(folder, "train", limit)
        self.test_images, self.test_labels = _pair(folder, "t10k", limit)


def _pair(folder: Path, kind: str, limit: int) -> tuple[Vector, NDArray[np.int64]]:
    images = _idx(folder, f"{kind}-images-idx3-ubyte", (28, 28))
    labels = _idx(folder, f"{kind}-labels-idx1-ubyte", ())
    if len(images) != len(labels):
        raise BadData(f"images and labels of {kind} in {folder} differ in number")
    stop = limit or len(labels)
    return images[:stop].reshape(-1, 784).astype(np.float32) / np.float32(255), labels[:stop].astype(np.int64)


def _idx(folder: Path, name: str, shape: Sequence[int]) -> NDArray[np.uint8]:
    """Read an IDX file of bytes, gzipped or not. Raises `BadData`."""
    try:
        packed = folder / f"{name}.gz"
        raw = gzip.decompress(packed.read_bytes()) if packed.exists() else (folder / name).read_bytes()
    except (OSError, EOFError, gzip.BadGzipFile) as error:
        raise BadData(f"cannot read {name} or {name}.gz in {folder}: {error}") from error
    dimensions = 1 + len(shape)
    if len(raw) < 4 + 4 * dimensions or raw[:4] != bytes([0, 0, 8, dimensions]):
        raise BadData(f"{folder / name} is not an IDX file of bytes with {dimensions} dimension(s)")
    sizes = tuple(int.from_bytes(raw[4 + 4 * d : 8 + 4 * d], "big") for d in range(dimensions))
    body = np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions)
    if sizes[1:] != tuple(shape) or body.size != int(np.prod(sizes)):
        raise BadData(f"{folder / name} announces {sizes} and has {body.size} bytes")
    return body.reshape(sizes)


def softmax(logits: Vector) -> Vector:
    """Along the last axis."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True), np.float32)


def accuracy(logits: Vector, labels: NDArray[np.int64]) -> float:
    """The share of correct predictions; rows that are not finite are wrong."""
    return float((np.where(np.isfinite(logits), logits, -np.inf).argmax(axis=1) == labels).mean())
