"""Continue a prompt: python -m minitrain.generate --model DIR --prompt TEXT.

The text is streamed to the terminal. --prompts answers a file of prompts, --chat alone converses.
DIR is any model folder in Hugging Face layout with a tokenizer.json, such as a training run's
out_dir. With --n, the samples are made together and shown one after the other. With --task
diffusion, DIR is a Wan model, and videos come out: see --task diffusion --help.
"""

from minitrain.run.launch import cli
from minitrain.run.launch.cli import home_path, positive

COUNT = positive(int, most=1 << 20)
COMMON = {
    "--model": (home_path, ..., "a folder in Hugging Face layout, as a run's out_dir"),
    "--adapter": (home_path, None, "a LoRA run's out_dir, PEFT's, or for videos a file"),
    "--seed": (int, 0, "of the samples"),
    "--device": (["auto", "cpu", "cuda"], "auto", "where to compute"),
}
TEXT = {
    "--prompt": (str, None, "the text to continue"),
    "--prompts": (home_path, None, "a file of them: lines of text, or JSON with `prompt`"),
    "--out": (home_path, None, "a .jsonl file for the answers to --prompts"),
    "--system": (str, None, "with --chat: the system prompt"),
    "--tokenizer": (home_path, None, "if not the adapter's or the model's own; or bytes"),
    "--max-tokens": (positive(int), 200, "of a sample"),
    "--temperature": (positive(float, zero=True), 0.8, "0: the likeliest token"),
    "--top-k": (positive(int), 0, "choose among the K likeliest tokens"),
    "--top-p": (float, 1.0, "... that hold this share of the probability"),
    "--min-p": (float, 0.0, "... at least this share as likely as the likeliest"),
    "--n": (positive(int, most=1 << 16), 1, "how many samples"),
    "--draft": (home_path, None, "what guesses tokens: a smaller model's folder, or mtp"),
    "--draft-tokens": (positive(int, most=64), 3, "how many it guesses at once"),
    "--chat": (bool, False, "answer, without --prompt line after line"),
}
VIDEOS = {
    "--prompts": (home_path, ..., "a safetensors file, shapes, or with --encoders lines of text"),
    "--out": (home_path, ..., "for latents; for shapes a picture; with --encoders an .mp4"),
    "--encoders": (home_path, None, "a pipeline's folder, which reads text and makes the .mp4"),
    "--negative": (str, "", "with --encoders: the text that guidance leads away from"),
    "--text-tokens": (COUNT, 512, "texts are padded to this many tokens"),
    "--sampler": (["euler", "unipc"], "unipc", "of the flow"),
    "--steps": (COUNT, 50, "of the sampler"),
    "--shift": (positive(float), 5.0, "3 for 480p, 5 for 720p"),
    "--guidance": (positive(float, zero=True), 5.0, "1: none, in half the time"),
    "--dtype": (["fp32", "bf16"], None, "of the weights; by default the files'"),
}
VIDEO = """Generate videos: python -m minitrain.generate --task diffusion --model DIR ...

DIR is a Wan model, in diffusers' layout or the original one; one that is published in fp32 wants
--dtype bf16 on a GPU. With --encoders, the download of a pipeline in diffusers' layout, --prompts are
lines of text and --out is an .mp4 file, or name-1.mp4, name-2.mp4, ... of several lines; with
`--prompts shapes`, the toy world (examples/shapes.py), --out is a PNG, with the same moving as .apng.
Otherwise both are safetensors files, as data/video/latents.py describes them for one video:

    --prompts  text       [videos, tokens, text_dim]             embeddings of the prompts
               negative   [videos or 1, tokens, text_dim]        what guidance leads away from;
                                                                 without it zeros
               condition  [videos, channels, frames, height, width]   for image-to-video models
               image      [videos, tokens, image_dim]            for image-to-video models with CLIP
    --out      latents    [videos, channels, frames, height, width]   normalized
"""


def main(arguments: list[str]) -> None:
    chooser = cli.Parser(add_help=False, allow_abbrev=False)
    chooser.add_argument("--task", choices=["text", "diffusion"], default="text")
    chosen, rest = chooser.parse_known_args(arguments)
    name = "python -m minitrain.generate"
    # a task's own file brings torch, which takes seconds
    if chosen.task == "text":
        parser = cli.Parser(TEXT | COMMON, prog=name, description=__doc__)
        parser.add_argument(
            "--stop", action="append", default=[], help="end after it (repeatable)"
        )
        options = parser.parse_args(rest)
        from minitrain.commands.generate_text import generate_text

        generate_text(options)
    else:
        parser = cli.Parser(VIDEOS | COMMON, prog=f"{name} --task diffusion", description=VIDEO)
        parser.add_argument(
            "--size", type=COUNT, nargs=3, help="frames, height, width of latents"
        )
        options = parser.parse_args(rest)
        from minitrain.commands.generate_video import generate_videos

        generate_videos(options)
