"""Train a model: python -m minitrain.train --config FILE [key=value ...], or the same under
torchrun.

Writes to `out_dir`: metrics.jsonl (one JSON object per step), config.yaml (what ran), and
checkpoints/, from which the same command resumes when it runs again. At the end the model comes in
Hugging Face layout, or its adapters in PEFT's, with its tokenizer; for the toy world of shapes also
before.png and after.png, what the model draws. Ctrl-C, SIGTERM and their like end it after the
step, with a checkpoint (watch.py).
"""

from minitrain.run.config.describe import DEFAULTS, annotate, describe_section
from minitrain.run.config.load import load
from minitrain.run.launch import cli


def main(arguments: list[str]) -> None:
    if arguments[:-1] in (["-h"], ["--help"]):
        return print(describe_section(arguments[-1]))
    config = {"--config": (cli.config_path, ..., "a YAML file, or a recipe as train/shapes")}
    settings = "\n".join(
        ["settings, and sections (--help SECTION):", *annotate(DEFAULTS, "  ", False)]
    )
    parser = cli.Parser(
        config, prog="python -m minitrain.train", description=__doc__, epilog=settings
    )
    add = parser.add_argument
    add("--print-config", action="store_true", help="print all settings, with comments")
    add("--deterministic", action="store_true", help="the same run again gives the same bits")
    add("overrides", nargs="*", metavar="key=value", help="settings over those of the file")
    options = parser.parse_args(arguments)
    words = options.overrides
    if options.deterministic:
        words.append("deterministic=true")
    config = load(options.config, words)
    if options.print_config:
        print("\n".join(annotate(config)))
        return
    # brings torch, which takes seconds: --help and a mistyped key are answered before
    from minitrain.run.tasks.rows_task import train

    train(config)


if __name__ == "__main__":
    cli.run(main)
