"""Train a model: python -m minitrain.train --config FILE [key=value ...], or the same under
torchrun.

Writes to `out_dir`: metrics.jsonl (one JSON object per step), config.yaml (what ran), checkpoints/
(to resume from, which happens by itself when the same command runs again), and at the end the model
in Hugging Face layout, or its adapters in PEFT's, with its tokenizer; for the toy world of shapes
also before.png and after.png, what the model draws. Ctrl-C, SIGTERM and their like end it after the
step, with a checkpoint (watch.py).
"""

from minitrain.run import cli
from minitrain.run.config import load


def main(arguments: list[str]) -> None:
    parser = cli.Parser(prog="python -m minitrain.train", description=__doc__)
    parser.add_argument("--config", required=True, metavar="FILE", type=cli.config_path)
    parser.add_argument(
        "--deterministic", action="store_true", help="the same run again gives the same bits"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings over those of the file"
    )
    options = parser.parse_args(arguments)
    words = options.overrides
    if options.deterministic:
        words.append("deterministic=true")
    config = load(options.config, words)
    # brings torch, which takes seconds: --help and a mistyped key are answered before
    from minitrain.run.train_model import train

    train(config)


if __name__ == "__main__":
    cli.run(main)
