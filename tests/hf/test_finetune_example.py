"""Does the example train, save and resume, and refuse data by its line?"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import environment
from slices import full_only

transformers = pytest.importorskip("transformers", reason='needs the extra: pip install "seq1f1b[transformers]"')

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_hf.py"
CONVERSATIONS = [
    [("system", "Be brief."), ("user", "one " * 40), ("assistant", "two"), ("user", "three"), ("assistant", "four")],
    [("user", "five " * 9), ("assistant", "six six")],
]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def arguments(folder: Path, lines: list[str], flags: tuple[str, ...], steps: int | None) -> list[str]:
    (folder / "data.jsonl").write_text("\n".join(lines))
    short = {} if steps is None else {"steps": steps}
    short |= {"seq-len": 64, "layers": 3, "hidden": 32, "vocab": 300, "microbatches": 2, "segments": 3}
    return [*(f"--{name}={value}" for name, value in short.items()), "--data=data.jsonl", "--out=run", *flags]


def launch(folder: Path, lines: list[str], *flags: str, steps: int | None = 4) -> subprocess.CompletedProcess[str]:
    """As a user does, by torchrun."""
    by = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    return subprocess.run(
        [*by, *arguments(folder, lines, flags, steps)],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("finetune_hf", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(EXAMPLE.parent))
        spec.loader.exec_module(example)
    return example


@pytest.fixture
def finetune(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the example in this process, on one rank."""
    example = load_example()
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)

    def run(folder: Path, lines: list[str], *flags: str, steps: int | None = 4) -> Any:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["finetune_hf.py", *arguments(folder, lines, flags, steps)])
        code = 0
        try:
            example.main()
        except SystemExit as end:
            code = int(end.code or 0)
        return subprocess.CompletedProcess([], code, *capsys.readouterr())

    return run


def as_line(conversation: list[tuple[str, str]]) -> str:
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in conversation]})


@pytest.mark.parametrize("flags", [("--pack", "--lora=4"), *full_only(((),), (("--pack",),), (("--lora=4",),))])
def test_the_example_trains_saves_and_agrees_with_the_loaded_model(tmp_path, flags):
    """It compares the two losses itself: that of the pipeline and that of each conversation run whole and alone."""
    done = launch(tmp_path, [as_line(c) for c in CONVERSATIONS], *flags)
    assert done.returncode == 0, done.stderr
    counts = [int(line.split()[4]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert sum(counts) > 2 * len(counts) if "--pack" in flags else set(counts) == {2}  # conversations in two rows
    losses = [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    example = load_example()
    messages = json.loads(as_line(CONVERSATIONS[0]))["messages"]
    for length in (200, 24):  # whole, and without the beginning of its first message
        tokens, labels = example.encode(messages, tokenizer, length)
        counted = labels != -100
        assert len(tokens) <= length and torch.equal(labels[counted], tokens[counted])
        if length == 200:
            assert tokenizer.decode(labels[counted]) == "two<|end|>four<|end|>"


def test_the_example_resumes_and_takes_a_folder_with_a_chat_template(finetune, tmp_path):
    lines = [as_line(CONVERSATIONS[i % 2]) for i in range(24)]
    flags = ("--epochs=1", "--eval-every=4", "--held-out=2")
    done = finetune(tmp_path, lines, *flags, steps=None)
    assert done.returncode == 0, done.stderr
    told = re.findall(r"(?:step|after) .*loss \d.\d+", done.stdout)
    assert [line.split()[:2] for line in told][-2:] == [["step", "10"], ["after", "11"]]  # of 22 in rows of 2

    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000011")
    done = finetune(tmp_path, lines, *flags, "--resume", steps=None)
    assert done.returncode == 0, done.stderr
    again = re.findall(r"(?:step|after) .*loss \d.\d+", done.stdout)
    assert again == told[-len(again) :] and len(again) == 2  # from step 8 on

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "run" / "model")
    flags = ("--model=run/model", "--out=second", "--dtype=bfloat16", "--epochs=1", "--seq-len=300")
    done = finetune(tmp_path, lines[:4], *flags, steps=None)
    assert done.returncode == 0, done.stderr
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "second" / "model")
    assert (
        saved.dtype == torch.bfloat16
        and "[{{ m.role }}]" in transformers.AutoTokenizer.from_pretrained(tmp_path / "second" / "model").chat_template
    )
    done = finetune(tmp_path, lines[:4], *flags, "--resume", "--microbatches=1", steps=None)
    assert "was made with --microbatches 2: give the same" in done.stderr

    encode = load_example().encode
    messages = json.loads(lines[0])["messages"]
    tokens, labels = encode(messages, tokenizer, 300)
    assert tokenizer.decode(tokens).startswith("[system] Be brief.<|end|>[user] one one")
    assert tokenizer.decode(labels[labels != -100]) == "two<|end|>four<|end|>"


def test_the_example_refuses_a_line_that_is_no_conversation(finetune, tmp_path):
    done = finetune(tmp_path, [as_line(CONVERSATIONS[1]), '{"messages": [{"role": "wizard", "content": "hm"}]}'])
    assert "line 2 is no conversation" in done.stderr and "wizard" in done.stderr
    assert done.returncode == 2 and not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize(("kind", "text"), [("llama", "bare has no token"), ("gpt2", "tokenizer of bare has")])
def test_the_example_refuses_a_model_without_a_tokenizer(finetune, tmp_path, kind, text):
    """transformers makes an empty one for some types of models, and fails for others."""
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "bare")
    done = finetune(tmp_path, [as_line(each) for each in CONVERSATIONS], "--model=bare")
    assert text in done.stderr and "put its files (tokenizer.json" in done.stderr
    assert done.returncode == 2 and not (tmp_path / "run" / "model").exists()
