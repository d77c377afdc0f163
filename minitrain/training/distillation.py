"""Distillation: learn a teacher's distribution over the whole vocabulary at every token of the data.

With p the teacher's distribution and q the student's, both of logits / temperature, a token's loss is

    divergence   loss                                             from
    forward      KL(p || q)                                       Hinton et al. 2015
    reverse      KL(q || p)                                       Gu et al. 2023 (MiniLLM)
    js           beta KL(p || m) + (1 - beta) KL(q || m),         Agarwal et al. 2023 (GKD)
                 m = beta p + (1 - beta) q

and its gradient with respect to the student's logit i, times the temperature,

    forward      q_i - p_i
    others       c q_i (l_i - sum_j q_j l_j), l = log(q / m); c = 1 - beta, and for reverse 1, m = p

No logits of all tokens exist, neither the student's nor the teacher's: both heads run chunk by chunk
(`chunked_loss`), and under tensor parallelism each rank has its part of the vocabulary. The teacher
is laid out as the student is. With data.sources each may have a teacher of its own; then every
teacher reads all rows, because its ranks must meet. The student's own samples are learned from by
task=grpo (grpo/objective.py). Left out: pp, a mixture with the cross-entropy of the labels.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module

from minitrain.models.cpu import matmul
from minitrain.models.lora import without_adapters
from minitrain.parallel.fsdp import reshard
from minitrain.settings import Distill
from minitrain.training.language_modeling import LanguageModeling
from minitrain.training.loss import IGNORE, VocabShard, chunked_loss, fused, vocab_shard
from minitrain.training.packing import Batch, Dataset

if TYPE_CHECKING:
    from minitrain.training.loop import Trainer

# stands for the model without its adapters in place of a teacher's folder
BASE = "base"


class Distillation(LanguageModeling):
    """The sum of a divergence over the tokens that have a label, whichever it is.

    A batch, and what is logged, are those of LanguageModeling. folders: the teacher of each source,
    or one.
    """

    layouts = ("cp",)

    def __init__(self, settings: Distill, folders: Sequence[str], names: Sequence[str] = ()):
        super().__init__(names)
        self.settings = settings
        self.folders = folders
        # by folder, all but BASE: made before the first step by a function that the trainer's maker sets
        self.teachers: dict[str, Module] = {}
        self.make_teachers: Callable[[], dict[str, Module]] = dict

    def prepare(self, trainer: "Trainer", dataset: Dataset, batches: int) -> None:
        self.teachers = self.teachers or self.make_teachers()

    def loss(self, model: Module, batch: Batch) -> Tensor:
        """Return the sum of the tokens' losses, a scalar. Values of the batch: [batch, seq]."""
        batch = dict(batch)
        tokens = batch.pop("tokens")
        sources = batch.pop("sources", torch.zeros_like(tokens))
        taught = []
        for folder in dict.fromkeys(self.folders):
            own = torch.tensor([each == folder for each in self.folders], device=tokens.device)
            # bool [tokens, 1], beside the teacher's hidden states and head
            mine = own[sources].view(-1, 1)
            taught.append((mine, *self.teach(folder, model, tokens, batch)))
        loss = model(tokens, **batch, head=partial(self.head, sources, taught))
        for teacher in self.teachers.values():
            reshard(teacher)
        return loss

    @torch.no_grad()
    def teach(
        self, folder: str, model: Module, tokens: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """Return a teacher's hidden states [batch, seq, hidden], and its head; None: the student's."""
        # FSDP leaves the head gathered after a forward pass, until `reshard`
        teacher = partial(self.teachers.get(folder, model), tokens, **batch)
        if folder != BASE:
            return teacher(head=lambda hidden, weight, labels: (hidden, weight))
        with without_adapters(model):
            return teacher(head=lambda hidden, weight, labels: hidden), None

    def head(
        self, sources: Tensor, taught: list, hidden: Tensor, weight: Tensor, labels: Tensor
    ) -> Tensor:
        """Return the loss, a scalar, and add each token's part of it to the sum of its source.

        sources, labels: [batch, seq]; hidden: [batch, seq, hidden]; weight: the head's.
        """
        weight, shard = vocab_shard(weight)
        valid = (labels != IGNORE).flatten()
        losses = torch.zeros(valid.shape, device=valid.device)
        compute = fused(divergence_and_grad, weight)

        def of_chunk(logits: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
            given = torch.zeros_like(logits)
            for mine, known, head in taught:
                local = weight if head is None else vocab_shard(head)[0]
                each = matmul(known.flatten(0, -2)[chunk], local.T)
                given = each.where(mine[chunk], given)
            losses[chunk], grad = compute(self.settings, logits, given, valid[chunk], shard)
            return losses[chunk].sum(), grad

        loss = chunked_loss(hidden.flatten(0, -2), weight, of_chunk)
        if self.names and torch.is_grad_enabled():
            self.add(sources, losses, valid)
        return loss


def divergence_and_grad(
    settings: Distill, student: Tensor, teacher: Tensor, valid: Tensor, shard: VocabShard
) -> tuple[Tensor, Tensor]:
    """Return a chunk's losses, fp32 [tokens], and their gradient.

    student, teacher: logits [tokens, vocab / tp], as the gradient. valid: bool [tokens]; others get 0.
    """
    # all [tokens, vocab / tp]
    log_q = log_softmax(student, settings.temperature, shard)
    log_p = log_softmax(teacher, settings.temperature, shard)
    q, p = log_q.exp(), log_p.exp()

    def total(weights: Tensor, logs: Tensor) -> Tensor:
        """Return the sums over all shards, [tokens]."""
        return shard.gather(torch.linalg.vecdot(weights, logs)).sum(0)

    if settings.divergence == "forward":
        losses = total(p, log_p - log_q)
        grad = q - p
    elif settings.divergence == "reverse":
        losses = total(q, log_q - log_p)
        grad = q * (log_q - log_p - losses[:, None])
    else:
        beta = settings.beta
        log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
        of_student = total(q, log_q - log_m)
        losses = beta * total(p, log_p - log_m) + (1 - beta) * of_student
        grad = (1 - beta) * q * (log_q - log_m - of_student[:, None])
    scale = valid[:, None] / settings.temperature
    return losses * valid, (grad * scale).to(student.dtype)


def log_softmax(logits: Tensor, temperature: float, shard: VocabShard) -> Tensor:
    """Return log softmax(logits / temperature) over all shards, fp32 [tokens, vocab / tp]."""
    logits = logits.float() / temperature
    return logits - shard.gather(logits.logsumexp(-1, keepdim=True)).logsumexp(0)
