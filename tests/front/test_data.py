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


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder, cache = (tmp_path_factory.mktemp("data") / name for name in ("text", "cache"))
    folder.mkdir()
    for i in range(240):
        (folder / f"file{i}.txt").write_text(f"document {i} says that {i} times two is {2 * i}; naïve, 你好\n" * 3)
    return folder, data.prepare(data.Corpus(folder), cache, vocab=300)


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


def test_a_batch_depends_on_seed_and_step_alone(prepared: tuple[Path, Path]) -> None:
    one, other = data.Tokens(prepared[1], seq_len=16), data.Tokens(prepared[1], seq_len=16)
    one.batch(0, batch_size=3)
    inputs, target = one.batch(7, batch_size=3, seed=5)
    assert inputs.shape == target.shape == (3, 16) and inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], target[:, :-1])
    assert torch.equal(inputs, other.batch(7, batch_size=3, seed=5)[0])
    assert not torch.equal(inputs, other.batch(8, batch_size=3, seed=5)[0])
    assert not torch.equal(inputs, other.batch(7, batch_size=3, seed=6)[0])


def test_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "code.jsonl"
    file.write_text("".join(json.dumps({"path": f"{i}.py", "content": f"print({i})\n"}) + "\n" for i in range(50)))
    assert list(data.Corpus(file).documents()) == [f"print({i})\n" for i in range(50)]
    assert list(data.Corpus(file, field="path").documents())[3] == "3.py"


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
