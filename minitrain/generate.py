"""Continue a prompt: python -m minitrain.generate --model DIR --prompt TEXT, streamed to the
terminal.

DIR is any model folder in Hugging Face layout with a tokenizer.json, such as a training run's
out_dir. With --n, the samples are made together and shown one after the other. With --task
diffusion, DIR is a Wan model, and videos come out: see --task diffusion --help.
"""

from argparse import Namespace

from minitrain.run import cli
from minitrain.run.cli import positive

VIDEO = """Generate latents of videos: python -m minitrain.generate --task diffusion --model DIR --prompts
FILE --out FILE.

DIR is a Wan model, in diffusers' layout or the original one; those that are published in fp32 want
--dtype bf16 on a GPU, for half the memory and fast kernels. --adapter is a LoRA run's out_dir, or a
file as diffusers, ComfyUI or musubi-tuner write it. The prompts are a safetensors file with `text`,
embeddings [videos, tokens, text_dim], and what guidance leads away from, `negative`, as many or one
for all (without it, zeros; published models want the embedding of an empty prompt or of what is not
to be seen); for image-to-video models also `condition` and `image` (see data/latents.py). The
result is a safetensors file with `latents` [videos, channels, frames, height, width], normalised as
those of the training: the video autoencoder decodes them times its std, plus its mean. `--prompts
shapes` are those of the toy world (data/shapes.py): the result is a PNG, a video a row, and a
score.
"""


def main(arguments: list[str]) -> None:
    chooser = cli.Parser(add_help=False, allow_abbrev=False)
    chooser.add_argument("--task", choices=["text", "diffusion"], default="text")
    chosen, rest = chooser.parse_known_args(arguments)
    # each brings torch, which takes seconds
    if chosen.task == "diffusion":
        options = parse_video(rest)
        from minitrain.run.generate_video import generate_latents

        return generate_latents(options)
    options = parse_text(rest)
    from minitrain.run.generate_text import generate

    generate(options)


def parse_text(arguments: list[str]) -> Namespace:
    parser = cli.Parser(prog="python -m minitrain.generate", description=__doc__)
    parser.add_argument("--model", required=True, metavar="DIR", type=cli.home_path)
    parser.add_argument(
        "--adapter", metavar="DIR", type=cli.home_path, help="a LoRA run's out_dir, or PEFT's"
    )
    parser.add_argument(
        "--tokenizer", metavar="DIR", help="if not the adapter's or the model's own; or bytes"
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument(
        "--chat", action="store_true", help="answer the prompt, in the model's chat template"
    )
    parser.add_argument("--max-tokens", type=positive(int), default=200)
    parser.add_argument(
        "--temperature", type=positive(float, zero=True), default=0.8, help="0: the likeliest token"
    )
    parser.add_argument(
        "--top-k", type=positive(int), default=0, help="choose among the K likeliest tokens"
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="... that hold this share of the probability"
    )
    parser.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        help="... at least this share as likely as the likeliest",
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end after it (may be repeated)"
    )
    parser.add_argument("--n", type=positive(int, most=1 << 16), default=1, help="how many samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    return parser.parse_args(arguments)


def parse_video(arguments: list[str]) -> Namespace:
    parser = cli.Parser(prog="python -m minitrain.generate --task diffusion", description=VIDEO)
    number = positive(int, most=1 << 20)
    parser.add_argument("--model", required=True, metavar="DIR", type=cli.home_path)
    parser.add_argument(
        "--adapter",
        metavar="PATH",
        type=cli.home_path,
        help="a LoRA run's out_dir, PEFT's, or a file",
    )
    parser.add_argument("--prompts", required=True, metavar="FILE", type=cli.home_path)
    parser.add_argument("--out", required=True, metavar="FILE", type=cli.home_path)
    parser.add_argument(
        "--size", type=number, nargs=3, metavar=("FRAMES", "HEIGHT", "WIDTH"), help="of latents"
    )
    parser.add_argument(
        "--text-tokens", type=number, default=512, help="texts are padded to this many tokens"
    )
    parser.add_argument("--sampler", choices=["euler", "unipc"], default="unipc")
    parser.add_argument("--steps", type=number, default=50)
    parser.add_argument("--shift", type=positive(float), default=5.0, help="3 for 480p, 5 for 720p")
    parser.add_argument(
        "--guidance", type=positive(float, zero=True), default=5.0, help="1: none, in half the time"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dtype", choices=["fp32", "bf16"], help="of the weights; by default the files'"
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    cli.run(main)
