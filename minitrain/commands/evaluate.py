"""Measure a model on held-out texts or chats: minitrain evaluate --model FOLDER FILES...

FILES are JSON lines, arrays or tables, a document an object, or texts, a document each; with --chat,
files of chats, of which replies alone count. All of each document is predicted but its first token, from
what stands before it in the same --seq-len tokens.
"""

import math
from shlex import quote

from minitrain.errors import InputError
from minitrain.run.launch import cli

OPTIONS = {
    "--model": (cli.home_path, ..., "a folder in Hugging Face layout"),
    "--adapter": (cli.home_path, None, "a LoRA run's out_dir, or PEFT's"),
    "--field": (str, "text", "of JSON and tables: the key that holds the text"),
    "--kind": (["auto", "text", "jsonl"], "auto", "of all files; auto: by their first bytes"),
    "--seq-len": (cli.positive(int), 2048, "longer documents are cut, longer chats left out"),
    "--device": (["auto", "cpu", "cuda"], "auto", "where to compute"),
}


def main(arguments: list[str]) -> None:
    parser = cli.Parser(OPTIONS, prog="minitrain evaluate", description=__doc__)
    parser.add_argument("--chat", action="store_true", help="with exact matches, token by token")
    parser.add_argument("files", nargs="+")
    options = parser.parse_args(arguments)
    if options.chat and options.kind == "text":
        raise InputError("--chat needs JSON or tables, not --kind text (leave it out)")
    import torch

    from minitrain.data.chat.chat_templates import choose_template
    from minitrain.data.chat.sft import Chats, fit, read_samples
    from minitrain.data.records import Skips
    from minitrain.data.text import text_rows
    from minitrain.data.tokenizer import load_tokenizer, tokenizer_folder
    from minitrain.formats.peft import load_merged
    from minitrain.run.launch.start import pick_device
    from minitrain.run.tasks.exact_match import exact_match
    from minitrain.settings import Data
    from minitrain.training.language_modeling import LanguageModeling

    tokenizer = load_tokenizer(tokenizer_folder(options.model, options.adapter))
    model = load_merged(options.model, options.adapter, device=pick_device(options.device))
    seq_len = min(options.seq_len, model.config.max_position_embeddings)
    note = ""
    if options.chat:
        template = choose_template("auto", tokenizer)
        samples = read_samples(Data("jsonl", options.files), template, tokenizer, Skips())
        samples, note = fit(samples, seq_len, "drop")
    else:
        files, note = text_rows.find_documents(options.files, options.field, options.kind)
        documents = text_rows.read_documents(files, options.field, options.kind)
        corpus = text_rows.tokenize(documents, tokenizer)
        samples = text_rows.cut_documents(corpus, seq_len)
    if not samples:
        raise InputError(f"{' '.join(options.files)}: no token to predict{note}")
    rows = Chats(samples, seq_len, 0, packed=True, numbered=True)
    objective = LanguageModeling()
    total = 0.0
    count = 0
    with torch.inference_mode():
        for number in range(len(rows)):
            batch = {
                key: x[None].to(model.head_weight.device) for key, x in rows.row(number).items()
            }
            total += objective.loss(model, batch).item()
            count += objective.count(batch)
    loss = total / count
    told = f"{count:,} tokens{note}: {loss:.4f} nats, perplexity {math.exp(loss):.4g}"
    if options.chat:
        matches = exact_match(model, rows.questions(len(samples)))
        told += f", {matches:.1%} of {len(samples):,} chats exactly right"
    else:
        told += f", {total / math.log(2) / corpus.sizes.sum():.4f} bits per byte"
    print(told)
    adapter = f" --adapter {quote(options.adapter)}" if options.adapter else ""
    chat = " --chat" if options.chat else ""
    print(f"next: minitrain generate --model {quote(options.model)}{adapter}{chat} --prompt TEXT")
