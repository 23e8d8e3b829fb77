"""The expected values that `reproduce` compares its runs with, as data.

Two sources (`docs/psp.md`): values digitised from the figures of the PSP chapter, and values simulated from the models
it states, with several seeds. A pair is the lowest and the highest value over those seeds. Pure.
"""

from __future__ import annotations

#: Relative tolerances.
SAMPLED_EVENT = 0.015
COMPLETE = 0.06
ASP = 0.01
ASP_SD = 0.08
HELD_OR_POLLED = 0.04
#: For the tables at 100 and 200 nodes, which have few seeds. The tolerance is at least three standard errors of a mean
#: over `SEEDS_THERE` seeds.
SMALL_SWARM = 0.03
SEEDS_THERE = 3

Range = tuple[float, float]

#: exp_step_01: P = 1000, Exp(1), T = 400, event-driven: (digitised figure, simulated mean).
STEPS: dict[str, tuple[float | None, Range]] = {
    "bsp": (55.0, (52.0, 56.0)),
    "ssp(4)": (227.0, (194.0, 211.0)),
    "ssp(5)": (227.0, (219.0, 226.0)),
    "pbsp(10)": (260.0, (258.5, 258.5)),
    "pssp(4,10)": (374.0, (366.0, 366.0)),
    "pssp(5,10)": (374.0, (372.0, 372.0)),
    "asp": (401.0, (399.6, 399.6)),
}
#: exp_step_02: pBSP by β: (digitised median, simulated mean).
SAMPLE_SIZE: dict[int, tuple[float, Range]] = {
    0: (400.0, (399.6, 399.6)),
    1: (401.0, (398.0, 398.0)),
    2: (387.0, (383.4, 383.4)),
    4: (343.0, (341.0, 341.0)),
    8: (281.0, (279.0, 280.0)),
    16: (220.0, (217.9, 219.3)),
    32: (171.0, (170.8, 170.8)),
    64: (136.0, (134.9, 136.6)),
}
#: s = 0: β → per discipline (mean steps, queries per step).
DISCIPLINE: dict[int, dict[str, tuple[Range, float]]] = {
    1: {
        "hold": ((161, 164), 1), "1": ((217.6, 217.6), 1.8),
        "0.1": ((334, 334), 3.0), "event": ((398.0, 398.0), 7),
    },
    2: {
        "hold": ((138.5, 138.5), 2), "1": ((175.4, 175.4), 4.6),
        "0.1": ((285.9, 285.9), 10), "event": ((383.4, 383.4), 87),
    },
    4: {
        "hold": ((113, 116), 4), "1": ((141.8, 141.8), 11),
        "0.1": ((234.3, 234.3), 32), "event": ((341.0, 341.0), 594),
    },
    8: {
        "hold": ((100.4, 100.4), 8), "1": ((118.1, 118.1), 27),
        "0.1": ((188.8, 188.8), 97), "event": ((279.5, 279.5), 2360),
    },
    10: {
        "hold": ((93, 96), 10), "1": ((111.1, 111.1), 36),
        "0.1": ((176.8, 176.8), 136), "event": ((258.5, 258.5), 3400),
    },
    16: {
        "hold": ((86.2, 86.2), 16), "1": ((99.7, 99.7), 64),
        "0.1": ((153.4, 153.4), 273), "event": ((218.6, 218.6), 6707),
    },
    64: {
        "hold": ((71.0, 71.0), 64), "1": ((75.1, 75.1), 340),
        "0.1": ((105.4, 105.4), 1850), "event": ((136.0, 136.0), 33900),
    },
}  # fmt: skip
#: The same for pSSP(4,10).
DISCIPLINE_PSSP: dict[str, tuple[Range, float]] = {
    "hold": ((243, 253), 10),
    "1": ((280.5, 280.5), 14),
    "event": ((366.2, 366.2), 857),
}
#: The text run: P = 200, T = 200, D = 1 + Exp(1): barrier → discipline → mean steps.
TEXT_RUN: dict[str, dict[str, Range]] = {
    "bsp": {"event": (28, 30)},
    "ssp(4)": {"event": (82.9, 82.9)},
    "pbsp(10)": {"event": (69.3, 69.8), "0.05": (64.1, 65.1), "hold": (41, 43)},
    "pssp(4,10)": {"event": (95.5, 96.8), "0.05": (95.0, 95.0), "hold": (86, 88)},
    "asp": {"event": (99.5, 99.5)},
}
TEXT_RUN_BETA: dict[str, dict[int, float]] = {
    "event": {1: 97.9, 2: 93.5, 4: 84.6, 8: 73.7, 16: 61.3, 32: 50.0, 64: 41.4},
    "0.05": {1: 93.5, 2: 87.0, 4: 77.9, 16: 58.7, 64: 42.9},
}
TEXT_RUN_POLL: dict[float, float] = {0.01: 72, 0.05: 64.5, 0.2: 56.5, 0.5: 50.3, 1.0: 43.5}
#: The text run with slow nodes ×4: share in percent → barrier and discipline → mean steps over three seeds.
TEXT_RUN_SLOW: dict[int, dict[str, float]] = {
    5: {
        "bsp event": 12.9, "ssp(4) event": 24.8, "asp event": 96.0,
        "pbsp(10) event": 64.3, "pbsp(10) 0.05": 59.8, "pbsp(10) hold": 18.4,
        "pssp(4,10) event": 92.0, "pssp(4,10) 0.05": 89.4, "pssp(4,10) hold": 29.0,
    },
    10: {
        "bsp event": 11.8, "ssp(4) event": 24.9, "asp event": 92.0,
        "pbsp(10) event": 58.9, "pbsp(10) 0.05": 54.4, "pbsp(10) hold": 17.1,
        "pssp(4,10) event": 87.4, "pssp(4,10) 0.05": 83.4, "pssp(4,10) hold": 27.4,
    },
}  # fmt: skip
#: The text run at P = 1000.
TEXT_RUN_LARGE: dict[str, float] = {"bsp event": 23.6, "ssp(4) event": 75.6, "pbsp(10) hold": 38.3}
#: P = 100, T = 200, slow nodes ×3: share in percent → mean steps.
SHARES = (0, 5, 10, 15, 20)
STRAGGLER_SHARE: dict[str, tuple[float, ...]] = {
    "asp": (200, 193, 187, 180, 174),
    "bsp": (39, 27, 23, 20.5, 19),
    "ssp(4)": (120, 56, 54, 49, 50),
    "pbsp(10)": (105.5, 97, 88, 79.6, 71),
    "pssp(4,10)": (175, 166, 155, 144, 129),
    "pbsp(10) held": (52, 36, 32, 28, 26.6),
    "pssp(4,10) held": (134, 61, 59, 55, 53),
}
#: P = 100, T = 200, 5 % slow, by the factor.
FACTORS = (1, 2, 4, 6, 8, 10)
STRAGGLER_FACTOR: dict[str, tuple[float, ...]] = {
    "asp": (200, 194.6, 192, 191, 191, 190.6),
    "bsp": (38.6, 33.6, 21.9, 15.4, 11.4, 9.3),
    "ssp(4)": (120, 83, 42.6, 29, 22.6, 19.8),
    "pbsp(10)": (106, 100, 96, 95, 95, 94.5),
    "pssp(4,10)": (175, 167, 165, 163, 163, 162.5),
    "pbsp(10) held": (52, 46, 29, 21, 16, 13.6),
}
#: P = 1000, T = 400, ×4.
LARGE_SHARES = (0, 1, 5, 10, 20, 30)
LARGE_STRAGGLER_SHARE: dict[str, tuple[float, ...]] = {
    "bsp": (53, 34.6, 23, 19, 18, 16),
    "ssp(4)": (202, 79.8, 69, 65, 59, 55),
    "pbsp(10)": (258.5, 255.6, 242, 225, 189.4, 151),
    "pssp(4,10)": (366, 362, 349, 332.6, 296, 253),
    "asp": (400, 397, 385, 370, 340, 310),
}
#: The size of the swarm, T = 400.
SIZES = (100, 200, 400, 600, 800, 1000)
SCALE: dict[str, tuple[float, ...]] = {
    "asp": (400, 400, 400, 400, 400, 400),
    "bsp": (77, 68.4, 61.5, 57.7, 56, 54),
    "ssp(4)": (243, 227.5, 218.4, 208, 201, 202.4),
    "pbsp(10)": (211.4, 227.8, 242.4, 249.8, 254.9, 258.5),
    "pbsp(1%)": (386, 364, 325, 297, 275, 258.5),
}
#: Six workers on MNIST: updates reached and last accuracy.
MNIST: dict[str, tuple[float, float]] = {
    "bsp": (22, 0.88),
    "pbsp(2)": (45, 0.895),
    "ssp(4)": (71, 0.69),
    "pssp(4,2)": (72, 0.85),
    "asp": (74, 0.605),
}
#: P = 60, T = 100, transient ×4: (stored by Ninox, simulated) mean steps, by the share in percent.
STORED: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "asp": ((104.1, 90.2, 79.8, 72.0, 67.3), (100, 87, 77, 70, 63)),
    "bsp": ((22, 14, 11, 11, 10), (21.4, 13.1, 10.6, 9.3, 8.8)),
    "ssp(4)": ((64.7, 38.9, 31.9, 34.8, 30.5), (62.7, 40.9, 32.2, 29.7, 28.8)),
    "pbsp(5)": ((67.0, 57.0, 49.2, 44.4, 40.9), (64.6, 55.2, 49.5, 42.5, 39.6)),
    "pssp(4,5)": ((94.0, 79.7, 71.6, 66.7, 57.3), (91.2, 77.7, 67.6, 59.8, 54.7)),
}
STORED_ACCURACY: dict[str, tuple[float, ...]] = {
    "asp": (0.808, 0.778, 0.786, 0.777, 0.764),
    "bsp": (0.632, 0.535, 0.471, 0.438, 0.448),
    "ssp(4)": (0.763, 0.718, 0.693, 0.692, 0.665),
    "pbsp(5)": (0.767, 0.757, 0.742, 0.728, 0.716),
    "pssp(4,5)": (0.801, 0.785, 0.768, 0.767, 0.746),
}
#: Matrix factorisation, P = 63, T = 100: updates and last loss (the loss starts at 93,623).
FACTORISATION: dict[str, tuple[float, float]] = {
    "asp": (3176, 73088),
    "pbsp(4)": (2439, 73502),
    "pbsp(8)": (2071, 73821),
    "pbsp(16)": (1678, 74296),
    "pbsp(32)": (1349, 74888),
    "pbsp(48)": (1137, 75441),
    "bsp": (1071, 75715),
}
#: Bounds, r = 4, T = 10,000: β → least B1 and its a, least B2 and its a, B1(.2), B1(.5), B1(.8), B2(.2), B2(.5).
BOUNDS: dict[int, tuple[float, ...]] = {
    1: (14.664, 0.505, 62.251, 0.368, 26.389, 14.667, 27.083, 84.028, 73.333),
    2: (12.709, 0.445, 48.575, 0.313, 17.032, 12.887, 26.561, 54.234, 64.437),
    4: (11.393, 0.387, 40.202, 0.259, 12.925, 11.951, 26.285, 41.157, 59.753),
    8: (10.571, 0.336, 35.383, 0.213, 11.121, 11.476, 26.144, 35.413, 57.381),
    16: (10.083, 0.297, 32.675, 0.176, 10.288, 11.238, 26.072, 32.758, 56.191),
    128: (9.575, 0.238, 29.930, 0.116, 9.596, 11.030, 26.009, 30.555, 55.149),
}
BOUNDS_TOLERANCE = 1e-3
