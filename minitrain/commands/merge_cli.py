"""Add adapters to the weights that they belong to: python -m minitrain.merge --model DIR --adapter
DIR --out DIR.

--model is a folder in Hugging Face layout. --adapter is a folder in PEFT's format, such as a LoRA run's out_dir; for
Wan it can also be a file as diffusers, ComfyUI or musubi-tuner write it. --out becomes a model like any other, in the
base model's type. Its tokenizer and chat template are the adapter's, or else the base model's.
"""

from minitrain.run.launch import cli


def main(arguments: list[str]) -> None:
    names = ("--model", "--adapter", "--out")
    places = dict.fromkeys(names, (cli.home_path, ..., "a folder: see above"))
    parser = cli.Parser(places, prog="python -m minitrain.merge", description=__doc__)
    options = parser.parse_args(arguments)
    from minitrain.commands.merge import merge

    merge(options)


if __name__ == "__main__":
    cli.run(main)
