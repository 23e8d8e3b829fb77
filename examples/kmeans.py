"""k-means by map-reduce, then a classifier on the distances to its centres, which the nodes of a swarm train together.

    p2pnode run --set training.max_steps=40 -- python examples/kmeans.py

Start it on every machine, on the same points: each node computes the same centres, and then asks for the model.
"""

from __future__ import annotations

import math
import random

import torch
from torch import nn
from torch.nn import functional

import p2pnode

Point = tuple[float, float]


def rings(count: int, seed: int) -> list[tuple[Point, int]]:
    """Points on six spots in a circle, and their classes: every other spot. No line separates them."""
    generator = random.Random(seed)
    angles = [math.pi / 3 * generator.randrange(6) for _ in range(count)]
    spread = [(generator.gauss(0.0, 0.12), generator.gauss(0.0, 0.12)) for _ in angles]
    points = [(math.cos(angle) + x, math.sin(angle) + y) for angle, (x, y) in zip(angles, spread, strict=True)]
    return [(point, round(angle * 3 / math.pi) % 2) for point, angle in zip(points, angles, strict=True)]


def nearest(point: Point, centres: list[Point]) -> int:
    """The number of the centre that is nearest to a point."""
    distances = [math.dist(point, centre) for centre in centres]
    return distances.index(min(distances))


def k_means(points: list[Point], k: int) -> list[Point]:
    """`k` centres: points far from one another, then ten rounds of the mean of what is nearest."""
    centres = points[:1]
    while len(centres) < k:
        centres.append(max(points, key=lambda point: min(math.dist(point, centre) for centre in centres)))
    with p2pnode.engine("mapreduce") as engine:
        data = engine.from_items(points)
        for _ in range(10):
            now = engine.broadcast(centres)
            sums = (
                data.map(lambda point, now=now: (nearest(point, now.value), (point[0], point[1], 1)))
                .reduce_by_key(lambda one, other: (one[0] + other[0], one[1] + other[1], one[2] + other[2]))
                .collect()
            )
            centres = [(x / count, y / count) for _, (x, y, count) in sorted(sums)]
    return centres


def main() -> None:
    """Find the centres, then train."""
    labelled = rings(600, seed=1)
    centres = torch.tensor(k_means([point for point, _ in labelled], 6))
    near = torch.exp(-4.0 * torch.cdist(torch.tensor([point for point, _ in labelled]), centres))
    labels = torch.tensor([label for _, label in labelled])
    model = nn.Linear(len(centres), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    swarm = p2pnode.attach(model, optimizer)
    while not swarm.done:
        chosen = torch.randint(len(labels), (32,))
        loss = functional.cross_entropy(model(near[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        swarm.step(samples=32, loss=loss)
    right = (model(near).argmax(1) == labels).float().mean()
    print(f"the shared model: accuracy {float(right):.3f} with {len(centres)} centres")


if __name__ == "__main__":
    main()
