"""Numbers that the papers print or draw, to compare with; each table says how it is known.

Tags: R read in the paper; C read in the authors' public code; F measured in a figure (about 1 % of the axis); D derived
(algebra, or a run of the authors' prototype).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lbpar.papers.gholami import Figure

Tag = Literal["R", "C", "F", "D", "R+D", "F+D"]


@dataclass(frozen=True)
class Panel:
    """Communication seconds per epoch of the bars of one panel; Pr is ``first`` and doubles from bar to bar."""

    figure: Figure
    batch: int
    procs: int
    first: int
    seconds: tuple[float, ...]

    @property
    def grids(self) -> list[tuple[int, int]]:
        """Pr x Pc of the bars, left to right."""
        return [(self.first << i, self.procs // (self.first << i)) for i in range(len(self.seconds))]


# Gholami et al., Figures 6, 7, 9, 10 [F].
GHOLAMI_PANELS = (
    Panel("6", 2048, 8, 1, (39.04, 51.05, 76.28, 143.54)),
    Panel("6", 2048, 32, 1, (43.09, 29.93, 28.62, 41.12, 74.67, 145.07)),
    Panel("6", 2048, 128, 1, (44.01, 24.96, 16.73, 15.70, 21.88, 38.86, 73.86, 145.40)),
    Panel("6", 2048, 512, 1, (44.49, 23.43, 13.37, 9.20, 9.01, 12.05, 20.39, 38.04)),
    Panel("7", 2048, 8, 1, (38.48, 21.14, 15.72, 22.22)),
    Panel("7", 2048, 32, 1, (43.02, 22.71, 13.48, 10.89, 14.22, 24.55)),
    Panel("7", 2048, 128, 1, (44.20, 23.07, 12.84, 8.07, 6.93, 8.52, 13.75, 25.34)),
    Panel("7", 2048, 512, 1, (44.49, 23.24, 12.62, 7.49, 5.22, 4.65, 5.41, 8.06)),
    Panel("9", 512, 128, 1, (177.11, 91.77, 49.47, 28.32, 19.26, 16.99, 20.77, 30.59)),
    Panel("9", 32768, 8192, 1, (2.82, 1.47, 0.81, 0.49, 0.34, 0.29, 0.35, 0.52)),
    Panel("10", 512, 512, 1, (177.72, 92.53, 49.93, 28.98, 18.51, 14.32, 12.92, 14.32)),
    Panel("10", 512, 2048, 4, (50.67, 29.33, 18.75, 13.56, 11.44, 10.87, 11.63, 14.33)),
)

# Compute seconds per epoch by (batch, processes) [F].
GHOLAMI_COMPUTE = {
    (2048, 8): 280,
    (2048, 32): 86.9,
    (2048, 128): 35.6,
    (2048, 512): 22.3,
    (512, 128): 89.1,
    (512, 512): 68.0,
    (512, 1024): 34.1,
    (512, 2048): 17.0,
    (512, 4096): 8.5,
    (8192, 2048): 5.6,
    (32768, 8192): 1.41,
}

# Figure 8, total seconds per epoch with perfect overlap, Pr = 1, 2, 4, ... at B = 2048, P = 512 [F].
GHOLAMI_FIG8 = (44.62, 23.23, 22.47, 22.72, 23.10, 23.86, 25.38, 28.29)


@dataclass(frozen=True)
class SpeedUp:
    """Best grid of a panel and its speed-up over the panel's first bar, in total and in communication time [R]."""

    figure: Figure
    batch: int
    procs: int
    grid: tuple[int, int]
    total: float
    communication: float


GHOLAMI_SPEEDUPS = (
    SpeedUp("6", 2048, 32, (4, 8), 1.1, 1.5),
    SpeedUp("6", 2048, 128, (8, 16), 1.6, 2.8),
    SpeedUp("6", 2048, 512, (16, 32), 2.1, 5.0),
    SpeedUp("7", 2048, 8, (4, 2), 1.1, 2.5),
    SpeedUp("7", 2048, 32, (8, 4), 1.3, 3.9),
    SpeedUp("7", 2048, 128, (16, 8), 1.9, 6.4),
    SpeedUp("7", 2048, 512, (32, 16), 2.5, 9.7),
    SpeedUp("9", 512, 128, (32, 4), 2.5, 10.3),
    SpeedUp("9", 2048, 512, (32, 16), 2.5, 9.7),
    SpeedUp("9", 32768, 8192, (32, 256), 2.5, 9.4),
    SpeedUp("10", 512, 512, (64, 8), 3.0, 13.9),
    SpeedUp("10", 512, 2048, (128, 16), 2.4, 4.7),
)

# Equation (8) evaluated literally on the grouped AlexNet, seconds per epoch at B = 2048, Pr = 1, 2, 4, ... [D].
GHOLAMI_LITERAL_SAME = {
    8: (41.72, 215.71, 599.37, 1384.56),
    32: (46.23, 71.87, 158.87, 350.70, 743.30, 1532.95),
    128: (47.38, 35.94, 48.77, 92.27, 188.19, 384.50, 779.32, 1570.09),
}
GHOLAMI_LITERAL_FC = {
    8: (41.72, 21.59, 15.66, 20.96),
    32: (46.23, 24.02, 13.95, 10.99, 13.65, 23.25),
    512: (47.70, 24.84, 13.48, 7.94, 5.42, 4.68, 5.35, 7.75, 13.09, 24.04),
}

# OptCNN: GiB moved per step by pure data parallelism on 2, 4, 8, 16 devices [F; over clipped bars R].
OPTCNN_DATA_VOLUME = {
    "alexnet": {2: 1.11, 4: 2.23, 8: 4.45, 16: 9},
    "vgg16": {2: 2.06, 4: 4.11, 8: 8.23, 16: 16},
    "inception-v3": {2: 0.35, 4: 0.71, 8: 1.42, 16: 2.84},
}

# The same for "one weird trick" and for the layer-wise optimum [F].
OPTCNN_TRICK_VOLUME = {
    "alexnet": {2: 0.05, 4: 0.12, 8: 0.34, 16: 1.06},
    "vgg16": {2: 0.24, 4: 0.54, 8: 1.34, 16: 3.69},
    "inception-v3": {2: 0.33, 4: 0.66, 8: 1.33, 16: 2.72},
}
OPTCNN_LAYERWISE_VOLUME = {
    "alexnet": {2: 0.05, 4: 0.10, 8: 0.19, 16: 0.39},
    "vgg16": {2: 0.21, 4: 0.34, 8: 0.69, 16: 1.63},
    "inception-v3": {2: 0.28, 4: 0.56, 8: 1.13, 16: 2.25},
}

# OptCNN's strategy for VGG-16 on four devices of a node, as degrees (n, h, w, c) [R].
OPTCNN_VGG16 = {
    **{f"{kind}{block}": (4, 1, 1, 1) for block in (1, 2, 3, 4) for kind in ("conv", "pool")},
    **{f"{kind}5": (1, 2, 2, 1) for kind in ("conv", "pool")},
    "fc6": (1, 1, 1, 4),
    "fc7": (1, 1, 1, 4),
    "fc8": (1, 1, 1, 2),
    "softmax": (1, 1, 1, 1),
}

# OptCNN's seconds to search, by network [R]: exhaustive (None: over a day) and by elimination, with layers.
OPTCNN_SEARCH: dict[str, tuple[int, float | None, float]] = {
    "alexnet": (11, 2.1 * 3600, 0.02),
    "vgg16": (21, None, 0.1),
    "inception-v3": (102, None, 0.4),
}

# PaSE's optimal totals at batch 128, in operations, as printed: digits matter [D, runs of the prototype].
PASE_TOTALS = {
    ("pase-alexnet", 4): "1.48215719552e11",
    ("pase-alexnet", 16): "7.0320712672e10",
    ("pase-alexnet", 32): "5.3136349552e10",
    ("pase-inception-v3", 4): "9.868e11",
    ("pase-inception-v3", 64): "5.532e11",
    ("pase-resnet101", 4): "1.7187e12",
    ("pase-resnet101", 16): "1.2445e12",
}
PASE_DATA_PARALLEL = {4: "5.77557e11", 16: "6.12885e11", 32: "6.18773e11"}
PASE_ONE_WEIRD_TRICK = {4: "1.7058e11", 16: "1.04163e11", 32: "9.30934e10"}

# Configurations per vertex of pase-alexnet, in order [D].
PASE_COUNTS = {
    8: (13, 19, 24, 10, 24, 28, 24, 10, 4, 4, 24, 20, 20, 10),
    32: (30, 60, 75, 21, 76, 100, 76, 21, 6, 6, 80, 56, 56, 21),
    64: (38, 89, 113, 27, 118, 163, 118, 27, 6, 6, 128, 83, 83, 27),
}

# Best splits (b, n, c) of fc6, fc7, fc8 [D; R for p = 32].
PASE_FC = {
    4: ((1, 1, 4), (1, 4, 1), (1, 1, 4)),
    16: ((1, 2, 8), (1, 8, 2), (1, 2, 8)),
    32: ((1, 4, 8), (1, 8, 4), (1, 4, 8)),
}

# Seconds of the prototype's search on two cores [D, runs]; None where it took over 240 s.
PASE_SEARCH_SECONDS: dict[tuple[str, int], float | None] = {
    ("pase-inception-v3", 4): 2.4,
    ("pase-inception-v3", 8): 4.0,
    ("pase-inception-v3", 16): 10.9,
    ("pase-inception-v3", 32): 29.9,
    ("pase-inception-v3", 64): 81.9,
    ("pase-resnet101", 4): 3.6,
    ("pase-resnet101", 8): 17.0,
    ("pase-resnet101", 16): 56.3,
    ("pase-resnet101", 32): None,
    ("pase-resnet101", 64): None,
}
