"""Writes text with a model that train_gpt.py trained, in one process, whatever number of ranks it was trained on.

python examples/generate.py --prompt "def read_lines(path):"
"""

import argparse
import sys
from pathlib import Path

import checkpoint
import data
import torch
from model import Config, Stage, build_stage
from tokenizers import Tokenizer
from torch import Tensor


def next_token(logits: Tensor, *, temperature: float, top_k: int, generator: torch.Generator) -> Tensor:
    """One draw from the top_k likeliest tokens; logits (vocab,). The likeliest itself at temperature 0."""
    if temperature == 0:
        return logits.argmax(keepdim=True)
    best, tokens = logits.topk(min(top_k, logits.numel()))
    return tokens[torch.multinomial((best / temperature).softmax(0), 1, generator=generator)]


@torch.no_grad()
def generate(
    model: Stage,
    tokens: list[int],
    *,
    count: int,
    context: int,
    end: int,
    temperature: float,
    top_k: int,
    seed: int = 0,
) -> list[int]:
    """Appends up to `count` tokens, fewer if the text ends; the model sees the last `context` of them each time."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor(tokens)
    for _ in range(count):
        logits = model(text[None, -context:])[0, -1]
        token = next_token(logits, temperature=temperature, top_k=top_k, generator=generator)
        if token.item() == end:
            break
        text = torch.cat((text, token))
    return [int(token) for token in text]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"), help="run folder (%(default)s)")
    parser.add_argument("--checkpoint", type=Path, help="one of its checkpoints (default: the newest)")
    parser.add_argument("--prompt", default="def ", help="text to go on from (%(default)r)")
    parser.add_argument("--tokens", type=int, default=200, help="to write (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (%(default)s)")
    parser.add_argument("--top-k", type=int, default=50, help="choose among so many (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.temperature < 0 or args.top_k < 1 or args.tokens < 0:
        parser.error("--temperature and --tokens must be at least 0, --top-k at least 1")

    found = args.checkpoint or checkpoint.newest(args.out / "checkpoints")
    if found is None:
        parser.error(f"no checkpoint in {args.out / 'checkpoints'}: train first, or name another run with --out")
    try:
        run = checkpoint.verify(found)["run"]
        model = build_stage(Config(**run["model"]))
        checkpoint.load(found, {f"model.{name}": weight.detach() for name, weight in model.named_parameters()})
    except checkpoint.CheckpointError as error:
        print(f"generate: {error}", file=sys.stderr)
        return 1
    tokenizer = Tokenizer.from_file(str(found.parent.parent / "tokenizer.json"))
    end = tokenizer.encode(data.END_OF_TEXT).ids[0]
    prompt = tokenizer.encode(args.prompt).ids or [end]
    text = generate(
        model.eval(),
        prompt,
        count=args.tokens,
        context=run["arguments"]["seq_len"],
        end=end,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
    )
    print(tokenizer.decode(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
