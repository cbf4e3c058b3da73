"""Real text as a memory-mapped file of tokens.

The text is a folder, a text file, or JSON lines with a text field; by default the source code of the installed Python
standard library, which every machine has. A byte-level BPE is trained on it, every twentieth document is held out,
and the result is cached in one folder:

    tokens.bin       training tokens, then held-out ones; uint16, or uint32 for a vocabulary above 65536
    tokens.json      how many of each, dtype, vocabulary, unigram entropy
    tokenizer.json   of the `tokenizers` library
"""

import hashlib
import json
import os
import shutil
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_EVERY = 20  # documents
MIN_DOCUMENTS = 200  # fewer files are cut into pieces, so that enough can be held out
TOKENIZER_BYTES = 8_000_000  # text that the BPE is trained on: more changes little
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class DataError(ValueError):
    """Text that cannot be used; the message names the file."""


@dataclass(frozen=True)
class Corpus:
    """Source of documents.

    path: folder, text file, or JSON lines (.jsonl, .json); None: the Python standard library.
    field: text field of a JSON line.
    max_bytes: read about this much text; 0: all.
    """

    path: Path | None = None
    field: str = "content"
    max_bytes: int = 0

    def files(self) -> list[Path]:
        """Files of the corpus in a fixed, mixed order, so that a part of them is a fair sample."""
        root = Path(sysconfig.get_paths()["stdlib"]) if self.path is None else self.path
        if not root.exists():
            raise DataError(f"data {root}: no such file or folder")
        if not root.is_dir():
            return [root]
        names: list[str] = []
        for folder, subfolders, files in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS and not name.startswith(".")]
            wanted = [name for name in files if self.path is not None or name.endswith(".py")]
            names += [os.path.relpath(os.path.join(folder, name), root) for name in wanted]
        if not names:
            raise DataError(f"data {root}: the folder holds no files to read")
        return [root / name for name in sorted(names, key=lambda name: (zlib.crc32(name.encode()), name))]

    def documents(self) -> Iterator[str]:
        """Texts in a fixed order. DataError names the file and line that cannot be read."""
        files, left = self.files(), self.max_bytes or float("inf")
        total = sum(file.stat().st_size for file in files)
        used = min(left, total)
        few = used * len(files) < MIN_DOCUMENTS * total  # fewer files are read than documents wanted
        piece = max(1024, int(used) // MIN_DOCUMENTS) if few else None
        for file in files:
            for text in self._read(file, piece):
                if left <= 0:
                    return
                left -= len(text)
                yield text

    def _read(self, file: Path, piece: int | None) -> Iterator[str]:
        number = 0  # line of a JSON-lines file
        try:
            with open(file, encoding="utf-8") as lines:
                if file.suffix in (".jsonl", ".json"):
                    for line in lines:
                        number += 1
                        if line.strip():
                            yield self._field(json.loads(line))
                else:
                    while text := "".join(lines.readlines(piece or -1)):
                        yield text
        except UnicodeDecodeError as error:
            if self.path is not None and file == self.path:
                raise DataError(f"data {file}: not UTF-8 text ({error.reason} at byte {error.start})") from None
            # A folder may hold pictures and the like: they are not part of the corpus.
        except (OSError, ValueError) as error:
            where = f"{file}, line {number}" if number else f"{file}"
            raise DataError(f"data {where}: cannot be read: {error}") from error

    def _field(self, row: object) -> str:
        if not isinstance(row, dict) or not isinstance(row.get(self.field), str):
            have = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
            raise ValueError(f"no text field {self.field!r} (choose with --field; the line has: {have})")
        return str(row[self.field])

    def fingerprint(self, vocab: int) -> str:
        """Changes when the text or how it is tokenised does: name of the cache folder."""
        digest = hashlib.sha256(repr((self.field, self.max_bytes, vocab)).encode())
        for file in self.files():
            stat = file.stat()
            digest.update(f"{file}|{stat.st_size}|{stat.st_mtime_ns}\n".encode())
        return digest.hexdigest()[:12]


@dataclass(frozen=True)
class Header:
    """What tokens.json says. unigram_entropy: nats per token of the whole corpus, the loss of a model that knows
    nothing but how often each token occurs."""

    dtype: str
    vocab: int
    train: int
    held_out: int
    unigram_entropy: float
    text_bytes: int


def prepare(corpus: Corpus, cache: Path, *, vocab: int) -> Path:
    """Tokenises the corpus, once; the folder that holds the result. DataError for text that cannot be used."""
    folder = cache / f"tokens-{corpus.fingerprint(vocab)}"
    if not (folder / "tokens.json").exists():
        unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
        unfinished.mkdir(parents=True)
        try:
            _tokenise(corpus, unfinished, vocab)
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)  # all or nothing: an interrupted run leaves no half cache
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _tokenise(corpus: Corpus, folder: Path, vocab: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    def sample() -> Iterator[str]:
        left = TOKENIZER_BYTES
        for text in corpus.documents():
            if left <= 0:
                return
            left -= len(text)
            yield text

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))

    size = tokenizer.get_vocab_size()
    dtype = np.dtype(np.uint16 if size <= 1 << 16 else np.uint32)
    counts: NDArray[np.int64] = np.zeros(size, dtype=np.int64)
    end, text_bytes, totals = tokenizer.token_to_id(END_OF_TEXT), 0, [0, 0]
    part = folder / "held_out.bin"
    with open(folder / "tokens.bin", "wb") as train, open(part, "wb") as held_out:
        for number, text in enumerate(corpus.documents()):
            ids = np.array([*tokenizer.encode(text).ids, end], dtype=dtype)
            counts += np.bincount(ids, minlength=size)
            text_bytes += len(text.encode())
            which = number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
            totals[which] += ids.size
            ids.tofile(held_out if which else train)
        held_out.flush()
        with open(part, "rb") as source:
            shutil.copyfileobj(source, train)
    part.unlink()
    if not text_bytes:
        raise DataError(f"data {corpus.path}: no text in it")
    share = counts[counts > 0] / counts.sum()
    entropy = float(-(share * np.log(share)).sum())
    header = Header(dtype.name, size, totals[0], totals[1], entropy, text_bytes)
    (folder / "tokens.json").write_text(json.dumps(asdict(header), indent=1) + "\n", encoding="utf-8")


class Tokens:
    """The memory-mapped token file: batches for training, windows for evaluation. Every rank opens its own."""

    def __init__(self, folder: Path, *, seq_len: int) -> None:
        self.header = Header(**json.loads((folder / "tokens.json").read_text(encoding="utf-8")))
        self.seq_len = seq_len
        file, dtype = folder / "tokens.bin", np.dtype(self.header.dtype)
        expected = (self.header.train + self.header.held_out) * dtype.itemsize
        if file.stat().st_size != expected:
            raise DataError(f"{file} has {file.stat().st_size} bytes, not {expected}: delete {folder} to rebuild it")
        for name, have in (("training", self.header.train), ("held-out", self.header.held_out)):
            if have <= seq_len:
                raise DataError(
                    f"data: {have} {name} tokens are too few for one sequence of {seq_len} and its last target: "
                    "give more text (--data) or a shorter --seq-len"
                )
        tokens = np.memmap(file, dtype=dtype, mode="r")
        self.train, self.held_out = tokens[: self.header.train], tokens[self.header.train :]

    def batch(self, step: int, *, batch_size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Inputs and targets (batch_size, seq_len) of a training step: a function of seed and step alone, so a resumed
        run sees what an uninterrupted one would, and every rank can make it without asking another."""
        random = np.random.default_rng((seed, step))
        return self._windows(self.train, random.integers(0, self.header.train - self.seq_len, size=batch_size))

    def held_out_batches(self, count: int, *, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """`count` batches of windows spread evenly over the held-out text, in every call the same windows."""
        starts = np.linspace(0, self.header.held_out - self.seq_len - 1, count * batch_size).astype(np.int64)
        for batch in starts.reshape(count, batch_size):
            yield self._windows(self.held_out, batch)

    def _windows(self, tokens: NDArray[np.unsignedinteger], starts: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        rows = np.stack([tokens[start : start + self.seq_len + 1] for start in starts]).astype(np.int64)
        window = torch.from_numpy(rows)
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()  # the target is the next token
