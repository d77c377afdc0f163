"""The built-in tokenizer: tokens are the bytes of UTF-8.

It needs no vocabulary file, no training and no package, and loses nothing. Sequences are about four
times as long as with a trained vocabulary.
"""

import json
from pathlib import Path

import numpy as np

from minitrain.data.tokenizer_files import remove_others

BOS = "<|bos|>"
EOS = "<|eos|>"


class ByteTokenizer:
    """A tokenizer with ids 0 to 255 for bytes, 256 for bos and 257 for eos.

    Text never encodes to 256 or 257, not even the text "<|eos|>", which transformers would encode as
    the special token.
    """

    eos_id = 257
    below = None
    vocab_size = 258
    eos = EOS
    beginning = ""
    beginning_ids = ()
    chat_template = ""

    def __repr__(self) -> str:
        return f"bytes: {self.vocab_size} tokens, texts end with {self.eos!r}"

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without bos and eos."""
        return list(text.encode("utf-8"))

    def encode_prompt(self, text: str) -> list[int]:
        """Return the same: nothing stands before a text."""
        return self.encode(text)

    def encode_array(self, text: str) -> np.ndarray:
        """Return the ids as a compact array, for a corpus."""
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def decode(self, ids: list[int], special: bool = False) -> str:
        """Return the text of `ids`, with special tokens only if `special`.

        Invalid UTF-8 is replaced, and other ids are dropped.
        """
        written = {256: BOS.encode(), self.eos_id: EOS.encode()} if special else {}
        parts = (bytes([i]) if 0 <= i < 256 else written.get(i, b"") for i in ids)
        return b"".join(parts).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """Return the id of a special token by its text, or None."""
        return {BOS: 256, EOS: self.eos_id}.get(token)

    def vocabulary(self) -> dict[int, str]:
        """Return id -> token, as in tokenizer.json."""
        tokens = {number: text for text, number in byte_level_bpe()["model"]["vocab"].items()}
        return tokens | {256: BOS, self.eos_id: EOS}

    def named_id(self, role: str) -> int | None:
        """Return the id of the `bos`, `eos` or `pad` token, or None."""
        return {"bos": 256, "eos": self.eos_id}.get(role)

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json for transformers.AutoTokenizer.

        Files of another tokenizer in the folder are replaced or removed.
        """
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "clean_up_tokenization_spaces": False,
        }
        Path(folder).mkdir(parents=True, exist_ok=True)
        files = {"tokenizer.json": byte_level_bpe(), "tokenizer_config.json": config}
        for name, tree in files.items():
            Path(folder, name).write_text(json.dumps(tree, indent=1), encoding="utf-8")
        remove_others(folder, files)


def byte_level_bpe() -> dict:
    """Return the tokenizer.json of a byte-level BPE without merges, whose tokens are the bytes.

    Bytes are written as GPT-2's characters: printable ones as themselves, others from 256 on.
    """
    return json.loads(Path(__file__).with_name("bytes.json").read_text(encoding="utf-8"))


def is_byte_tokenizer(tree: dict) -> bool:
    """Return True if a tokenizer.json is ByteTokenizer's, also after another program saved it."""
    ours = byte_level_bpe()
    try:
        specials = sorted((token["id"], token["content"]) for token in tree["added_tokens"])
        same = tree["model"].items() >= ours["model"].items() and not tree.get("normalizer")
    except (AttributeError, KeyError, TypeError):
        return False
    return same and specials == [(256, BOS), (257, EOS)]
