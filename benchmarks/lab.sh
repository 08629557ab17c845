#!/usr/bin/env bash
# Everything of the lab that is committed, measured anew: benchmarks/results/lab-*.json and wires.json, docs/exchange.svg,
# and a page in runs/lab/report. About an hour on two quiet cores. `make lab` runs it.
#
# For a short trial that leaves what is committed alone:
#   RESULTS=/tmp/lab FIGURE=/tmp/lab/exchange.svg STEPS=2 TRAIN="--steps 8" benchmarks/lab.sh
set -euo pipefail
cd "$(dirname "$0")/.."

GRADSIEVE=${GRADSIEVE:-.venv/bin/python -m gradsieve}
PYTHON=${PYTHON:-.venv/bin/python}
RESULTS=${RESULTS:-benchmarks/results}
FIGURE=${FIGURE:-docs/exchange.svg}
RUNS=${RUNS:-runs/lab}
STEPS=${STEPS:-10}
TRAIN=${TRAIN:-}
GOAL=0.95

# accuracy by step does not depend on the rate: full length once, for what is judged by its final accuracy; all others
# run until the goal is seen
WHOLE="ddp,micro,union"
RIVALS="fp16,topk,cltk"
LOW_RANK="powersgd(rank=1),powersgd(rank=4)"
HALF_WIRE="micro(wire=bfloat16),union(wire=bfloat16)"
TRAINING="--train --config benchmarks/lab.toml --density 0.01 --accuracy $GOAL $TRAIN"

# a row that fails does not keep the others from being measured
failed=0
lab() {
    local code=0
    $GRADSIEVE lab "$@" || code=$?
    [ "$code" -le 1 ] || exit "$code"
    [ "$code" -eq 0 ] || failed=1
}

mkdir -p "$RESULTS"
rm -rf "$RUNS"

# exchanges of given gradients, by bandwidth, and over a slow link between two racks
lab --rate 100mbit,1gbit,10gbit,none --steps "$STEPS" --json "$RESULTS/lab-exchange.json"
lab --rate 1gbit --racks 2 --uplink 500mbit --steps "$STEPS" --json "$RESULTS/lab-racks.json"

# the same methods with values in fewer bits, side by side
WIRES="dense,union,union(wire=bfloat16),union(wire=float8),micro,micro(wire=float8),powersgd(rank=1)"
lab --rate 100mbit,1gbit,10gbit --methods "$WIRES" --steps "$STEPS" --json "$RESULTS/wires.json"

lab $TRAINING --rate 1gbit --methods "$WHOLE" --output "$RUNS/whole"
TRAINING="$TRAINING --stop-at-accuracy"
lab $TRAINING --rate 1gbit --methods "$RIVALS,$LOW_RANK,$HALF_WIRE,union(scope=bucket)" --output "$RUNS/others"
lab $TRAINING --rate 100mbit --methods "ddp,$RIVALS" --output "$RUNS/slow-others"
lab $TRAINING --rate 100mbit --methods "$LOW_RANK,micro,union,$HALF_WIRE" --output "$RUNS/slow"
lab $TRAINING --rate 1gbit,100mbit --methods "micro(ahead=1.0)" --output "$RUNS/ahead"
cp "$RUNS/whole/lab-training.json" "$RESULTS/lab-training-1gbit.json"
cp "$RUNS/others/lab-training.json" "$RESULTS/lab-training-1gbit-others.json"
cp "$RUNS/slow-others/lab-training.json" "$RESULTS/lab-training-100mbit-others.json"
cp "$RUNS/slow/lab-training.json" "$RESULTS/lab-training-100mbit.json"
cp "$RUNS/ahead/lab-training.json" "$RESULTS/lab-training-ahead.json"

$GRADSIEVE report "$RESULTS"/lab-*.json --output "$RUNS/report"
$PYTHON benchmarks/draw.py "$RESULTS/lab-exchange.json" "$FIGURE" 1gbit
exit $failed
