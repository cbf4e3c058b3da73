"""Fine-tunes a model of Hugging Face transformers on conversations, with loss on the answers only, over two processes.

    torchrun --standalone --nproc-per-node 2 examples/finetune_hf.py

needs `pip install "seq1f1b[transformers]"` and downloads nothing: the model is a small Llama with random weights, the
tokenizer is trained here, and the conversations are about the source code of the Python standard library: a module, the
long context, then a question about one of its functions. ``--data`` takes your own, one conversation per line:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}

Each conversation has a row of its own, padded; with ``--pack`` several share one, each as if it were alone. Some are
held out: every ``--eval-every`` steps the loss on their answers is told, and a checkpoint written, from which
``--resume`` goes on. The run folder then holds model/, which ``AutoModelForCausalLM.from_pretrained`` and
``AutoTokenizer`` load.

``--model`` fine-tunes a model of yours, given by its folder or its name on the hub: each process reads and writes its
own stage alone. Conversations are written by the chat template of its tokenizer if that has one. ``--lora 8`` trains
adapters of that rank only and needs `pip install peft`; model/ then holds the adapters alone, and peft loads them onto
the model. ``--config run.json`` takes options from a file, as {"steps": 200, "pack": true}.
"""

import argparse
import ast
import itertools
import json
import os
import random
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import checkpoint
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from settings import with_config
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

import seq1f1b
from seq1f1b.attention.packing import Packing
from seq1f1b.extras import needs_extra

with needs_extra("transformers", "tokenizers", "transformers"):
    import jinja2
    import transformers
    from tokenizers import ByteLevelBPETokenizer

    from seq1f1b.transformers import pipeline_stage, save_pretrained

SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
TEMPLATE = """{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="conversations, JSON lines; default: made from the standard library")
    parser.add_argument("--model", help="folder of a model and its tokenizer, or name; default: a small random one")
    parser.add_argument("--out", type=Path, default=Path("runs/finetune"), help="(%(default)s)")
    parser.add_argument("--hidden", type=int, default=128, help="of the small model (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of the small model (%(default)s)")
    parser.add_argument("--vocab", type=int, default=1024, help="of its tokenizer (%(default)s)")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens of a row (%(default)s)")
    parser.add_argument("--dtype", default="auto", help="of the weights, as bfloat16; default: the model's")
    parser.add_argument("--steps", type=int, help="(40, unless --epochs is given)")
    parser.add_argument("--epochs", type=int, help="times that each conversation is seen, in place of --steps")
    parser.add_argument("--held-out", type=int, default=8, help="conversations, at most a tenth of all (%(default)s)")
    parser.add_argument("--eval-every", type=int, default=20, help="steps, also between checkpoints (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of --out")
    parser.add_argument("--microbatches", type=int, default=4, help="rows per step, M (%(default)s)")
    parser.add_argument("--segments", type=int, default=4, help="per row, k (%(default)s)")
    parser.add_argument("--pack", action="store_true", help="several conversations per row")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of LoRA, the model stays as it is")
    parser.add_argument("--lr", type=float, help="(by the model's size: 3e-3 at 1 M parameters, 5e-5 at 1 G)")
    args = parser.parse_args(with_config(parser))
    if args.steps is not None and args.epochs is not None:
        parser.error("--steps and --epochs say the same: give one")
    for name in ("steps", "epochs", "eval_every", "microbatches", "segments", "seq_len"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, must be at least 1")
    if args.steps is None and args.epochs is None:
        args.steps = 40
    return args


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
        chat_template=TEMPLATE,
    )


def encode(messages: list[dict[str, str]], tokenizer: transformers.PreTrainedTokenizerBase, length: int) -> Tensor:
    """Tokens and labels, (2, at most length): labels are the tokens of answers, -100 elsewhere.

    What is too long loses the beginning of its first message.
    """

    def written(count: int, prompt: bool = False) -> str:
        return str(tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=prompt))

    try:
        text = written(len(messages))
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        parts = [(written(i, prompt=True), written(i + 1)) for i in answers]
    except jinja2.TemplateError as error:
        refuse(f"the chat template of the tokenizer does not take the conversation: {error}: {messages!r:.300}")
    if not all(text.startswith(part) for both in parts for part in both):
        refuse(
            "the chat template of the tokenizer writes a turn otherwise once others follow: its answers are not found"
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens, spans = list(encoded["input_ids"]), list(encoded["offset_mapping"])
    is_answer = [any(len(before) <= a < len(after) for before, after in parts) for a, _ in spans]
    labels = [token if counted else -100 for token, counted in zip(tokens, is_answer, strict=True)]
    content = messages[0]["content"].strip()
    begin = max(0, text.find(content))
    first = [i for i, (a, _) in enumerate(spans) if begin <= a < begin + len(content)] or [0]
    excess = min(max(0, len(tokens) - length), len(first) - 1)
    kept = [*range(first[0]), *range(first[0] + excess, len(tokens))][:length]
    return torch.tensor([[tokens[i] for i in kept], [labels[i] for i in kept]])


def build_stage(
    args: argparse.Namespace, tokenizer: transformers.PreTrainedTokenizerBase
) -> seq1f1b.transformers.CausalLMStage:
    """Returns this process's stage. A process holds the whole model only to put adapters into it."""
    place = ranks.rank(), ranks.num_ranks()
    if args.lora is not None:
        folder = args.model or args.out / "base"
        if args.model is None and ranks.rank() == 0 and not args.resume:
            small_model(args, tokenizer).save_pretrained(folder)
        meet()
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=args.dtype)
        return pipeline_stage(with_adapters(model, args.lora), *place)
    if args.model is not None:
        return pipeline_stage(args.model, *place, dtype=args.dtype, balance="time", seq_len=args.seq_len)
    with torch.device("meta"):
        stage = pipeline_stage(small_model(args, tokenizer), *place)
    stage.materialize()
    return stage


def with_adapters(model: torch.nn.Module, rank: int) -> torch.nn.Module:
    try:
        import peft
    except ImportError:
        refuse("--lora needs peft: pip install peft")
    return peft.get_peft_model(
        model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    )


def small_model(args: argparse.Namespace, tokenizer: transformers.PreTrainedTokenizerBase) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
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
    dtype = torch.float32 if args.dtype == "auto" else getattr(torch, args.dtype)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


class Batches:
    """Returns conversations as the rows of steps, packed or one to a row; equal on all ranks."""

    def __init__(
        self,
        args: argparse.Namespace,
        conversations: list[list[dict[str, str]]],
        tokenizer: transformers.PreTrainedTokenizerBase,
    ) -> None:
        self.args, self.fill = args, tokenizer.pad_token_id
        documents = [encode(messages, tokenizer, args.seq_len) for messages in conversations]
        self.documents = [document for document in documents if (document[1] != -100).any()]
        if not self.documents:
            refuse(f"no conversation has an answer within --seq-len {args.seq_len} tokens")
        random.Random(0).shuffle(self.documents)
        count = min(args.held_out, len(self.documents) // 10)
        self.held_out, self.documents = self.documents[:count], self.documents[count:]

    def steps(self) -> list[list[Tensor]]:
        """The conversations of each step. Each epoch has an order of its own; the last step is filled from another."""
        args, made, step = self.args, list[list[Tensor]](), list[Tensor]()
        for epoch in itertools.count():
            for document in random.Random(f"epoch {epoch}").sample(self.documents, len(self.documents)):
                if self.pack([*step, document]) is None:
                    made.append(step)
                    step = []
                    if len(made) == args.steps or (args.epochs is not None and epoch >= args.epochs):
                        return made
                step.append(document)

    def evaluation(self) -> list[list[Tensor]]:
        """Returns the held-out conversations. Rows without labels fill up steps."""
        made, step = list[list[Tensor]](), list[Tensor]()
        for document in self.held_out:
            if self.pack([*step, document]) is None:
                made.append(step)
                step = []
            step.append(document)
        if step:
            empty = torch.tensor([[self.fill], [-100]])
            while not self.args.pack and len(step) < self.args.microbatches:
                step.append(empty)
            made.append(step)
        return made

    def pack(self, documents: list[Tensor]) -> Packing | None:
        """Returns the conversations of each row; None if there are too many for a step."""
        args, lengths = self.args, [document.shape[1] for document in documents]
        if args.pack:
            packing = seq1f1b.pack_documents(lengths, args.seq_len, multiple_of=args.microbatches)
            return packing if len(packing.rows) <= args.microbatches else None
        rows = tuple((i,) for i in range(len(documents)))
        return Packing(tuple(lengths), args.seq_len, rows) if len(documents) <= args.microbatches else None

    def batch(self, documents: list[Tensor]) -> tuple[Packing, Tensor, Tensor, Tensor]:
        """Which conversations went into which row; tokens, targets and documents' ids, (rows, row's tokens)."""
        packing = self.pack(documents)
        assert packing is not None
        tokens = packing.join([document[0] for document in documents], fill=self.fill)
        labels = packing.join([document[1] for document in documents], fill=-100)
        # Before the step: a shift within segments would lose the targets at their borders.
        return packing, tokens, seq1f1b.shift_labels(labels, doc_ids=packing.doc_ids), packing.doc_ids


def load_tokenizer(
    args: argparse.Namespace, conversations: list[list[dict[str, str]]]
) -> transformers.PreTrainedTokenizerBase:
    """Returns the model's tokenizer, or one trained on the conversations: equal on every rank."""
    if args.model is None:
        return train_tokenizer(conversations, args.vocab)
    remedy = "put its files (tokenizer.json, tokenizer_config.json) beside the model's"
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    except (OSError, ValueError) as error:
        refuse(f"{args.model} has no tokenizer that loads: {remedy} ({str(error)[:200]})")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    texts = [message["content"] for messages in conversations for message in messages if message["content"]]
    if texts and not set(tokenizer(texts[0])["input_ids"]) - set(tokenizer.all_special_ids):
        refuse(f"the tokenizer of {args.model} has {len(tokenizer)} entries, none for {texts[0]!r:.40}: {remedy}")
    if tokenizer.chat_template is None:
        tokenizer.chat_template = TEMPLATE
    return tokenizer


def learning_rate(args: argparse.Namespace, engine: seq1f1b.PipelineEngine) -> float:
    """Falls with the size of the model; adapters bear ten times as much."""
    size = sum(ranks.gather(sum(parameter.numel() for parameter in engine.parameters())))
    rate = 3e-3 * (1e6 / size) ** 0.6 * (1 if args.lora is None else 10)
    return args.lr if args.lr is not None else min(rate, 3e-3)


def evaluate(engine: seq1f1b.PipelineEngine, batches: Batches) -> float | None:
    """Mean loss of the held-out answers' tokens, on the rank of the last stage."""
    total, count = 0.0, 0
    for documents in batches.evaluation():
        _, tokens, target, doc_ids = batches.batch(documents)
        losses = engine.eval(tokens, target=target, kwargs={"doc_ids": doc_ids})
        counts = (target.reshape(batches.args.microbatches, -1) != -100).sum(1).tolist()
        if losses:
            total += sum(float(loss) * n for loss, n in zip(losses, counts, strict=True) if n)
            count += sum(counts)
    return total / count if count else None


def train(args: argparse.Namespace, engine: seq1f1b.PipelineEngine, batches: Batches) -> None:
    trained = [parameter for parameter in engine.parameters() if parameter.requires_grad]
    rate, steps, begin = learning_rate(args, engine), batches.steps(), 0
    optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95))
    state = seq1f1b.PipelineState(engine, optimizer)
    run = {name: str(getattr(args, name)) for name in ("data", "model", "lora", "seq_len", "microbatches", "pack")}
    newest = ranks.on_first_rank(lambda: checkpoint.newest(args.out / "checkpoints")) if args.resume else None
    if args.resume and newest is None:
        refuse(f"--resume: there is no whole checkpoint in {args.out / 'checkpoints'}")
    if newest is not None:
        manifest = checkpoint.read_manifest(newest)
        changed = [
            f"--{name.replace('_', '-')} {manifest['run'][name]}" for name in run if manifest["run"][name] != run[name]
        ]
        if changed:
            refuse(f"--resume: {newest} was made with {' '.join(changed)}: give the same")
        checkpoint.load(newest, state)
        begin = manifest["step"]
    for number, documents in enumerate(steps[begin:], begin):
        start = time.perf_counter()
        packing, tokens, target, doc_ids = batches.batch(documents)
        answers = int((target != -100).sum())
        for group in optimizer.param_groups:  # up over a twentieth of the steps, then down to a tenth
            group["lr"] = rate * min(1, (number + 1) / (len(steps) // 20 + 1)) * (1 - 0.9 * number / len(steps))
        # Every answer token weighs the same.
        losses = engine.step(tokens, target=target, kwargs={"doc_ids": doc_ids}, loss_weight=max(answers, 1))
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        done = number + 1
        if losses and (number % 5 == 0 or done == len(steps)):
            speed = sum(packing.lengths) / (time.perf_counter() - start)
            print(
                f"step {number:4d}  loss {torch.stack(losses).nanmean():.4f}  {len(packing.lengths)} conversations  "
                f"{answers} answer tokens  {packing.waste:.0%} padding  {speed:.0f} tokens/s",
                flush=True,
            )
        if done % args.eval_every == 0 or done == len(steps):
            held_out = evaluate(engine, batches)
            if held_out is not None:
                print(
                    f"after {done} steps  loss {held_out:.4f} on {len(batches.held_out)} held-out conversations",
                    flush=True,
                )
            checkpoint.save(args.out / "checkpoints", state, step=done, run=run)


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
    error = 1e-4 if whole.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, want, rtol=10 * error, atol=error)


@record  # torchrun then ends with the error of the rank that failed first
def main() -> None:
    args = parse_arguments()
    if "RANK" in os.environ:
        seq1f1b.init_process_group("gloo")
    rank, num_ranks = ranks.rank(), ranks.num_ranks()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_ranks))
    torch.manual_seed(rank)

    is_given, args.data = args.data is not None, args.data or args.out / "conversations.jsonl"
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        if not is_given:
            write_conversations(args.data)
    meet()
    conversations = read_conversations(args.data)
    tokenizer = load_tokenizer(args, conversations)
    batches = Batches(args, conversations, tokenizer)

    engine = seq1f1b.PipelineEngine(
        build_stage(args, tokenizer),
        num_microbatches=args.microbatches,
        num_segments=args.segments,
        loss_fn=loss_fn,
        arg_rules={"doc_ids": "slice"},
    )
    train(args, engine, batches)

    save_pretrained(engine, args.out / "model")  # each rank its own part
    if rank == 0:
        tokenizer.save_pretrained(args.out / "model")
        print(f"{args.out / 'model'} holds the model: transformers' from_pretrained loads it, plain or for serving")
    meet()
    if args.model is None:  # a small one, which fits into a process whole
        packing, tokens, target, doc_ids = batches.batch(batches.steps()[0])
        losses = engine.eval(tokens, target=target, kwargs={"doc_ids": doc_ids})
        if losses:  # on the rank of the last stage
            check_saved(args.out / "model", losses, packing, tokens, target)
    engine.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
