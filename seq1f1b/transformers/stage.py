"""Runs a stage of a transformers model: the model's forward, with stand-ins for modules on other stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seq1f1b.attention.causal import positions
from seq1f1b.attention.unit import current
from seq1f1b.engine.ties import held
from seq1f1b.engine.vocabulary import VocabularyParallelEmbedding, VocabularyParallelHead
from seq1f1b.transformers.attention_function import no_mask, refuse_dropout
from seq1f1b.transformers.initial import initialize
from seq1f1b.transformers.look import RecordedModel
from seq1f1b.transformers.state import mixers, note_documents
from seq1f1b.transformers.twins import as_layer

__all__ = ["AbsentLayer", "CausalLMStage", "Entry", "Exit", "Message", "NoEmbedding"]


class CausalLMStage(nn.Module):
    """A stage made by :func:`pipeline_stage`; parameters and state have the names of the unsplit model.

    The first stage takes token ids (batch, tokens), later stages take hidden states (batch, tokens, hidden). The last
    stage returns logits (batch, tokens, vocabulary), earlier stages return hidden states. With ``vocabulary="ranks"``
    all stages take and return hidden states. If layers need more tensors from earlier stages, stages hand on a tuple.
    Positions count along the sequence, or within packed documents if every stage is given ``doc_ids`` (batch, tokens)
    by :func:`seq1f1b.document_starts`.

    Attributes:
        causal_lm: this stage's part of the transformers model.
        peft_model: a ``peft.PeftModel`` around ``causal_lm``, to name, save and load the adapters, not to run the
            stage; None without adapters.
        embedding, head: with ``vocabulary="ranks"``, this rank's shards, which are not part of the stage: give both to
            the engine as ``embedding`` and ``loss_fn``; else None.
        pipeline_place: (stage index, number of stages).
        tied_parameters: parameters with copies on other stages, keyed by the first name in the model.
    """

    causal_lm: Any
    peft_model: Any
    embedding: VocabularyParallelEmbedding | None
    head: VocabularyParallelHead | None
    ends: tuple[Entry | None, Exit | None]
    pipeline_place: tuple[int, int]
    dropout = 0.0  # attention dropout in training

    def __init__(
        self,
        causal_lm: Any,
        whole: RecordedModel,
        place: tuple[int, int],
        ends: tuple[Entry | None, Exit | None],
        tied: dict[str, list[str]],
        shards: tuple[VocabularyParallelEmbedding | None, VocabularyParallelHead | None],
        elsewhere: Mapping[str, nn.Module],
    ) -> None:
        super().__init__()
        # The model's children become children of the stage, under the model's names; causal_lm itself is no child.
        self.__dict__.update(causal_lm=causal_lm, peft_model=None, embedding=shards[0], head=shards[1], ends=ends)
        self.__dict__["pipeline_place"] = place
        for name, child in causal_lm.named_children():
            self.add_module(name, child)
        self.__dict__["_elsewhere"] = dict(elsewhere)  # other stages' modules, if without memory
        causal_lm.get_submodule(whole.decoder).__dict__["seq1f1b_ends"] = ends
        self._decoder, self._options, self._takes_positions = whole.decoder, whole.options, whole.takes_positions
        self._carries = bool(mixers(causal_lm))  # whether layers keep state along the sequence
        self._tied = tied
        self.train(causal_lm.training)

    @property
    def shards(self) -> list[VocabularyParallelEmbedding | VocabularyParallelHead]:
        """The vocabulary shards of this rank, none or embedding and head."""
        return [shard for shard in (self.embedding, self.head) if shard is not None]

    @property
    def tied_parameters(self) -> dict[str, nn.Parameter]:
        return held(self, self._tied)

    @property
    def config(self) -> Any:
        """The config of the whole model."""
        return self.causal_lm.config

    @property
    def generation_config(self) -> Any:
        return self.causal_lm.generation_config

    def of_whole(self, model: Any) -> tuple[nn.Module, Callable[..., Tensor]]:
        """Returns the base model, and a function that calls it with a stage's arguments, for ``engine.verify``."""
        base = model.get_base_model() if hasattr(model, "get_base_model") else model

        def logits(tokens: Tensor) -> Tensor:
            return base(input_ids=tokens, use_cache=False, return_dict=True).logits  # type: ignore[no-any-return]

        def call(tokens: Tensor, doc_ids: Tensor | None = None, **_: Any) -> Tensor:
            if doc_ids is None:
                return logits(tokens)
            rows = []
            for row, ids in zip(tokens, doc_ids, strict=True):  # one document at a time, for any kind of attention
                lengths = ids.unique_consecutive(return_counts=True)[1].tolist()
                rows.append(torch.cat([logits(document[None]) for document in row.split(lengths)], 1))
            return torch.cat(rows)

        return base, call

    def activation_checkpointing_enable(self, **options: Any) -> None:
        self.causal_lm.activation_checkpointing_enable(**options)

    def materialize(self, device: torch.device | str = "cpu") -> None:
        """Gives memory and transformers' initial values to a stage cut from a model on the meta device.

        Weights are drawn at random. Buffers get the values of ``from_pretrained``.

        Raises:
            ValueError: transformers does not initialize a tensor, such as adapters of peft.
        """
        if self.peft_model is not None:
            raise ValueError("transformers does not initialize adapters of peft: give memory before get_peft_model")
        self.initialize(self.allocate(device))
        for shard in reversed(self.shards):
            self.causal_lm._init_weights(shard.layer)

    def initialize(self, made: Sequence[Tensor]) -> None:
        """Fills the stage's tensors among ``made`` with transformers' initial values."""
        initialize(self.causal_lm, self.__dict__["_elsewhere"], made)

    def allocate(self, device: torch.device | str) -> list[Tensor]:
        """Gives memory to the stage and its shards; returns the tensors without values.

        Buffers with values keep the values. A shared parameter stays shared.
        """
        made: dict[Tensor, Tensor] = {}
        for module in (module for whole in (self, *self.shards) for module in whole.modules()):
            stores: Any = (module._parameters, module._buffers)
            for tensors in stores:
                for old in tensors.values():
                    if old is None or old in made:
                        continue
                    is_parameter = isinstance(old, nn.Parameter)
                    new = torch.empty_like(old, device=device) if old.is_meta or is_parameter else old.to(device)
                    made[old] = nn.Parameter(new, old.requires_grad) if is_parameter else new
                tensors.update({name: made[old] for name, old in tensors.items() if old is not None})
        return [new for old, new in made.items() if old.is_meta or isinstance(old, nn.Parameter)]

    def train(self, mode: bool = True) -> CausalLMStage:
        """Sets the training mode; raises ValueError for a model with attention dropout or layerdrop."""
        if mode:
            refuse_dropout("attention dropout", self.dropout)
            refuse_dropout("layerdrop", getattr(self.config, "layerdrop", 0.0))
        return super().train(mode)

    def check_before_step(self, step: Any) -> None:
        """Raises ValueError for an argument of the step that would change the model's result."""
        for given in step.batch.kwargs or ():
            is_mask = isinstance(mask := given.get("attention_mask"), Tensor)
            check_says_nothing({name: value for name, value in given.items() if value is not mask or not is_mask})
            if is_mask:
                step.batch.read.ask([mask.all()], lambda found: check_says_nothing({"attention_mask": not found[0][0]}))

    def forward(
        self, x: Tensor, *others: Tensor, doc_ids: Tensor | None = None, **given: Any
    ) -> Tensor | tuple[Tensor, ...]:
        """Runs the stage on token ids or hidden states, and on further tensors of the stage before.

        Args:
            others: tensors of the stage before; doc_ids may be the last.
            given: other arguments of the model, allowed only if they change nothing, as an attention_mask of ones.
        """
        if x.shape[1] == 0:
            raise ValueError(f"the stage is given {tuple(x.shape)}, which holds no token: leave such a batch out")
        if given and current() is None:
            check_says_nothing(given)
        if doc_ids is None and others and not others[-1].is_floating_point():
            *others, doc_ids = others  # type: ignore[assignment]
        if doc_ids is None:
            unit = current()
            mask = no_mask(x) if unit is not None and unit.num_parts > 1 else None
            return self.run((x, *others), positions(x)[None], mask)
        position_ids = positions(x, doc_ids=doc_ids)
        if self._carries:
            note_documents(position_ids)
        return self.run((x, *others), position_ids, doc_ids.to(torch.int32)[:, None, None])

    def run(
        self, given: Sequence[Tensor], position_ids: Tensor, attention_mask: Tensor | None
    ) -> Tensor | tuple[Tensor, ...]:
        entry, exit = self.ends
        message = Message(0) if entry is None else entry.message
        if (len(given) - message.others == 1) != (message.streams is None) or len(given) <= message.others:
            what = "one tensor" if message.streams is None else "several streams of hidden states"
            what = f"{what} and {message.others} more, as the stage before returns them"
            raise ValueError(f"the stage takes {what}, got {len(given)}")
        is_tokens, x = entry is None and self.embedding is None, given[0]
        if entry is not None:
            entry.given = given
            x = given[-message.others if message.embedded else 0]  # hidden states have the embedding's shape
        if exit is not None and exit.message.embedded:
            if is_tokens:
                is_tokens, x = False, self.causal_lm.get_input_embeddings()(x)
            exit.embedded = x
        arguments: dict[str, Any] = {
            "input_ids" if is_tokens else "inputs_embeds": x,
            "position_ids": position_ids,
            "attention_mask": attention_mask,
            "use_cache": False,
        }
        if not self._takes_positions:
            del arguments["position_ids"]
        if exit is None:
            out: Any = self.causal_lm(**arguments, return_dict=True).logits
            if self.head is not None:
                stand_in: Any = self.get_submodule(self.head.name)
                hidden, stand_in.hidden = stand_in.hidden, None
                if out is not hidden:
                    what = f"{type(self.causal_lm).__name__} changes its logits behind the head (a scale, a soft cap)"
                    raise ValueError(f'{what}, which a shard of the vocabulary does not: use vocabulary="ends"')
        else:
            self.get_submodule(self._decoder)(**{**self._options, **arguments})
            out = exit.take()
        if entry is not None:
            entry.given = ()
        return out  # type: ignore[no-any-return]


def check_says_nothing(given: Mapping[str, Any]) -> None:
    """Raises ValueError for an argument that would change a model's result."""
    for name, value in given.items():
        says = value is not None and not (isinstance(value, bool) and value == (name == "return_dict"))
        if isinstance(value, Tensor) and name == "attention_mask":
            says = not bool(value.all())
        if says and name != "doc_ids":
            raise ValueError(
                f"a stage of a transformers model does not take {name}: give target=seq1f1b.shift_labels(labels) to "
                "the engine, doc_ids= of seq1f1b.document_starts, and padding on the right with targets of -100"
            )


class AbsentLayer(nn.Module):
    """A stand-in for a layer of another stage, or for a module after the layers; the stage ignores the result."""

    def forward(self, x: Any = None, *args: Any, hidden_states: Any = None, **kwargs: Any) -> Any:
        return as_layer(self, hidden_states if x is None else x)


class NoEmbedding(nn.Module):
    """A stand-in for the embedding on later stages: returns zeros like the stage's input."""

    def __init__(self, entry: Entry | None) -> None:
        super().__init__()
        self.__dict__["entry"] = entry  # not a child module

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden: Tensor = self.__dict__["entry"].given[0]
        return hidden.new_zeros(()).expand_as(hidden)


@dataclass(frozen=True)
class Message:
    """The tensors handed from a stage to the next: one (batch, tokens, hidden) per stream, then those of the fields.

    Attributes:
        first: index of the next stage's first layer.
        streams: dimension along which layers take stacked streams; None: one stream, not stacked.
        embedded: whether later layers get the embedding's output, (batch, tokens, hidden).
        per_layer: whether each later layer gets an input made by the embedding: (batch, tokens, layers, size).
        shared: kinds of layers whose keys and values, made on an earlier stage, later layers reuse: (batch, heads,
            tokens, head_dim), keys before values.
    """

    first: int
    streams: int | None = None
    embedded: bool = False
    per_layer: bool = False
    shared: tuple[str, ...] = ()

    @property
    def others(self) -> int:
        """The number of tensors after the hidden states."""
        return self.embedded + self.per_layer + 2 * len(self.shared)

    def tokens_of(self, tensors: Sequence[Tensor], tokens: slice) -> list[Tensor]:
        """Returns a slice of the message's tensors along the tokens."""
        of_keys = len(tensors) - 2 * len(self.shared)
        return [t[:, :, tokens] if i >= of_keys else t[:, tokens] for i, t in enumerate(tensors)]


class Entry(nn.Module):
    """A stand-in for the layer before a stage's first layer: returns the message of the stage before."""

    given: Sequence[Tensor] = ()

    def __init__(self, message: Message) -> None:
        super().__init__()
        self.message = message

    @property
    def per_layer(self) -> Tensor:
        """The inputs of all layers, zeros for layers of earlier stages."""
        return F.pad(self.given[-1 - 2 * len(self.message.shared)], (0, 0, self.message.first, 0))

    def forward(self, *args: Any, shared_kv_states: Any = None, **kwargs: Any) -> Any:
        message = self.message
        hidden = self.given[: len(self.given) - message.others]
        pairs = self.given[len(self.given) - 2 * len(message.shared) :]
        for kind, key, value in zip(message.shared, pairs[::2], pairs[1::2], strict=True):
            shared_kv_states[kind] = key, value
        return as_layer(self, hidden[0] if message.streams is None else torch.stack(list(hidden), message.streams))


class Exit(nn.Module):
    """A stand-in for the layer after a stage's last layer: collects the message to the next stage."""

    hidden: Any = None
    embedded: Any = None
    per_layer: Any = None
    shared: Any = None

    def __init__(self, message: Message) -> None:
        super().__init__()
        self.message = message

    def take(self) -> Tensor | tuple[Tensor, ...]:
        message = self.message
        tensors = [self.hidden] if message.streams is None else list(self.hidden.unbind(message.streams))
        if message.embedded:
            tensors.append(self.embedded)
        if message.per_layer:
            tensors.append(self.per_layer[:, :, message.first :])
        for kind in message.shared:
            tensors += self.shared[kind]
        self.hidden = self.embedded = self.per_layer = self.shared = None
        return tensors[0] if len(tensors) == 1 else tuple(tensors)

    def forward(self, hidden_states: Any = None, *args: Any, shared_kv_states: Any = None, **kwargs: Any) -> Any:
        self.hidden, self.shared = hidden_states, shared_kv_states
        return as_layer(self, hidden_states)
