"""Write a tiny Wan pipeline, with videos and captions."""

from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from minitrain import save_pretrained
from minitrain.models.wan import Wan
from minitrain.models.zoo import model_config

CAPTION = "a red  square &amp; a blue one"
WORDS = ["<pad>", "</s>", "<unk>", "a", "red", "square", "&", "blue"]


def write_pipeline(folder: Path) -> Path:
    """Write vae, text_encoder, tokenizer, transformer, and videos with captions; return the folder."""
    torch.manual_seed(0)
    way = {"base_dim": 3, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    AutoencoderKLWan(**way).save_pretrained(folder / "vae")
    shape = {
        "vocab_size": 8,
        "d_model": 64,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
    }
    UMT5EncoderModel(UMT5Config(**shape)).bfloat16().save_pretrained(folder / "text_encoder")
    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(
        folder / "tokenizer"
    )
    save_pretrained(Wan(model_config("wan2.1-1.3b-tiny")), folder / "transformer")
    for clip, count in (("one", 7), ("two", 5), ("three", 9)):
        frames = folder / "videos" / clip
        frames.mkdir(parents=True)
        for i in range(count):
            pixels = np.random.default_rng(i).integers(0, 256, (32, 48, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(frames / f"{i:03}.png")
        (folder / "videos" / f"{clip}.txt").write_text(CAPTION)
    return folder
