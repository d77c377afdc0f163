"""Draft tokens, and verify them: a decoding step that may produce several tokens of a sample.

A decoding step reads all weights for one token of each sample. Here it reads them for the newest
token and k drafts, guesses of those that follow it (speculative decoding, Leviathan et al. 2023).
From the logits after each of these the sampler draws as ever, by noise that depends on (seed,
request, sample, position, id) alone. So a draft is right exactly if it is the token that is drawn in
its place: nothing is left to chance, and no correction to the distribution is needed. The tokens are
those without drafts, whatever the drafts are.

    verify    newest, d1, ..., dk at positions p, ..., p + k -> drawn t1, ..., t(k+1)
    count     1 + the number of first drafts with d = t. So many first t are produced; the last of
              them is the newest token of the next step, at position p + count
    draft     one pass over all that was drawn gives d1 after the newest token; then d2, ..., dk come
              each from a pass over the one before. They are drawn with the noise that the model
              will draw with, so that both take the same of several likely tokens

What rejected tokens leave in the pools lies behind the newest token, where no mask lets anyone look,
and is overwritten when others come there. Recurrent states are stored once the counts are known
(`Caches.settle`). Shapes are static: a step with its drafts is one CUDA graph. The caches of what
drafts have the pages, slots and rows of the model's, so that the scheduler knows nothing of it.

What drafts is a smaller model (`DraftModel`), or a layer that the model has for it (`MTPDrafter`).

Left out: draft models with recurrent layers, trees of drafts, later layers of multi-token prediction
than the first, which published models have alone. k does not follow the acceptance: results/drafts.py
finds 1, 2 and 3 within 9 % of each other.
"""

from collections import Counter
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from minitrain.errors import InputError
from minitrain.models.decoder import Decoder
from minitrain.models.decoder_config import DecoderConfig, check_vocabulary
from minitrain.rollout.batch import DecodingBatch, compiled_blocks
from minitrain.rollout.caches import Caches
from minitrain.rollout.scheduler import Sample
from minitrain.rollout.steps import DecodingStep
from minitrain.rollout.weights import SamplerWeights
from minitrain.settings import Rollout
from minitrain.training.loss import VocabShard

# stands for the model's own layers in place of a draft model's folder
MTP = "mtp"
# what a draft model must be
SAME_IDS = "a draft model of the same tokenizer"


class DraftModel:
    """What drafts: a smaller model of the same vocabulary, whole on every rank.

    draft_tokens: how many it drafts for a step. layers: numbers of those that have caches.
    weights: of its head; None: the model's own.
    counts: tokens that it has "drafted", and how many of them were "accepted".
    """

    # from entry i of its caches, token i + offset is drafted
    offset = 1

    def __init__(self, model: Decoder, draft_tokens: int):
        self.model = model
        self.draft_tokens = draft_tokens
        self.layers = range(model.config.num_layers)
        self.weights: SamplerWeights | None = SamplerWeights(model)
        self.counts: Counter[str] = Counter()

    @property
    def first_width(self) -> int:
        """Return the tokens of a row in its first pass, over all that was drawn."""
        return self.draft_tokens + 3 - self.offset

    def __call__(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, head, cache: Caches
    ) -> tuple:
        """Return head(hidden states, weight, None) of a pass over tokens.

        tokens, positions: [1, tokens]. hidden: [1, tokens, hidden], the model's, and for one draft
            after another those that the last was from. Only a layer of the model's reads them.
        """
        # beyond its own positions it only guesses worse
        positions = positions.clamp(max=self.model.config.max_position_embeddings - 1)
        return self.model(tokens, positions=positions, head=head, cache=cache)


class MTPDrafter(DraftModel):
    """The model's first layer of multi-token prediction (models/mtp.py), fed with its own output.

    Entry i of its cache is of the hidden state of token i, and of token i + 1.
    """

    offset = 2

    def __init__(self, model: Decoder, draft_tokens: int):
        super().__init__(model, draft_tokens)
        number = model.config.num_layers
        self.layers = range(number, number + 1)
        self.weights = None

    def __call__(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, head, cache: Caches
    ) -> tuple:
        hidden = self.model.predict_mtp(hidden, tokens, positions=positions, cache=cache)
        return head(hidden, self.model.head_weight, None)


def open_drafter(model: Decoder, settings: Rollout, draft: Decoder | None) -> DraftModel | None:
    """Return what drafts for `model`: the model `draft`, or a layer of its own; None if nothing does."""
    if settings.draft == MTP:
        check_draft(model.config, MTP)
        return MTPDrafter(model, settings.draft_tokens)
    if draft is None:
        if settings.draft:
            raise InputError(
                f"rollout.draft={settings.draft}: the sampler needs that model, too (draft=)"
            )
        return None
    check_draft(model.config, draft.config)
    return DraftModel(draft, settings.draft_tokens)


def check_draft(config: DecoderConfig, draft: DecoderConfig | str) -> None:
    """Raise InputError for a model `draft`, or MTP, that cannot draft for a model of `config`."""
    if draft == MTP:
        if not config.num_nextn_predict_layers:
            told = "the model has no layers of multi-token prediction"
            raise InputError(f"{told} (use a draft model's folder, or nothing)")
        return
    check_vocabulary(config, draft, "draft model")
    if draft.is_recurrent:
        told = "the draft model has recurrent layers, whose states cannot be taken back"
        raise InputError(f"{told} (use one of attention alone)")


class DraftingBatch(DecodingBatch):
    """The buffers in which samples are decoded with drafts of `drafter`; the rest as its base."""

    def __init__(self, drafter: DraftModel, *args, **named):
        super().__init__(*args, **named, width=drafter.draft_tokens + 1)
        self.drafter = drafter
        # over all that was drawn, then over one draft after the other
        first = self._pass(drafter.first_width)
        self.passes = [first, *[self._pass(1)] * (drafter.draft_tokens - 1)]

    def _pass(self, width: int) -> DecodingStep:
        step = self.step
        positions = step.positions.new_zeros(self.rows * width)
        return DecodingStep(
            positions, step.block_table, step.slots, step.page_size, step.pool_pages
        )

    def _place(self, step: DecodingStep, first: Tensor) -> None:
        """Set the positions of a step, from first [rows, 1] on."""
        index = torch.arange(step.width, device=first.device)
        step.positions.copy_((first + index).clamp(max=self.last_position).flatten())

    def _load_rows(self, rows: list[Sample]) -> None:
        super()._load_rows(rows)
        # a pass drafts one token of each row
        self.row_state = self.state.of_rows(self.step.width)

    def compiled(self) -> AbstractContextManager:
        return compiled_blocks(self.model, self.drafter.model)

    def results(self, steps: int) -> tuple[list[list[int]], list[list[float]]]:
        """Return each row's tokens and log-probabilities of the last steps; give samples drafts."""
        width = self.step.width
        drafts = self.tokens.view(-1, width)[:, 1:].tolist()
        # each [rows][steps x width]
        found = [
            new[:steps].unflatten(1, (-1, width)).transpose(0, 1).flatten(1).tolist()
            for new in (self.new_tokens, self.new_logprobs)
        ]
        produced = []
        scores = []
        # the padding rows come last: zip ends before them
        for (sample, *_), *row, guesses in zip(self.loaded, *found, drafts, strict=False):
            kept = [pair for pair in zip(*row, strict=True) if pair[0] >= 0]
            produced.append([token for token, _ in kept])
            scores.append([score for _, score in kept])
            drafted = (steps if sample.drafts else steps - 1) * (width - 1)
            self.drafter.counts.update(drafted=drafted, accepted=len(kept) - steps)
            sample.drafts = guesses
        return produced, scores

    def feed(self, tokens: Tensor, hidden: Tensor, shard: VocabShard) -> Tensor:
        """Feed the newest tokens and drafts to the next step.

        tokens: [rows x width], drawn from hidden [1, rows x width, hidden]. Returns them, with -1 for
        those that do not count. shard: how the model's head is split.
        """
        width = self.step.width
        drawn = tokens.view(-1, width)
        verified = self.tokens.view(-1, width)
        right = (drawn[:, :-1] == verified[:, 1:]).long()
        # [rows, 1]
        counts = 1 + right.cumprod(1).sum(1, keepdim=True)
        self.caches.settle(counts[:, 0])
        first = self.positions.view(-1, width)[:, :1]
        offset = self.drafter.offset
        known = torch.cat([verified[:, :1], drawn], 1)[:, offset - 1 :]
        drafts = self.draft(known, hidden, first, counts + 1 - offset, shard)
        self.tokens.copy_(torch.cat([drawn.gather(1, counts - 1), *drafts], 1).flatten())
        self._place(self.step, first + counts)
        index = torch.arange(width, device=tokens.device)
        return drawn.where(index < counts, -1).flatten()

    def draft(
        self, tokens: Tensor, hidden: Tensor, first: Tensor, newest: Tensor, shard: VocabShard
    ) -> list[Tensor]:
        """Return the next drafts, each [rows, 1].

        tokens: [rows, n], for entries from `first` [rows, 1] on of the drafter's caches, of which
        those behind number `newest` [rows, 1] do not count. hidden: [1, rows x n, hidden].
        """
        caches = self.caches.drafts
        if rows := self.step.rows:
            later = rows.after_a_step(self.step.width)
            for step in self.passes:
                step.rows = later
            self.passes[0].rows = later._replace(to_gather=rows.to_gather)
        drafts = []
        for step in self.passes:
            self._place(step, first)
            step.begin()
            caches.step = step
            positions = (first + newest)[:, 0] + self.drafter.offset
            head = partial(self._guess, newest, positions)
            tokens, hidden = self.drafter(
                tokens.reshape(1, -1), hidden, step.positions[None], head, caches
            )
            # ranks that share the model must agree, and round differently in models of their own
            tokens = shard.gather(tokens)[0][:, None]
            drafts.append(tokens)
            first = first + newest + 1
            newest = torch.zeros_like(newest)
        return drafts

    def _guess(
        self, newest: Tensor, positions: Tensor, hidden: Tensor, weight: Tensor, labels: None
    ) -> tuple[Tensor, Tensor]:
        """Return tokens [rows] for `positions` [rows], and the hidden states that they are from.

        hidden: [1, rows x n, hidden], of which number `newest` [rows, 1] of each row is used.
        weight: the drafter's head.
        """
        hidden = hidden[0].unflatten(0, (self.rows, -1))
        hidden = hidden.take_along_dim(newest[..., None], 1)[:, 0]
        weights = self.drafter.weights or self.weights
        tokens, *_ = self.choose(weights, hidden, weight, self.row_state, positions)
        return tokens, hidden[None]
