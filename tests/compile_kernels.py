"""Compile every kernel for a Hopper GPU, print their names; see test_kernels_compile.py."""

from __future__ import annotations

import itertools
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gradsieve.kernels import ladder, merge, packing, pick, scatter, sieve, tiling

FLOATS = {"gradient", "acc", "weights", "margins", "rest", "mean", "values"}
INTS = {"ladder", "next_ladder", "slots", "tile_counts", "sent", "applied", "chunk_counts", "picked", "message"}
INTS |= {"messages", "chunk_sums", "chunk_entries", "support", "marks", "table", "faults"}
LONGS = {"starts", "sources", "looks", "last", "tile_places", "borders", "rungs", "counts", "gathered", "offsets"}
LONGS |= {"learned", "following", "record", "rung_of", "ranks"}
TYPES = dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(INTS, "*i32") | dict.fromkeys(LONGS, "*i64")
LOOK: dict[str, Any] = {"BY_IMPORTANCE": False, "NARROW": False, "TILES": 4, "ENTRIES": 32, "WIDE": ladder.WIDE}


def compile_kernel(kernel: Any, num_warps: int = 4, **constants: Any) -> None:
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else TYPES.get(name, "i64" if name.endswith("_row") else "i32")
        for name in names
    }
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    print(kernel.__name__)  # noqa: T201 - what the test reads


def main() -> None:
    whole = {"BLOCK": sieve.BLOCK, "ENTRIES": sieve.ENTRIES, "ALIGNED": True}
    for narrow, by_importance in itertools.product((False, True), repeat=2):
        step = {"COLLECT": True, "CLEAR": True, "NARROW": narrow, "BY_IMPORTANCE": by_importance}
        step |= {"MANY": by_importance, "CHECK": narrow}
        compile_kernel(sieve._sieve, sieve.NUM_WARPS, **whole, **step, IN_PLACE=not narrow, REST=narrow)
        for look_at_all in (False, True):
            look = LOOK | {"ALL": look_at_all, "NARROW": narrow, "BY_IMPORTANCE": by_importance}
            compile_kernel(ladder._count, **look)
            compile_kernel(pick._pick, pick.PICK_WARPS, **look, CHUNKS=256)
    compile_kernel(sieve._clear, 1, REST=True, ENTRIES=sieve.ENTRIES)
    for cold in (False, True):
        compile_kernel(ladder._decide, ladder.DECIDE_WARPS, RANKS=16, COLD=cold, FIRST=False, FINAL=not cold)
    compile_kernel(packing._pack, INDICES=packing.INDICES)
    for choice in (False, True):
        compile_kernel(packing._tally, WORDS=packing.WORDS, SEAL=choice)
        compile_kernel(packing._unpack, WORDS=packing.WORDS, WORLD=16, DISJOINT=choice)
    compile_kernel(merge._measure, WORDS=merge.WORDS)
    compile_kernel(merge._merge, WORDS=merge.WORDS)
    compile_kernel(scatter._gather, ENTRIES=scatter.ENTRIES)
    written = {"TILE": tiling.TILE, "ENTRIES": scatter.WRITTEN, "ALIGNED": True, "IN_PLACE": False}
    compile_kernel(scatter._write_back, scatter.WRITE_WARPS, **written)


if __name__ == "__main__":
    main()
