"""Files of tokens: what is read, what is written, and what is refused before training starts."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distributed.data import token_files
from distributed.data.batches import TokenBatches
from distributed.data.token_files import read_tokens, write_tokens


def write_sparse(path: Path, num_tokens: int) -> None:
    """Write an .npy file of zeros that takes no room on the disk: a header and a hole."""
    with path.open("wb") as file:
        header = {"descr": "<u2", "fortran_order": False, "shape": (num_tokens,)}
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + 2 * num_tokens)


def test_a_bin_file_is_uint16_as_nanogpt_writes_it(tmp_path: Path) -> None:
    written = np.array([50256, 0, 258], np.uint16)
    written.astype("<u2").tofile(tmp_path / "train.bin")
    tokens = read_tokens(tmp_path / "train.bin", vocab_size=50257)
    assert (tokens.dtype, tokens.tolist()) == (np.uint16, written.tolist())
    with pytest.raises(ValueError, match=r"got 50256 at position 0 of .*train\.bin, and vocab_size=256"):
        read_tokens(tmp_path / "train.bin", vocab_size=256)
    with pytest.raises(ValueError, match=r"a directory of tokens must hold texts only, got .*train\.bin"):
        read_tokens(tmp_path)
    (tmp_path / "train.bin").write_bytes(b"abc")
    with pytest.raises(ValueError, match=r"tokens of 2 bytes each, got .*train\.bin of 3 bytes"):
        read_tokens(tmp_path / "train.bin")


def test_any_file_is_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"\xff\r\n\x00")
    tokens = read_tokens(tmp_path / "text")
    assert isinstance(tokens, np.memmap)
    assert tokens.dtype == np.uint8
    assert tokens.tobytes() == b"\xff\r\n\x00"


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64, np.dtype(">u4")])
def test_an_npy_file_is_mapped_read_only(dtype: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.array([5, 0, 99], dtype))
    tokens = read_tokens(str(tmp_path / "tokens.npy"), vocab_size=100)
    assert isinstance(tokens, np.memmap)
    assert tokens.dtype == dtype
    assert tokens.tolist() == [5, 0, 99]
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_a_directory_is_its_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    files = {"b/2.txt": "two", "b/1.txt": "one", "a.txt": "a", "c.txt": "c", "b/3.txt": "", "B.txt": "B"}
    for name, text in {**files, ".hidden": "no", ".git/config": "no", "b/.cache": "no"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "round").symlink_to(tmp_path)
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    tokens = read_tokens(tmp_path)
    assert tokens.tobytes() == b"B\n\na\n\none\n\ntwo\n\nc"
    assert tokens.dtype == np.uint8
    assert not tokens.flags.writeable


def test_a_file_larger_than_memory_is_sampled_at_once(tmp_path: Path) -> None:
    """128 GiB, of which only the pages of the drawn windows are read."""
    num_tokens = 1 << 36
    write_sparse(tmp_path / "tokens.npy", num_tokens)
    tokens = read_tokens(tmp_path / "tokens.npy")
    assert isinstance(tokens, np.memmap)
    assert len(tokens) == num_tokens
    batches = TokenBatches(tokens, batch_size=4, context=1 << 20, seed=0)
    for _ in range(2):
        x, y = batches.next()
        assert x.shape == y.shape == (4, 1 << 20)
        assert not x.any()


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(1, np.uint8), (256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.uint32)],
)
def test_written_tokens_take_the_smallest_dtype(vocab_size: int, dtype: Any, tmp_path: Path) -> None:
    tokens = np.array([0, vocab_size - 1, 0])
    write_tokens(tmp_path / "tokens.npy", tokens, vocab_size=vocab_size)
    read = read_tokens(tmp_path / "tokens.npy", vocab_size=vocab_size)
    assert read.dtype == dtype
    assert read.tolist() == tokens.tolist()
    assert np.load(tmp_path / "tokens.npy").tolist() == tokens.tolist()
    assert os.listdir(tmp_path) == ["tokens.npy"]


def test_parts_are_written_one_after_another(tmp_path: Path) -> None:
    """More than nine tokens: the header's number grows after it was written first."""
    parts = [np.arange(7), np.arange(0, dtype=np.int64), np.arange(990, dtype=np.uint16), np.arange(10)[::-2]]
    write_tokens(tmp_path / "tokens.npy", iter(parts), vocab_size=1000)
    assert read_tokens(tmp_path / "tokens.npy").tolist() == np.concatenate(parts).tolist()


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    write_tokens(path, np.arange(3), vocab_size=3)

    def parts() -> Iterator[np.ndarray]:
        yield np.arange(100)
        raise RuntimeError("the tokenizer failed")

    with pytest.raises(RuntimeError, match="the tokenizer failed"):
        write_tokens(path, parts(), vocab_size=100)
    assert read_tokens(path).tolist() == [0, 1, 2]
    assert os.listdir(tmp_path) == ["tokens.npy"]


@pytest.mark.parametrize(
    ("name", "tokens", "vocab_size", "message"),
    [
        ("t.bin", np.arange(3), 3, r"the name of a token file must end in \.npy, got .*t\.bin"),
        ("t.npy", np.arange(3), 0, "vocab_size must be at least 1, got 0"),
        (
            "t.npy",
            [np.arange(3), np.arange(3.0)],
            3,
            r"part 1 of the tokens must be integers .*float64 of shape \(3,\)",
        ),
        ("t.npy", np.ones((2, 2), int), 3, r"part 0 of the tokens must be integers in one dimension, .*\(2, 2\)"),
        ("t.npy", [np.arange(2), np.arange(3)], 2, "got 2 at position 2 of part 1 of the tokens, and vocab_size=2"),
        ("t.npy", [], 2, r"there must be at least one token, got none for .*t\.npy"),
    ],
)
def test_what_cannot_be_written_is_refused(
    name: str, tokens: Any, vocab_size: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        write_tokens(tmp_path / name, tokens, vocab_size=vocab_size)
    assert os.listdir(tmp_path) == []


def save(array: Any) -> Callable[[Path], None]:
    return lambda path: np.save(path, array)


def cut(path: Path, num_bytes: int) -> None:
    np.save(path, np.arange(100))
    path.write_bytes(path.read_bytes()[:num_bytes])


WHOLE = r"^an \.npy file must be whole and hold numbers, got .*t\.npy: "


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, r"^tokens must be a file or directory that can be read, got .*t\.npy: No such file"),
        (lambda path: path.write_bytes(b""), WHOLE),
        (lambda path: path.write_bytes(b"once upon a time"), WHOLE + "the magic string is not correct"),
        (lambda path: path.write_bytes(b"\x93NUMPY\x01\x00\x02\x00{("), WHOLE),  # fails in Python's tokenizer
        (lambda path: path.write_bytes(b"\x93NUMPY\x02\x00\xff\xff\x00\x00" + b"{" * 65535), WHOLE + "[^\n]*$"),
        (lambda path: cut(path, 40), WHOLE),
        (lambda path: cut(path, 128 + 799), WHOLE + "mmap length is greater than file size"),
        (save(np.array([{"a": 1}])), WHOLE + ".*Python objects"),
        (save(np.arange(3.0)), r"t\.npy must be integers in one dimension, got float64 of shape \(3,\)"),
        (save(np.array([True])), r"t\.npy must be integers in one dimension, got bool of shape \(1,\)"),
        (save(np.ones((2, 3), int)), r"t\.npy must be integers in one dimension, got int64 of shape \(2, 3\)"),
        (save(np.array(3)), r"t\.npy must be integers in one dimension, got int64 of shape \(\)"),
        (save(np.arange(0)), r"^there must be at least one token, got an empty .*t\.npy"),
    ],
)
def test_a_bad_npy_file_is_one_clear_error(make: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    make(tmp_path / "t.npy")
    with pytest.raises(ValueError, match=message):
        read_tokens(tmp_path / "t.npy", vocab_size=1000)


def test_what_is_no_regular_file_is_refused() -> None:
    with pytest.raises(ValueError, match=rf"^tokens must be a regular file or a directory, got {os.devnull}$"):
        read_tokens(os.devnull)


def test_an_empty_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").touch()
    with pytest.raises(ValueError, match=r"^there must be at least one token, got an empty .*text$"):
        read_tokens(tmp_path / "text")


def test_a_directory_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "empty").touch()
    (tmp_path / ".hidden").write_text("text")
    with pytest.raises(ValueError, match=rf"^there must be at least one token, got an empty {tmp_path}$"):
        read_tokens(tmp_path)


def test_a_directory_with_token_files_is_refused(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens.npy", np.arange(3), vocab_size=3)
    with pytest.raises(ValueError, match=r"^a directory of tokens must hold texts only, got .*tokens\.npy$"):
        read_tokens(tmp_path)


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal is played, since root may read everything."""

    def refuse(path: Path, **_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    monkeypatch.setattr(np.lib.format, "open_memmap", refuse)
    (tmp_path / "folder").mkdir()
    text, npy = tmp_path / "folder" / "text", tmp_path / "t.npy"
    for path, culprit in ((text.parent, text), (npy, npy)):
        culprit.write_text("text")
        with pytest.raises(ValueError, match=rf"^tokens must be a .* can be read, got {culprit}: Permission denied$"):
            read_tokens(path)


@pytest.mark.parametrize("block", [1, 4, 5, 100])
@pytest.mark.parametrize(("wrong", "position"), [(-1, 0), (-1, 9), (50, 4), (2**31 - 1, 5)])
def test_a_token_out_of_range_is_found(
    block: int, wrong: int, position: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_files, "_BLOCK", block)
    tokens = np.arange(40, 50, dtype=np.int32)
    np.save(tmp_path / "t.npy", tokens)
    assert read_tokens(tmp_path / "t.npy", vocab_size=50).tolist() == tokens.tolist()
    tokens[position] = wrong
    np.save(tmp_path / "t.npy", tokens)
    rule = "tokens must be from 0 to vocab_size - 1"
    with pytest.raises(
        ValueError, match=rf"^{rule}, got {wrong} at position {position} of .*t\.npy, and vocab_size=50$"
    ):
        read_tokens(tmp_path / "t.npy", vocab_size=50)
    assert read_tokens(tmp_path / "t.npy").tolist() == tokens.tolist()  # unchecked


def test_bytes_are_checked_against_a_small_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"abc\xe4")
    assert len(read_tokens(tmp_path / "text", vocab_size=229)) == 4
    with pytest.raises(ValueError, match=r"got 228 at position 3 of .*text, and vocab_size=228"):
        read_tokens(tmp_path / "text", vocab_size=228)


def test_what_the_dtype_says_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_files, "_BLOCK", 0)  # looking at the tokens would fail
    np.save(tmp_path / "t.npy", np.arange(3, dtype=np.uint16))
    assert len(read_tokens(tmp_path / "t.npy", vocab_size=65536)) == 3


@pytest.mark.parametrize(("wrong", "vocab_size"), [(np.uint8(255), 255), (np.int8(-1), 200)])
def test_the_dtype_does_not_say_enough(wrong: Any, vocab_size: int, tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.array([wrong]))
    with pytest.raises(ValueError, match=f"got {wrong} at position 0 of .*, and vocab_size={vocab_size}"):
        read_tokens(tmp_path / "t.npy", vocab_size=vocab_size)


def test_tokens_of_another_program_are_not_taken_for_bytes(tmp_path: Path) -> None:
    """A file of uint16, as nanoGPT and llm.c write it: its 4 tokens are 8 bytes, all below the vocabulary."""
    np.array([15496, 995, 50256, 11], np.uint16).tofile(tmp_path / "train.tokens")
    with pytest.raises(ValueError, match=r"tokens would be read as bytes, .* 256, got vocab_size=50304: .*\.npy"):
        read_tokens(tmp_path / "train.tokens", vocab_size=50304)
    assert len(read_tokens(tmp_path / "train.tokens", vocab_size=256)) == 8


def test_parts_may_be_lists_as_tokenizers_give_them(tmp_path: Path) -> None:
    write_tokens(tmp_path / "t.npy", ([1, 2], [3], [], (0,)), vocab_size=4)
    assert read_tokens(tmp_path / "t.npy").tolist() == [1, 2, 3, 0]
    for part in (["a"], [1.5], [[1, 2]], [1, [2]], [2**80]):
        with pytest.raises(ValueError, match="part 0 of the tokens must be integers in one dimension"):
            write_tokens(tmp_path / "t.npy", [part], vocab_size=4)
    x, y = TokenBatches([5, 6, 7, 8], batch_size=1, context=3, seed=0).next()
    assert (x.tolist(), y.tolist()) == ([[5, 6, 7]], [[6, 7, 8]])


@pytest.mark.parametrize("name", ["text", "tokens.npy"])
def test_a_file_that_shrinks_while_it_is_read_is_an_error(name: str, tmp_path: Path) -> None:
    """Not a SIGBUS, which ends the process without a word."""
    path = tmp_path / name
    np.save(path.with_suffix(".npy"), np.zeros(100_000, np.uint8))
    path.with_suffix(".npy").rename(path)
    tokens = read_tokens(path)
    batches = TokenBatches(tokens[10:], batch_size=2, context=8, seed=0)
    batches.next()
    os.truncate(path, 50)
    size = len(tokens) + (128 if path.suffix else 0)
    with pytest.raises(ValueError, match=rf"{name} has shrunk from {size} bytes to 50 while it was being read"):
        batches.next()
    with pytest.raises(ValueError, match="has shrunk"):
        token_files.check_range(tokens, 10, "tokens")
