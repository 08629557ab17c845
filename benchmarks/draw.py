"""Draw the exchanges that `gradsieve lab` timed at one rate: draw.py LAB.json FIGURE.svg [RATE] (needs matplotlib)."""

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
NOT_DRAWN = {"no-op hook"}


def main() -> None:
    source, figure_path = Path(sys.argv[1]), Path(sys.argv[2])
    rate = sys.argv[3] if len(sys.argv) > 3 else "1gbit"
    result = json.loads(source.read_text())
    setting = result["setting"]
    rows = [row for row in result["rows"] if row["rate"] == rate and row["error"] is None]
    rows = sorted((row for row in rows if row["name"] not in NOT_DRAWN), key=lambda row: -row["added_seconds"])
    milliseconds = [1000 * row["added_seconds"] for row in rows]
    mpl.rcParams["svg.hashsalt"] = "gradsieve"
    figure, axes = plt.subplots(figsize=(7.5, 0.8 + 0.3 * len(rows)), layout="constrained")
    colours = [OURS if row["name"].partition(",")[0] in HIGHLIGHTED else OTHERS for row in rows]
    bars = axes.barh([row["name"] for row in rows], milliseconds, color=colours)
    labels = [
        f"{time:.0f} ms, {row['counted_bytes'] / 1e6:.1f} MB" for row, time in zip(rows, milliseconds, strict=True)
    ]
    axes.bar_label(bars, labels, padding=4, fontsize=9)
    axes.set_xlim(0, 1.25 * max(milliseconds))
    axes.set_xlabel("what averaging a gradient adds to a step, median (milliseconds); data that a host sent")
    axes.set_title(
        f"{setting['parameters'] / 1e6:.1f} M parameters, density {setting['density']:g}, "
        f"{setting['world']} hosts with links of {rate}",
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(figure_path, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
