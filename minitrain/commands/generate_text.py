"""Continue texts and answer chats in the terminal: what python -m minitrain.generate does."""

import re
import sys
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

from minitrain.commands.generate_answers import answer_prompts, answered_before, tell_answers
from minitrain.data.chat.chat_templates import ChatTemplate, choose_template
from minitrain.data.chat.chats import encode_question, end_of_reply
from minitrain.data.chat.keys import CHATS, PROMPTS, SHOWN, SYSTEMS
from minitrain.data.chat.messages import Chat, Message
from minitrain.data.chat.read_chats import with_system
from minitrain.data.chat.read_problems import read_question
from minitrain.data.chat.read_tools import read_shown
from minitrain.data.faults import wording
from minitrain.data.faults.skips import Skips
from minitrain.data.faults.unread_keys import UNREAD_BESIDE_PROMPT, refuse_unread
from minitrain.data.records import holds_records, read_records, text_of
from minitrain.data.text_files import lines_of
from minitrain.data.tokenizer import Tokenizer, check_same_ids, load_tokenizer, tokenizer_folder
from minitrain.errors import InputError, as_input_error, hub_hint, located, refuse
from minitrain.formats.hf import load_pretrained, read_config
from minitrain.formats.peft import load_merged
from minitrain.models.wan_config import WanConfig
from minitrain.rollout.drafting import MTP, SAME_IDS, check_draft
from minitrain.rollout.engine import Sampler
from minitrain.rollout.sampling import SamplingParams
from minitrain.rollout.scheduler import Sample
from minitrain.run.launch import cli
from minitrain.run.launch.start import pick_device
from minitrain.settings import Rollout

WORDING = wording.OPTIONS._replace(lines="lines of text stand in a file of another ending")
SLASHES = "/clear begins anew, /system TEXT too, with that as its system prompt, /exit ends"


def generate_text(options: Namespace) -> None:
    """Continue or answer --prompt, each of --prompts, or with --chat alone line after line."""
    cli.use_huge_pages()
    check_folders(options)
    tokenizer = load_tokenizer(check_models(options))
    template = choose_template("auto", tokenizer) if options.chat else None
    lines, prompts = read_prompts(options, template, tokenizer)
    params = params_of(options, template and end_of_reply(template, tokenizer))
    answers = answered_before(options, lines) if options.prompts else {}
    if options.out and len(answers) == len(lines):
        return tell_answers(options, answers)
    left = [prompt for number, prompt in enumerate(prompts) if number not in answers]
    sampler = open_sampler(options, tokenizer, left)
    if options.prompts:
        answer_prompts(options, lines, prompts, sampler, params, answers)
        if options.out:
            tell_answers(options, answers)
    elif prompts:
        show(sampler, sampler.submit(prompts[0], params), "" if template else options.prompt)
    else:
        converse(sampler, params, system_of(options), template)
    if sampler.drafter:
        counts = sampler.drafter.counts
        right = f"{counts['accepted']:,} of {counts['drafted']:,} drafts were right"
        print(f"note: {right}", file=sys.stderr)


def check_models(options: Namespace) -> str | Path:
    """Return the tokenizer's file or folder. Raises InputError for models that do not go together."""
    config = read_config(options.model)
    if isinstance(config, WanConfig):
        raise InputError(
            f"--model {options.model} is a diffusion model, which needs --task diffusion"
        )
    source = options.tokenizer or tokenizer_folder(options.model, options.adapter)
    check_same_ids(source, options.model, "--tokenizer ")
    if options.draft:
        with located(f"--draft {options.draft}"):
            check_draft(config, MTP if options.draft == MTP else read_config(options.draft))
            if options.draft != MTP:
                check_same_ids(source, options.draft, "", SAME_IDS)
    return source


def params_of(options: Namespace, end: int | None) -> SamplingParams:
    """Return how to sample. end: the token that ends a reply of a chat, if there is one."""
    return SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        max_tokens=options.max_tokens,
        n=options.n,
        stop_tokens=() if end is None else (end,),
        stop=tuple(options.stop),
        seed=options.seed,
    )


def open_sampler(options: Namespace, tokenizer: Tokenizer, prompts: list[list[int]]) -> Sampler:
    """Load the models, and return a sampler with room for these prompts; none: a conversation."""
    # of a conversation nobody knows the length
    longest = max(map(len, prompts)) + options.max_tokens if prompts else None
    samples = options.n * max(1, len(prompts))
    device = pick_device(options.device)
    model = load_merged(options.model, options.adapter, device=device)
    draft = None
    if options.draft not in (None, MTP):
        draft = load_pretrained(options.draft, device=device)
    settings = Rollout(draft=options.draft or "", draft_tokens=options.draft_tokens)
    return Sampler(model, tokenizer, settings, samples, longest, draft)


def read_prompts(
    options: Namespace, template: ChatTemplate | None, tokenizer: Tokenizer
) -> tuple[list[dict], list[list[int]]]:
    """Return --prompt, or each line of --prompts, and the ids of each; none to converse.

    With a template a line of JSON is a chat, as in training: with its system's text and tools.
    """
    faults = (
        (
            options.prompts and options.prompt is not None,
            "--prompt and --prompts: give one of them",
        ),
        (options.out and not options.prompts, "--out is for the answers to --prompts (add it)"),
        (options.system and not options.chat, "--system is of a chat (add --chat)"),
    )
    refuse(faults)
    if options.prompts:
        cli.check_writable("out", options.out)
        file = Path(options.prompts)
        if holds_records(file, (*PROMPTS, *CHATS)):

            def read(record: dict) -> tuple[dict, list[int]]:
                return record, encode_line(record, options, template, tokenizer)

            lines, prompts = zip(*read_records([file], read, Skips(), WORDING), strict=True)
            return list(lines), list(prompts)
        texts = lines_of(file, WORDING)
    elif options.prompt is None and not options.chat:
        raise InputError("--prompt is missing (or --prompts FILE, or --chat alone to converse)")
    else:
        texts = [] if options.prompt is None else [options.prompt]
    before = system_of(options)
    prompts = [encode([*before, Message("user", text)], template, tokenizer) for text in texts]
    return [{"prompt": text} for text in texts], prompts


def system_of(options: Namespace) -> Chat:
    return [Message("system", options.system)] if options.system else []


def encode_line(
    record: dict, options: Namespace, template: ChatTemplate | None, tokenizer: Tokenizer
) -> list[int]:
    """Return the ids of a line's prompt. Raises InputError for what the model would not be shown."""
    if "text" in record:
        raise InputError("'text' is where the answer goes (give that key another name)")
    if template is None:
        for key in (*CHATS, *SYSTEMS, *SHOWN):
            if record.get(key):
                raise InputError(f"{key!r} is of a chat (add --chat)")
        refuse_unread(record, ("context", *UNREAD_BESIDE_PROMPT), "the prompt")
        return encode([Message("user", text_of(record, "prompt"))], None, tokenizer)
    turns, _ = read_question(record, words=WORDING)
    turns = with_system(turns, {"system": options.system})
    return encode_question(turns, template, tokenizer, read_shown(record))


def encode(
    messages: list[Message], template: ChatTemplate | None, tokenizer: Tokenizer
) -> list[int]:
    """Return the ids that ask for a reply to messages, or without a template continue the last."""
    text = messages[-1].content
    with as_input_error("--prompt is not UTF-8"):
        text.encode()
    if template is None:
        prompt = tokenizer.encode_prompt(text)
    else:
        with located("--prompt"):
            prompt = encode_question(messages, template, tokenizer)
    if not prompt:
        raise InputError("--prompt is empty: give at least one character")
    return prompt


def converse(
    sampler: Sampler, params: SamplingParams, before: Chat, template: ChatTemplate
) -> None:
    """Answer line after line, with all that was said before, to the end of the input (Ctrl-D).

    Where that is more than the model has positions for, the conversation begins anew, as is told.
    """
    if sys.stdin.isatty():
        print(SLASHES, file=sys.stderr)
    said = before
    with suppress(EOFError):
        while True:
            line = input("> ")
            order, _, text = line.partition(" ")
            if order in ("/exit", "/quit"):
                return
            if order == "/system":
                before = [Message("system", text)] if text.strip() else []
            if order in ("/system", "/clear"):
                said = before
                continue
            if re.fullmatch(r"/\w+", order):
                print(f"note: {order} is no order ({SLASHES})", file=sys.stderr)
                continue
            chat = [*said, Message("user", line)]
            try:
                prompt = encode(chat, template, sampler.tokenizer)
                if len(prompt) >= sampler.longest and said != before:
                    print(
                        f"note: a prompt of {len(prompt)} tokens, there are {sampler.longest} positions: the "
                        f"conversation begins anew",
                        file=sys.stderr,
                    )
                    said = before
                    chat = [*said, chat[-1]]
                    prompt = encode(chat, template, sampler.tokenizer)
                samples = sampler.submit(prompt, params)
            except InputError as error:
                print(f"note: {error}", file=sys.stderr)
            else:
                said = [*chat, Message("assistant", show(sampler, samples, ""))]


def show(sampler: Sampler, samples: list[Sample], prompt: str) -> str:
    """Write the texts of samples behind their prompt as they come. Returns the last one."""
    for number, sample in enumerate(samples, 1):
        if len(samples) > 1:
            print(f"--- sample {number} of {len(samples)}")
        sys.stdout.write(prompt)
        reply = ""
        for piece in sampler.follow(sample):
            print(piece, end="", flush=True)
            reply += piece
        print()
    return reply


def check_folders(options: Namespace) -> None:
    """Raise InputError where an option names no folder."""
    for name in ("model", "adapter", "draft"):
        folder = getattr(options, name)
        if folder and (name, folder) != ("draft", MTP) and not Path(folder).is_dir():
            hint = (
                hub_hint(folder, f"--{name} ")
                or " (give one in Hugging Face layout, such as a run's out_dir)"
            )
            raise InputError(f"--{name} {folder} is no folder{hint}")
