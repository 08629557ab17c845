from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsieve.tasks import DataError, Task, build_model, text
from gradsieve.tasks.text import CHARACTER_WINDOW, WORD_WINDOW, load_characters, load_words, perplexity, windows

LOADERS = {"characters": load_characters, "words": load_words}
each_task = pytest.mark.parametrize("name", LOADERS)
LINE = "the quick brown fox jumps over the lazy dog\n"


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def stream(task: Task, part: str) -> list[int]:
    """The tokens of a part, as far as windows go."""
    examples = getattr(task, part)
    return [*examples.inputs.flatten().tolist(), int(examples.targets[-1, -1])]


@given(st.integers(2, 200), st.integers(1, 20))
def test_windows_tile_the_tokens_and_targets_are_the_next_ones(count: int, length: int) -> None:
    tokens = np.arange(count)
    if count <= length:
        with pytest.raises(DataError, match=f"too short: {count} things, and one window takes {length + 1}"):
            windows(tokens, length, "things")
        return
    examples = windows(tokens, length, "things")
    assert examples.inputs.flatten().tolist() == list(range(len(examples) * length))
    assert torch.equal(examples.targets, examples.inputs + 1)
    assert count - 1 - len(examples) * length < length


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r\ufeff"), min_size=1, max_size=30))
def test_characters_can_be_read_back(tmp_path_factory: pytest.TempPathFactory, some: str) -> None:
    content = f"ä{some}" * 1000
    task = load_characters(write(tmp_path_factory.getbasetemp() / "characters.txt", content))
    vocabulary = sorted(set(content))
    assert "".join(vocabulary[token] for token in stream(task, "train")) == content[: len(stream(task, "train"))]
    cut = len(content) * 9 // 10
    held_out = stream(task, "test")
    assert "".join(vocabulary[token] for token in held_out) == content[cut : cut + len(held_out)]


def test_characters_of_the_test_alone_are_unknown(tmp_path: Path) -> None:
    task = load_characters(write(tmp_path / "a.txt", "ab" * 900 + "xayb" * 50))
    assert stream(task, "test")[:8] == [2, 0, 2, 1] * 2
    assert build_model(task, "gpt")(task.test.inputs[:1]).shape == (1, CHARACTER_WINDOW, 3)


def test_words_are_split_at_blanks_and_lines_end_in_a_word_of_their_own(tmp_path: Path) -> None:
    task = load_words(write(tmp_path / "a.txt", "a  b\tc a\n\n a\r\n" * 200))
    assert stream(task, "train")[:8] == [1, 3, 4, 1, 2, 2, 1, 2]
    assert task.train.inputs.shape[1] == WORD_WINDOW


def test_a_text_ends_a_line_whether_or_not_it_says_so() -> None:
    assert text._words("a b\nc") == text._words("a b\nc\n") == ["a", "b", "<eos>", "c", "<eos>"]


def test_frequent_words_are_kept_and_the_others_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "MOST_WORDS", 4)
    train = write(tmp_path / "train.txt", "a b a b c <unk> a d " * 100)
    write(tmp_path / "test.txt", "b e a <eos> c d <unk> " * 20)
    task = load_words(train.parent)
    assert stream(task, "train")[:8] == [1, 2, 1, 2, 3, 0, 1, 0]
    # <eos> comes once in the training text: it is none of the four
    assert stream(task, "test")[:7] == [2, 0, 1, 0, 3, 0, 0]
    assert build_model(task, "gpt")(task.test.inputs[:1]).shape == (1, WORD_WINDOW, 4)


@each_task
@pytest.mark.parametrize(
    "names",
    [
        ("train.txt", "test.txt", "valid.txt"),
        ("train.txt", "valid.txt"),
        ("train.txt", "val.txt", "readme.md"),
        ("wiki.train.tokens", "wiki.test.tokens", "wiki.valid.tokens"),
        ("ptb.train.txt", "ptb.test.txt", "ptb.valid.txt"),
    ],
)
def test_a_folder_may_have_files_for_training_and_test(tmp_path: Path, name: str, names: tuple[str, ...]) -> None:
    for other in names:
        write(tmp_path / other, "no " * 1000)
    write(tmp_path / names[0], LINE * 200)
    write(tmp_path / names[1], LINE * 40)
    task = LOADERS[name](tmp_path)
    apart = stream(task, "test")
    assert apart == stream(task, "train")[: len(apart)]
    assert len(apart) > 320


@each_task
@pytest.mark.parametrize("file", ["corpus.txt", "train.txt"])
def test_a_folder_may_have_one_text(tmp_path: Path, name: str, file: str) -> None:
    write(tmp_path / "notes.md", b"\xff")
    path = write(tmp_path / file, LINE * 200)
    assert torch.equal(LOADERS[name](tmp_path).test.inputs, LOADERS[name](path).test.inputs)


@each_task
def test_a_byte_order_mark_is_no_character(tmp_path: Path, name: str) -> None:
    plain, marked = write(tmp_path / "a", LINE * 200), write(tmp_path / "b", "\ufeff" + LINE * 200)
    assert stream(LOADERS[name](plain), "train") == stream(LOADERS[name](marked), "train")


@each_task
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "text is empty"),
        (b" \n \n", "text is empty"),
        (b"\xef\xbb\xbf", "text is empty"),
        (b"abc\0def", r"text is a binary file \(byte 3 is zero\)"),
        (b"abc\xff", "text is not UTF-8: invalid start byte at byte 3"),
        (b"\x1f\x8b\x08gzip", "text is not UTF-8"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        LOADERS[name](write(tmp_path / "text", content))


def test_a_text_without_a_window_is_refused_with_the_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "short.txt", "ab " * 400)
    with pytest.raises(DataError, match="too short: 120 characters of the test part, and one window takes 129"):
        load_characters(path)
    with pytest.raises(DataError, match="too short: 41 words of the test part, and one window takes 65"):
        load_words(path)
    with pytest.raises(DataError, match="too short: 2 characters of the training part"):
        load_characters(write(path, "abc"))


@each_task
def test_what_is_missing_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=f"the task {name} needs --data: a UTF-8 text file"):
        LOADERS[name](None)
    with pytest.raises(DataError, match="nowhere: there is no such file"):
        LOADERS[name](tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"holds no \.txt file: give a UTF-8 text file, or a folder with"):
        LOADERS[name](tmp_path)
    write(tmp_path / "a.txt", "a")
    write(tmp_path / "b.txt", "b")
    with pytest.raises(DataError, match=r"holds several \.txt files \(a\.txt, b\.txt\)"):
        LOADERS[name](tmp_path)


@each_task
def test_the_loss_is_the_mean_of_the_scores_over_tokens(tmp_path: Path, name: str) -> None:
    task = LOADERS[name](write(tmp_path / "a", LINE * 200))
    targets = task.test.targets[:2]
    outputs = torch.randn(*targets.shape, 40)
    scores = task.measure.score(outputs, targets)
    assert scores.shape == targets.shape
    torch.testing.assert_close(task.loss(outputs, targets), scores.mean())
    assert torch.allclose(scores[1, 3], -outputs[1, 3].log_softmax(0)[targets[1, 3]])


@each_task
def test_less_is_better_and_a_guess_among_equals_costs_their_number(tmp_path: Path, name: str) -> None:
    measure = LOADERS[name](write(tmp_path / "a", LINE * 200)).measure
    assert not measure.higher_is_better
    expected = {"characters": ("bits_per_character", 5), "words": ("perplexity", 32)}
    assert measure.name == expected[name][0]
    assert measure.finish(math.log(32)) == pytest.approx(expected[name][1])


def test_a_perplexity_beyond_all_numbers_is_infinite() -> None:
    assert perplexity(1e4) == perplexity(math.inf) == math.inf
    assert math.isnan(perplexity(math.nan))


@each_task
@pytest.mark.parametrize("model", ["lstm", "gpt"])
def test_models_take_the_windows(tmp_path: Path, name: str, model: str) -> None:
    task = LOADERS[name](write(tmp_path / "a", LINE * 200))
    assert next(iter(task.models)) == "lstm"
    inputs = task.train.inputs[:2]
    outputs = build_model(task, model)(inputs)
    assert outputs.shape[:2] == inputs.shape
    assert outputs.shape[2] > max(stream(task, "train"))
