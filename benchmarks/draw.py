"""Draw a result of exchange.py as a bar chart: draw.py RESULT.json FIGURE.svg (needs matplotlib)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

OURS = "#1f77b4"
OTHERS = "#9aa5b1"
HIGHLIGHTED = {"micro", "exdyna", "union"}


def main() -> None:
    source, figure_path = Path(sys.argv[1]), Path(sys.argv[2])
    result = json.loads(source.read_text())
    rows, facts = result["rows"], result["provenance"]
    names = sorted(rows, key=lambda name: rows[name]["seconds"], reverse=True)
    milliseconds = [1000 * rows[name]["seconds"] for name in names]
    mpl.rcParams["svg.hashsalt"] = "gradsieve"
    figure, axes = plt.subplots(figsize=(7.5, 3.2), layout="constrained")
    bars = axes.barh(names, milliseconds, color=[OURS if name in HIGHLIGHTED else OTHERS for name in names])
    labels = [
        f"{ms:.0f} ms, {rows[name]['wire_bytes'] / 1e6:.1f} MB" for name, ms in zip(names, milliseconds, strict=True)
    ]
    axes.bar_label(bars, labels, padding=4, fontsize=9)
    axes.set_xlim(0, 1.25 * max(milliseconds))
    axes.set_xlabel("averaging one gradient, median (milliseconds); data handed over by a worker")
    axes.set_title(
        f"{facts['parameters'] / 1e6:.1f} M parameters, density {facts['density']:g}, {facts['network']}", fontsize=10
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(figure_path, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
