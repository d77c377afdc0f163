"""Measure a model on held-out texts, chats or choices: minitrain evaluate --model FOLDER FILES...

FILES are JSON lines, arrays or tables, a document an object, or texts, a document each. All of each
document is predicted but its first token, from what stands before it in the same --seq-len tokens.
With --chat they are chats, of which replies alone count. With --choices they are lines of HellaSwag,
ARC or MMLU, and the likeliest choice counts: by its log-probability, as lm_eval's acc, and by that of
a character, as acc_norm.
"""

import json
import math
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING

from minitrain.data.faults import wording
from minitrain.errors import InputError, refuse
from minitrain.run.launch import cli

if TYPE_CHECKING:
    from minitrain.data.chat.sft import Chats
    from minitrain.data.text.choices import Question
    from minitrain.data.tokenizer import Tokenizer
    from minitrain.models.decoder import Decoder
    from minitrain.training.packing import Batch

OPTIONS = {
    "--model": (cli.home_path, ..., "a folder in Hugging Face layout"),
    "--adapter": (cli.home_path, None, "a LoRA run's out_dir, or PEFT's"),
    "--field": (str, "text", "of JSON and tables: the key that holds the text"),
    "--kind": (["auto", "text", "jsonl"], "auto", "of all files; auto: by their first bytes"),
    "--seq-len": (cli.positive(int), 2048, "longer documents are cut, longer chats left out"),
    "--out": (cli.home_path, None, "with --choices: a .jsonl file for each choice's numbers"),
    "--device": (["auto", "cpu", "cuda"], "auto", "where to compute"),
    "--chat": (bool, False, "with exact matches, token by token"),
    "--choices": (bool, False, "of HellaSwag, ARC or MMLU"),
}


WORDING = wording.OPTIONS._replace(
    chats="chats need --chat",
    document=" (leave --chat out)",
    pair=", and evaluate has no use for pairs",
)


def main(arguments: list[str]) -> None:
    parser = cli.Parser(OPTIONS, prog="minitrain evaluate", description=__doc__)
    parser.add_argument("files", nargs="+")
    options = parser.parse_args(arguments)
    lined = options.chat or options.choices
    faults = (
        (options.chat and options.choices, "--chat and --choices: give one of them"),
        (options.out and not options.choices, "--out is for the numbers of --choices (add it)"),
        (
            lined and options.kind == "text",
            f"--{'chat' if options.chat else 'choices'} needs JSON or tables, not --kind text (leave it out)",
        ),
    )
    refuse(faults)
    cli.check_writable("out", options.out)
    from minitrain.data.tokenizer import load_tokenizer, tokenizer_folder
    from minitrain.formats.peft import load_merged
    from minitrain.run.launch.start import pick_device

    tokenizer = load_tokenizer(tokenizer_folder(options.model, options.adapter))
    model = load_merged(options.model, options.adapter, device=pick_device(options.device))
    seq_len = min(options.seq_len, model.config.max_position_embeddings)
    measure = measure_choices if options.choices else measure_loss
    print(measure(options, model, tokenizer, seq_len))
    chat = " --chat" if options.chat else ""
    print(f"next: minitrain generate {cli.model_words(options)}{chat} --prompt TEXT")


def each_row(rows: "Chats", model: "Decoder") -> "Iterator[tuple[int, Batch]]":
    """Yield the number of each row with its batch of one, [1, seq], where the model is."""
    device = model.head_weight.device
    for number in cli.bar(range(len(rows)), len(rows), "row"):
        yield number, {key: x[None].to(device) for key, x in rows.row(number).items()}


def measure_loss(
    options: Namespace, model: "Decoder", tokenizer: "Tokenizer", seq_len: int
) -> str:
    """Return a line with the loss on texts, or on replies of chats."""
    import torch

    from minitrain.data.chat.chat_templates import choose_template
    from minitrain.data.chat.sample_rows import fit
    from minitrain.data.chat.sft import Chats, read_samples
    from minitrain.data.faults.skips import Skips
    from minitrain.data.text.corpus import cut_documents, tokenize
    from minitrain.data.text.documents import find_documents, read_documents
    from minitrain.run.tasks.exact_match import exact_match, within_positions
    from minitrain.settings import Data
    from minitrain.training.language_modeling import LanguageModeling

    note = ""
    if options.chat:
        template = choose_template("auto", tokenizer)
        data = Data("jsonl", options.files)
        samples = read_samples(data, template, tokenizer, Skips(), words=WORDING)
        samples, note = fit(samples, seq_len, "drop")
    else:
        files, note = find_documents(options.files, options.field, options.kind, WORDING)
        documents = read_documents(files, options.field, options.kind, WORDING)
        corpus = tokenize(documents, tokenizer)
        samples = cut_documents(corpus, seq_len)
    if not samples:
        raise InputError(f"{' '.join(options.files)}: no token to predict{note}")
    rows = Chats(samples, seq_len, 0, packed=True, numbered=True)
    objective = LanguageModeling()
    total = 0.0
    count = 0
    try:
        with torch.inference_mode():
            for number, batch in each_row(rows, model):
                total += objective.loss(model, batch).item()
                count += objective.count(batch)
                done = number + 1
    except KeyboardInterrupt:
        if count:
            line = f"{count:,} tokens of {done:,} of {len(rows):,} rows: {total / count:.4f} nats"
            print(f"note: so far {line}", file=sys.stderr)
        raise
    loss = total / count
    line = f"{count:,} tokens{note}: {loss:.4f} nats, perplexity {math.exp(loss):.4g}"
    if options.chat:
        judged = within_positions(model, rows.questions(len(samples)))
        if not judged:
            return f"{line}; no chat leaves a position to reply"
        return f"{line}, {exact_match(model, judged):.1%} of {len(judged):,} chats exactly right"
    return f"{line}, {total / math.log(2) / corpus.sizes.sum():.4f} bits per byte"


def measure_choices(
    options: Namespace, model: "Decoder", tokenizer: "Tokenizer", seq_len: int
) -> str:
    """Return a line with the share of questions whose likeliest choice is right."""
    import torch

    from minitrain.data.chat.sft import Chats
    from minitrain.data.faults.skips import Skips
    from minitrain.data.files import find_files
    from minitrain.data.records import read_records
    from minitrain.data.text.choices import encode_choices, read_choices
    from minitrain.settings import Data
    from minitrain.training.log_probs import label_log_probs

    def read(record: dict) -> tuple:
        question = read_choices(record)
        return record, question, encode_choices(question, tokenizer, seq_len)

    files = find_files(Data("jsonl", options.files), WORDING)
    records, questions, samples = zip(*read_records(files, read, Skips(), WORDING), strict=True)
    samples = [sample for each in samples for sample in each]
    rows = Chats(samples, seq_len, 0, packed=True, numbered=True)
    # of each sample
    sums = torch.zeros(len(samples))
    with torch.inference_mode():
        for number, batch in each_row(rows, model):
            # [seq]; 0 where nothing is predicted, as in the padding
            log_probs = label_log_probs(model, batch)[0].cpu()
            own = torch.tensor(rows.chosen(number))
            sums.index_add_(0, own[batch["document_ids"][0].cpu()], log_probs)
    scores = sums.split([len(question.choices) for question in questions])
    return tell_choices(options, records, questions, [each.tolist() for each in scores])


def tell_choices(
    options: Namespace,
    records: list[dict],
    questions: "list[Question]",
    scores: list[list[float]],
) -> str:
    """Return a line with acc and acc_norm, and write the numbers of each question to --out.

    scores: the log-probabilities of each question's choices. Errors are a mean's, as lm_eval's.
    """
    right = {"acc": 0, "acc_norm": 0}
    lines = []
    for record, question, log_probs in zip(records, questions, scores, strict=True):
        lengths = map(len, question.choices)
        shares = [score / length for score, length in zip(log_probs, lengths, strict=True)]
        chosen = {"acc": best(log_probs), "acc_norm": best(shares)}
        for name, number in chosen.items():
            right[name] += number == question.answer
        numbers = {"log_probs": log_probs, "choice": chosen["acc"]}
        lines.append(json.dumps(record | numbers | {"choice_norm": chosen["acc_norm"]}) + "\n")
    if options.out:
        with open(options.out, "w", encoding="utf-8") as stream:
            stream.writelines(lines)
    count = len(questions)
    figures = []
    for name, number in right.items():
        share = number / count
        error = math.sqrt(share * (1 - share) / max(count - 1, 1))
        figures.append(f"{name} {share:.4f} ± {error:.4f}")
    return f"{count:,} questions: {', '.join(figures)}"


def best(scores: list[float]) -> int:
    return scores.index(max(scores))
