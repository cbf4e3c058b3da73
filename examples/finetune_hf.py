"""Fine-tunes a model of Hugging Face transformers on conversations, with loss on the answers only, over two processes.

    torchrun --standalone --nproc-per-node 2 examples/finetune_hf.py

needs `pip install "seq1f1b[transformers]"` and downloads nothing: the model is a small Llama with random weights, the
tokenizer is trained here, and the conversations are about the source code of the Python standard library: a module, the
long context, then a question about one of its functions. ``--data`` takes your own, one conversation per line:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}

Each conversation has a row of its own, padded; with ``--pack`` several share one, each as if it were alone. The run
folder then holds model/, which ``AutoModelForCausalLM.from_pretrained`` and ``AutoTokenizer`` load. ``--model``
fine-tunes a model of yours, given by its folder. ``--lora 8`` trains adapters of that rank only and needs
`pip install peft`; model/ then holds the adapters alone, and peft loads them onto the same model.
"""

import argparse
import ast
import json
import os
import random
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor

import seq1f1b
from seq1f1b.ops.packing import Packing
from seq1f1b.transformers import pipeline_stage, save_pretrained

SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="conversations, JSON lines; default: made from the standard library")
    parser.add_argument("--model", type=Path, help="folder of a model and its tokenizer; default: a small random one")
    parser.add_argument("--out", type=Path, default=Path("runs/finetune"), help="(%(default)s)")
    parser.add_argument("--hidden", type=int, default=128, help="of the small model (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of the small model (%(default)s)")
    parser.add_argument("--vocab", type=int, default=1024, help="of its tokenizer (%(default)s)")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens of a row (%(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="(%(default)s)")
    parser.add_argument("--microbatches", type=int, default=4, help="rows per step, M (%(default)s)")
    parser.add_argument("--segments", type=int, default=4, help="per row, k (%(default)s)")
    parser.add_argument("--pack", action="store_true", help="several conversations per row")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of LoRA, the model stays as it is")
    parser.add_argument("--lr", type=float, default=3e-3, help="(%(default)s)")
    return parser.parse_args()


def read_conversations(file: Path) -> list[list[dict[str, str]]]:
    conversations = []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        refuse(f"--data: {error}")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            messages = json.loads(line)["messages"]
            if not messages:
                raise ValueError("it has no messages")
            for message in messages:
                if f"<|{message['role']}|>" not in SPECIAL[2:] or not isinstance(message["content"], str):
                    raise ValueError(f"a message needs a role of user, assistant or system, and text: {message}")
        except (ValueError, KeyError, TypeError) as error:
            refuse(f"{file}, line {number} is no conversation: {error}")
        conversations.append(messages)
    if not any(message["role"] == "assistant" for messages in conversations for message in messages):
        refuse(f"{file} holds no answer of an assistant: there is nothing to learn")
    return conversations


def refuse(text: str) -> NoReturn:
    print(f"finetune_hf.py: {text}", file=sys.stderr)
    raise SystemExit(2)


def write_conversations(file: Path) -> None:
    """Asks what each function with a docstring does; the answer is the first line of the docstring."""

    def conversations() -> Iterator[str]:
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]:
            source = path.read_text(encoding="utf-8", errors="ignore")
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                    question = f"{source[:6000]}\n\nWhat does {node.name} do?"
                    roles = {"user": question, "assistant": text.splitlines()[0]}
                    yield json.dumps({"messages": [{"role": r, "content": c} for r, c in roles.items()]})

    file.write_text("\n".join(conversations()) + "\n", encoding="utf-8")


def train_tokenizer(conversations: list[list[dict[str, str]]], size: int) -> transformers.PreTrainedTokenizerBase:
    trained = ByteLevelBPETokenizer()
    texts = sorted({message["content"] for messages in conversations for message in messages})
    trained.train_from_iterator(texts, vocab_size=size, special_tokens=SPECIAL, show_progress=False)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        extra_special_tokens=SPECIAL[2:],
    )


def encode(messages: list[dict[str, str]], tokenizer: transformers.PreTrainedTokenizerBase, length: int) -> Tensor:
    """Tokens and labels, (2, at most length): labels are the tokens of answers, -100 elsewhere.

    What is too long loses the beginning of its first message.
    """
    turns = []
    for message in messages:
        begin = tokenizer.encode(f"<|{message['role']}|>", add_special_tokens=False)
        body = [*tokenizer.encode(message["content"], add_special_tokens=False), tokenizer.eos_token_id]
        turns.append((begin, body, message["role"] == "assistant"))
    excess = sum(len(begin) + len(body) for begin, body, _ in turns) - length
    if excess > 0:
        begin, body, answer = turns[0]
        turns[0] = (begin, body[min(excess, len(body) - 1) :], answer)
    tokens, labels = [], []
    for begin, body, answer in turns:
        tokens += begin + body
        labels += [-100] * len(begin) + (body if answer else [-100] * len(body))
    return torch.tensor([tokens[:length], labels[:length]])


def build_model(
    args: argparse.Namespace, vocab: int, tokenizer: transformers.PreTrainedTokenizerBase
) -> torch.nn.Module:
    """The small model has no memory yet; each rank gives it to its own stage. Under adapters it is saved first."""
    if args.lora is not None:
        folder = args.model or args.out / "base"
        if args.model is None and is_first():
            small_model(args, vocab, tokenizer).save_pretrained(folder)
        meet()
        return with_adapters(transformers.AutoModelForCausalLM.from_pretrained(folder), args.lora)
    if args.model is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(args.model)
    with torch.device("meta"):
        return small_model(args, vocab, tokenizer)


def with_adapters(model: torch.nn.Module, rank: int) -> torch.nn.Module:
    try:
        import peft
    except ImportError:
        refuse("--lora needs peft: pip install peft")
    return peft.get_peft_model(
        model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    )


def small_model(
    args: argparse.Namespace, vocab: int, tokenizer: transformers.PreTrainedTokenizerBase
) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=args.seq_len,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


class Batches:
    """Conversations in random order as the rows of a step, packed or one to a row."""

    def __init__(
        self,
        args: argparse.Namespace,
        conversations: list[list[dict[str, str]]],
        tokenizer: transformers.PreTrainedTokenizerBase,
    ) -> None:
        self.args, self.conversations, self.tokenizer = args, conversations, tokenizer
        self.chosen = random.Random(0)
        self.waiting: list[Tensor] = []  # the conversation that the rows before had no room for

    def next(self) -> tuple[Packing, Tensor, Tensor, Tensor]:
        """Which conversations went into which row; tokens, targets and documents' ids, (rows, row's tokens)."""
        args, documents = self.args, list[Tensor]()
        while True:
            documents += [self.waiting.pop() if self.waiting else self.one()]
            lengths = [document.shape[1] for document in documents]
            if args.pack:
                longer = seq1f1b.pack_documents(lengths, args.seq_len, multiple_of=args.microbatches)
                if len(longer.rows) > args.microbatches:
                    self.waiting.append(documents.pop())
                    break
                packing = longer
            elif len(documents) == args.microbatches:
                packing = Packing(tuple(lengths), args.seq_len, tuple((i,) for i in range(len(documents))))
                break
        tokens = packing.join([document[0] for document in documents], fill=self.tokenizer.pad_token_id)
        labels = packing.join([document[1] for document in documents], fill=-100)
        # Before the step: a shift within segments would lose the targets at their borders.
        return packing, tokens, seq1f1b.shift_labels(labels, doc_ids=packing.doc_ids), packing.doc_ids

    def one(self) -> Tensor:
        return encode(self.chosen.choice(self.conversations), self.tokenizer, self.args.seq_len)


def load_tokenizer(
    args: argparse.Namespace, conversations: list[list[dict[str, str]]]
) -> transformers.PreTrainedTokenizerBase:
    """The model's, or one trained on the conversations: the same on every rank."""
    if args.model is None:
        return train_tokenizer(conversations, args.vocab)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def train(args: argparse.Namespace, engine: seq1f1b.PipelineEngine, stage: torch.nn.Module, batches: Batches) -> None:
    trained = [parameter for parameter in stage.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr, betas=(0.9, 0.95))
    for step in range(args.steps):
        start = time.perf_counter()
        packing, tokens, target, doc_ids = batches.next()
        answers = int((target != -100).sum())
        # Every answer token weighs the same.
        losses = engine.step(tokens, target=target, kwargs={"doc_ids": doc_ids}, loss_weight=max(answers, 1))
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if losses and (step % 5 == 0 or step == args.steps - 1):
            speed = sum(packing.lengths) / (time.perf_counter() - start)
            print(
                f"step {step:4d}  loss {torch.stack(losses).mean():.4f}  {len(packing.lengths)} conversations  "
                f"{answers} answer tokens  {packing.waste:.0%} padding  {speed:.0f} tokens/s",
                flush=True,
            )


def check_saved(folder: Path, losses: list[Tensor], packing: Packing, tokens: Tensor, target: Tensor) -> None:
    """The pipeline's losses against the saved model, loaded by transformers and run whole by its own attention."""
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    plain = []
    with torch.no_grad():
        for row, tokens_of_row, labels in zip(packing.rows, tokens, target, strict=True):
            lengths = [packing.lengths[i] for i in row]  # each conversation alone
            documents = tokens_of_row[: sum(lengths)].split(lengths)
            logits = torch.cat([whole(document[None], use_cache=False).logits for document in documents], 1)
            plain.append(loss_fn(logits, labels[: sum(lengths)]))
    found, want = torch.stack(losses), torch.stack(plain)
    print(f"saved in {folder}; loss {found.mean():.6f} by the pipeline, {want.mean():.6f} loaded and run whole")
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-4)


def main() -> None:
    args = parse_arguments()
    if "RANK" in os.environ:
        seq1f1b.init_process_group("gloo")
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_ranks))
    torch.manual_seed(rank)

    data = args.data or args.out / "conversations.jsonl"
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        if args.data is None:
            write_conversations(data)
    meet()
    conversations = read_conversations(data)
    tokenizer = load_tokenizer(args, conversations)

    stage = pipeline_stage(build_model(args, len(tokenizer), tokenizer), rank, num_ranks)
    if args.model is None and args.lora is None:
        stage.materialize()
    engine = seq1f1b.PipelineEngine(
        stage,
        num_microbatches=args.microbatches,
        num_segments=args.segments,
        loss_fn=loss_fn,
        arg_rules={"doc_ids": "slice"},
    )
    batches = Batches(args, conversations, tokenizer)
    train(args, engine, stage, batches)

    packing, tokens, target, doc_ids = batches.next()
    losses = engine.eval(tokens, target=target, kwargs={"doc_ids": doc_ids})
    save_pretrained(engine, args.out / "model")
    if rank == 0:
        tokenizer.save_pretrained(args.out / "model")
    meet()
    if losses:  # on the rank of the last stage
        check_saved(args.out / "model", losses, packing, tokens, target)
    engine.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
