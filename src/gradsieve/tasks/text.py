"""Language modelling on a text of the user's: characters or words, cut into windows of fixed length."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from gradsieve import models
from gradsieve.tasks.files import files_in, is_folder, listed, needed, read_text
from gradsieve.tasks.task import DataError, Examples, Measure, Recipe, Task

Tokens = npt.NDArray[np.int64]
Symbols = TypeVar("Symbols", list[str], npt.NDArray[np.uint32])

CHARACTER_WINDOW = 128
WORD_WINDOW = 64
MOST_WORDS = 33_278
"""Of a vocabulary, with the unknown: as many as WikiText-2 has, so that it keeps all of its own."""
UNKNOWN, END_OF_LINE = "<unk>", "<eos>"

NAMES = (("", ".txt"), ("wiki.", ".tokens"), ("ptb.", ".txt"))
HELD_OUT_NAMES = ("test", "valid", "validation", "val")
WANTED = "a UTF-8 text file, or a folder with one .txt file or with train.txt and test.txt"

RECIPE = Recipe(batch_size=20, epochs=40, lr=1.0, warmup_epochs=1, schedule="cosine", weight_decay=0, clip=0.4)

GPT_RECIPE = Recipe(
    batch_size=20,
    epochs=40,
    lr=1e-3,
    warmup_epochs=1,
    schedule="cosine",
    optimizer="adamw",
    weight_decay=0.1,
    clip=1.0,
)


def load_characters(data: Path | None) -> Task:
    parts = _parts(needed("characters", data, WANTED), _characters)
    known = np.unique(parts[0])
    tokens = [_character_tokens(part, known) for part in parts]
    measure = Measure("bits_per_character", token_losses, finish=in_bits, higher_is_better=False)
    return _task("characters", tokens, len(known) + 1, CHARACTER_WINDOW, measure)


def load_words(data: Path | None) -> Task:
    parts = _parts(needed("words", data, WANTED), _words)
    known = _vocabulary(parts[0])
    tokens = [_word_tokens(part, known) for part in parts]
    measure = Measure("perplexity", token_losses, finish=perplexity, higher_is_better=False)
    return _task("words", tokens, len(known), WORD_WINDOW, measure)


def _task(name: str, tokens: list[Tokens], vocabulary: int, window: int, measure: Measure) -> Task:
    train, test = tokens
    return Task(
        name=name,
        train=windows(train, window, f"{name} of the training part"),
        test=windows(test, window, f"{name} of the test part"),
        models={
            "lstm": functools.partial(models.lstm, vocabulary),
            "gpt": functools.partial(models.gpt, vocabulary, context=window),
        },
        loss=mean_loss,
        measure=measure,
        recipe=RECIPE,
        recipes={"gpt": GPT_RECIPE},
    )


def _parts(data: Path, split: Callable[[str], Symbols]) -> tuple[Symbols, Symbols]:
    """The symbols to train on and those to test on: files of their own, or the last tenth of one."""
    paths = _found(data)
    parts = [split(read_text(path)) for path in paths]
    if len(parts) == 2:
        return parts[0], parts[1]
    whole = parts[0]
    cut = len(whole) * 9 // 10
    return whole[:cut], whole[cut:]


def _found(data: Path) -> list[Path]:
    """One file, or one to train on and one to test on."""
    if not is_folder(data):
        return [data]
    present = files_in(data)
    for (before, after), held_out in product(NAMES, HELD_OUT_NAMES):
        pair = [f"{before}train{after}", f"{before}{held_out}{after}"]
        if set(pair) <= set(present):
            return [data / name for name in pair]
    texts = [name for name in present if name.endswith(".txt")]
    if len(texts) != 1:
        what = f"several .txt files ({listed(texts)})" if texts else "no .txt file"
        raise DataError(f"{data} holds {what}: give {WANTED}")
    return [data / texts[0]]


def _characters(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


def _character_tokens(characters: npt.NDArray[np.uint32], known: npt.NDArray[np.uint32]) -> Tokens:
    """Places among the known characters; one more for any other."""
    table = np.full(0x110000, len(known), dtype=np.int64)
    table[known] = np.arange(len(known))
    return table[characters]


def _words(text: str) -> list[str]:
    lines = text.removesuffix("\n") + "\n"
    return lines.replace("\n", f" {END_OF_LINE} ").split()


def _vocabulary(words: list[str]) -> dict[str, int]:
    """Numbers for the most frequent words, after 0 for any other."""
    frequent = [word for word, _ in Counter(words).most_common(MOST_WORDS) if word != UNKNOWN]
    return {word: number for number, word in enumerate([UNKNOWN, *frequent[: MOST_WORDS - 1]])}


def _word_tokens(words: list[str], known: dict[str, int]) -> Tokens:
    return np.fromiter((known.get(word, 0) for word in words), dtype=np.int64, count=len(words))


def windows(tokens: Tokens, length: int, what: str) -> Examples:
    """Rows of `length` tokens, none twice; the target of each is the token that follows it."""
    count = (len(tokens) - 1) // length
    if count < 1:
        raise DataError(f"the text is too short: {len(tokens)} {what}, and one window takes {length + 1}")
    stream = torch.from_numpy(tokens)
    stop = count * length
    return Examples(stream[:stop].view(count, length), stream[1 : stop + 1].view(count, length))


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def token_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """The negative log likelihood of each token."""
    losses = functional.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")
    return losses.view_as(targets)


def perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def in_bits(loss: float) -> float:
    return loss / math.log(2)
