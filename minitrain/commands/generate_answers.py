"""Answer a file of prompts: what `python -m minitrain.generate --prompts FILE --out FILE.jsonl` does.

Each prompt's answers are appended when all of them are done, whatever order that is; the same
command answers what is left, with the same random numbers, and at the end puts all in the order of
the prompts. A hidden file beside --out says what they were made with: nobody is shown the answers of
another model as this one's.
"""

import json
import sys
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path

from minitrain.data.files import stamp_of
from minitrain.errors import InputError, located
from minitrain.formats.json_files import read_json, write_json
from minitrain.rollout.engine import Sampler
from minitrain.rollout.sampling import SamplingParams
from minitrain.rollout.scheduler import Sample
from minitrain.run.checkpoint.durable import write_durably
from minitrain.run.launch import cli

# options that decide no answer, and the model's folders, whose files do
FREE = ("prompt", "prompts", "out", "n", "device", "debug", "model", "adapter")


def answered_before(options: Namespace, lines: list[dict]) -> dict[int, list[str]]:
    """Return what --out holds: the numbers of lines that have all their answers, with these.

    A last line that is cut off does not count, nor do some of a prompt's answers, or of those to
    equal lines: they differ by their random numbers. Raises InputError
    for a file that holds anything else, or what was made with other settings.
    """
    if options.out is None or is_stream(options.out) or not Path(options.out).exists():
        return {}
    *whole, _ = Path(options.out).read_text(encoding="utf-8", errors="replace").split("\n")
    found = defaultdict(list)
    for number, line in enumerate(whole, 1):
        with located(f"{options.out}:{number}"):
            found[asked_by(line)].append(line + "\n")
    wanted = Counter(map(key_of, lines))
    done = {asked for asked, count in wanted.items() if len(found[asked]) >= options.n * count}
    answers = {}
    for number, line in enumerate(lines):
        asked = key_of(line)
        if asked in done:
            answers[number] = [found[asked].pop(0) for _ in range(options.n)]
        else:
            found.pop(asked, None)
    if others := sum(map(len, found.values())):
        message = (
            f"{others:,} lines that are no answers to {options.prompts} with --n {options.n}"
        )
        raise InputError(f"--out {options.out} holds {message} (name another file, or remove it)")
    record = record_of(options.out)
    if answers and not record.exists():
        unknown = (
            f"nobody knows whether the answers in {options.out} were made with these settings"
        )
        print(f"note: {record} is missing: {unknown}", file=sys.stderr)
    elif answers:
        before = read_json(record)
        changed = [key for key, value in made_of(options).items() if before.get(key) != value]
        if changed:
            message = f"answers that were made with another {', '.join(changed)}"
            raise InputError(
                f"--out {options.out} holds {message} (name another file, or remove it)"
            )
    return answers


def record_of(out: str) -> Path:
    return Path(out).with_name(f".{Path(out).name}.made_of")


def made_of(options: Namespace) -> dict:
    """Return what decides an answer beside its prompt, as JSON gives it back."""
    settings = {key: value for key, value in vars(options).items() if key not in FREE}
    folders = [folder for folder in (options.model, options.adapter) if folder]
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.safetensors"))]
    weights = [(file.name, *stamp_of(file)) for file in files]
    return json.loads(json.dumps(settings | {"weights": weights}))


def key_of(line: dict) -> str:
    return json.dumps(line, sort_keys=True)


def asked_by(answer: str) -> str:
    """Return the key of the line that an answer answers."""
    try:
        line = json.loads(answer)
        line.pop("text")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise InputError("no answer of this command (name another file as --out)") from None
    return key_of(line)


def answer_prompts(
    options: Namespace,
    lines: list[dict],
    prompts: list[list[int]],
    sampler: Sampler,
    params: SamplingParams,
    answers: dict[int, list[str]],
) -> None:
    """Write each answer as `text` of the line that asked for it, to --out or the terminal.

    prompts: the token ids of each line. answers: those that are there, which others are added to.
    """
    groups = {}
    for number, prompt in enumerate(prompts):
        if number not in answers:
            with located(f"{options.prompts}, prompt {number + 1}"):
                groups[number] = sampler.submit(prompt, params, number)
    finished_lines = (
        (
            number,
            [json.dumps(lines[number] | {"text": x}, ensure_ascii=False) + "\n" for x in texts],
        )
        for number, texts in finished(sampler, groups)
    )
    if options.out is None or is_stream(options.out):
        write_in_order(finished_lines, options.out, answers)
    else:
        append_each(options, finished_lines, answers, len(lines))


def is_stream(out: str) -> bool:
    """Return True for a pipe or a device."""
    return Path(out).exists() and not Path(out).is_file()


def finished(
    sampler: Sampler, groups: dict[int, list[Sample]]
) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each group of samples, with their texts, when all of them have ended."""
    numbers = {sample: number for number, group in groups.items() for sample in group}
    left = {number: len(group) for number, group in groups.items()}
    with sampler.weights.in_use():
        while sampler.busy:
            for sample, _ in sampler.step():
                number = numbers[sample]
                left[number] -= sample.finish_reason is not None
                if not left[number]:
                    yield number, ["".join(sampler.follow(each)) for each in groups[number]]


def write_in_order(
    finished_lines: Iterable[tuple[int, list[str]]],
    out: str | None,
    answers: dict[int, list[str]],
) -> None:
    """Write answers to a pipe, or the terminal: each when those before it are written."""
    following = 0
    with open(out, "w", encoding="utf-8") if out else nullcontext(sys.stdout) as stream:
        for number, texts in finished_lines:
            answers[number] = texts
            while following in answers:
                stream.writelines(answers[following])
                stream.flush()
                following += 1


def append_each(
    options: Namespace,
    finished_lines: Iterable[tuple[int, list[str]]],
    answers: dict[int, list[str]],
    total: int,
) -> None:
    """Append answers to --out as they come, and tell how many there are; at the end, in order."""
    out = Path(options.out)

    def write_all() -> None:
        write_durably(out, "".join("".join(answers[number]) for number in sorted(answers)))

    write_json(record_of(options.out), made_of(options))
    # without what counts for nothing
    write_all()
    try:
        with out.open("a", encoding="utf-8") as stream:
            for number, texts in cli.bar(finished_lines, total, "prompt", len(answers)):
                stream.write("".join(texts))
                stream.flush()
                answers[number] = texts
    except BaseException:
        count = f"{len(answers):,} of {total:,} prompts"
        print(f"note: {out} has answers to {count}: the same command continues", file=sys.stderr)
        raise
    write_all()


def tell_answers(options: Namespace, answers: dict[int, list[str]]) -> None:
    """Say where the answers are, and what may come next."""
    count = sum(map(len, answers.values()))
    print(f"{options.out} holds {count:,} answers, each a line with prompt and text")
    print(f"next: minitrain evaluate --chat {cli.model_words(options)} FILE compares answers")
