"""Train a model: minitrain train FILE [key=value ...]; torchrun ... -m minitrain train FILE ...

Writes to `out_dir`: metrics.jsonl (one JSON object per step), config.yaml (what ran), and
checkpoints/, from which the same command resumes when it runs again. At the end the model comes in
Hugging Face layout, or its adapters in PEFT's, with its tokenizer; for the toy world of shapes also
before.png and after.png, what the model draws. Ctrl-C, SIGTERM and their like end it after the
step, with a checkpoint (watch.py).
"""

from pathlib import Path
from typing import Any

from minitrain.run.config.config_yaml import as_words
from minitrain.run.config.load import load
from minitrain.run.config.recipes import config_path, only_config, with_remedy
from minitrain.run.launch import cli

OPTIONS = {
    "--config": (config_path, None, "a YAML file, or a recipe as train/shapes"),
    "--print-config": (bool, False, "print all settings, with comments"),
    "--deterministic": (bool, False, "the same run again gives the same bits"),
}


def main(arguments: list[str]) -> None:
    if arguments[:-1] in (["-h"], ["--help"]):
        from minitrain.run.config.describe import describe_section

        return print(describe_section(arguments[-1]))
    parser = cli.Parser(
        OPTIONS, settings=True, prog="python -m minitrain.train", description=__doc__
    )
    if "-h" in arguments or "--help" in arguments:
        from minitrain.run.config.describe import list_settings

        parser.epilog = list_settings()
    parser.add_argument(
        "words", nargs="*", metavar="key=value", help="the config, and settings over its own"
    )
    options = parser.parse_args(arguments)
    file, words = only_config(options.config, options.words)
    if options.deterministic:
        words.append("deterministic=true")
    with with_remedy(file):
        config = load(file, words)
        if options.print_config:
            from minitrain.run.config.describe import annotate

            return print("\n".join(annotate(config)))
        # brings torch, which takes seconds: --help and a mistyped key are answered before
        from minitrain.run.tasks import train_model

        train_model.train(config)


def train(config: str | Path, **settings: Any) -> None:
    """Train as a YAML file or a recipe says, as the command does: minitrain.train(FILE, steps=10).

    settings: those over the file's, sections as dicts: optim={"lr": 1e-4}. Raises InputError.
    """
    from minitrain.run.tasks import train_model

    file = config_path(str(config))
    with with_remedy(file):
        train_model.train(load(file, as_words(settings)))
