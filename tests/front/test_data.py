"""Is the text of the examples tokenised, split and sampled as promised, and is bad input named?"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
data = pytest.importorskip("data", reason="needs torch and tokenizers")
tokenizers = pytest.importorskip("tokenizers")


def write_folder(root: Path, count: int = 240) -> Path:
    root.mkdir()
    for i in range(count):
        (root / f"file{i}.txt").write_text(f"document {i} says that {i} times two is {2 * i}; naïve, 你好\n" * 3)
    return root


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("data")
    folder = write_folder(base / "text")
    return folder, data.prepare(data.Corpus(folder), base / "cache", vocab=300)


def test_tokens_decode_to_the_text_and_every_twentieth_document_is_held_out(prepared: tuple[Path, Path]) -> None:
    folder, cache = prepared
    tokens = data.Tokens(cache, seq_len=16)
    tokenizer = tokenizers.Tokenizer.from_file(str(cache / "tokenizer.json"))
    end = tokenizer.token_to_id(data.END_OF_TEXT)

    def texts(ids: np.ndarray) -> list[str]:
        assert ids[-1] == end
        cuts = np.flatnonzero(ids == end)
        parts = np.split(ids, cuts + 1)[:-1]
        return [tokenizer.decode([int(i) for i in part[:-1]]) for part in parts]

    train, held_out = texts(tokens.train), texts(tokens.held_out)
    documents = list(data.Corpus(folder).documents())
    assert held_out == documents[19::20]
    assert sorted(train + held_out) == sorted(file.read_text() for file in folder.iterdir())


def test_unigram_entropy_is_that_of_all_tokens(prepared: tuple[Path, Path]) -> None:
    tokens = data.Tokens(prepared[1], seq_len=16)
    ids = torch.from_numpy(np.concatenate([tokens.train, tokens.held_out]).astype(np.int64))
    share = torch.bincount(ids).double() / ids.numel()
    expected = torch.distributions.Categorical(share).entropy().item()
    assert tokens.header.unigram_entropy == pytest.approx(expected, rel=1e-12)


def test_a_batch_depends_on_seed_and_step_alone(prepared: tuple[Path, Path]) -> None:
    one, other = data.Tokens(prepared[1], seq_len=16), data.Tokens(prepared[1], seq_len=16)
    one.batch(0, batch_size=3)
    inputs, target = one.batch(7, batch_size=3, seed=5)
    assert inputs.shape == target.shape == (3, 16) and inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], target[:, :-1])
    assert torch.equal(inputs, other.batch(7, batch_size=3, seed=5)[0])
    assert not torch.equal(inputs, other.batch(8, batch_size=3, seed=5)[0])
    assert not torch.equal(inputs, other.batch(7, batch_size=3, seed=6)[0])


def test_held_out_windows_span_the_held_out_text(prepared: tuple[Path, Path]) -> None:
    tokens = data.Tokens(prepared[1], seq_len=16)
    batches = list(tokens.held_out_batches(4, batch_size=2))
    assert [tuple(inputs.shape) for inputs, _ in batches] == [(2, 16)] * 4
    assert batches[0][0][0].tolist() == tokens.held_out[:16].tolist()
    assert batches[-1][1][-1].tolist() == tokens.held_out[-16:].tolist()


def test_the_cache_is_used_again_until_the_text_changes(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "text", 60)
    corpus = data.Corpus(folder)
    first = data.prepare(corpus, tmp_path / "cache", vocab=270)
    written = (first / "tokens.bin").stat().st_mtime_ns
    assert data.prepare(corpus, tmp_path / "cache", vocab=270) == first
    assert (first / "tokens.bin").stat().st_mtime_ns == written
    (folder / "file3.txt").write_text("something else\n")
    assert data.prepare(corpus, tmp_path / "cache", vocab=270) != first
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")]


def test_one_text_file_is_cut_into_documents(tmp_path: Path) -> None:
    text = "".join(f"line {i} of a long file\n" for i in range(20_000))
    (tmp_path / "long.txt").write_text(text)
    corpus = data.Corpus(tmp_path / "long.txt")
    assert "".join(corpus.documents()) == text
    tokens = data.Tokens(data.prepare(corpus, tmp_path / "cache", vocab=300), seq_len=64)
    assert 0.03 < tokens.header.held_out / (tokens.header.train + tokens.header.held_out) < 0.07


def test_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "code.jsonl"
    file.write_text("".join(json.dumps({"path": f"{i}.py", "content": f"print({i})\n"}) + "\n" for i in range(50)))
    assert list(data.Corpus(file).documents()) == [f"print({i})\n" for i in range(50)]
    assert list(data.Corpus(file, field="path").documents())[3] == "3.py"


def test_max_bytes_limits_what_is_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "text", 100)
    some, everything = list(data.Corpus(folder, max_bytes=2000).documents()), list(data.Corpus(folder).documents())
    assert some == everything[: len(some)] and 2000 <= sum(map(len, some)) < 2400


BAD_TEXTS = {  # files by name, and what is said
    "missing field.jsonl": (
        b'{"content": "a"}\n{"text": "b"}\n',
        r"line 2.*no text field 'content'.*the line has: text",
    ),
    "not json.jsonl": (b'{"content": "a"}\n{"content": \n', "line 2.*cannot be read"),
    "not a row.jsonl": (b"[1]\n", "line 1.*no text field"),
    "nowhere": (None, "no such file"),
    ".": (None, "holds no files"),
    "empty.txt": (b"", "no text"),
    "picture.txt": (b"\x89PNG\xff\xfe", "not UTF-8"),
}


@pytest.mark.parametrize("name", BAD_TEXTS)
def test_text_that_cannot_be_used_is_named(tmp_path: Path, name: str) -> None:
    contents, message = BAD_TEXTS[name]
    (tmp_path / "text").mkdir()
    file = tmp_path / "text" / name
    if contents is not None:
        file.write_bytes(contents)
    with pytest.raises(ValueError, match=message) as error:
        data.prepare(data.Corpus(file), tmp_path / "cache", vocab=300)
    assert str(file) in str(error.value)
    assert not (tmp_path / "cache").exists() or not any((tmp_path / "cache").iterdir())


def test_text_that_is_too_short_is_named(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short to hold anything out\n" * 3)
    folder = data.prepare(data.Corpus(tmp_path / "short.txt"), tmp_path / "cache", vocab=300)
    with pytest.raises(ValueError, match=r"tokens are too few for one sequence of 512"):
        data.Tokens(folder, seq_len=512)


def test_a_truncated_token_file_is_named(tmp_path: Path) -> None:
    folder = data.prepare(data.Corpus(write_folder(tmp_path / "text", 60)), tmp_path / "cache", vocab=270)
    with open(folder / "tokens.bin", "r+b") as file:
        file.truncate(100)
    with pytest.raises(ValueError, match=r"tokens\.bin has 100 bytes.*delete"):
        data.Tokens(folder, seq_len=16)
