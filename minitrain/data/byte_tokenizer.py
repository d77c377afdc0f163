"""The built-in tokenizer: the bytes of UTF-8.

Bytes need no vocabulary file, no training and no package, and lose nothing; they make sequences
about four times longer than a trained vocabulary does.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np

BOS = "<|bos|>"
EOS = "<|eos|>"
# files beside a tokenizer.json; the first two name special tokens
NAMING_FILES = ("tokenizer_config.json", "special_tokens_map.json")
CHAT_TEMPLATE = "chat_template.jinja"
# tokenizer.model: the same vocabulary; of Nemotron-4's, llama.cpp reads no other file
COMPANIONS = (*NAMING_FILES, CHAT_TEMPLATE, "tokenizer.model", "added_tokens.json")
# a folder of more chat templates
MORE_TEMPLATES = "additional_chat_templates"


class ByteTokenizer:
    """ids 0..255 are the bytes of UTF-8, 256 begins and 257 ends a document.

    Text never encodes to 256 or 257, not even the text "<|eos|>" (transformers would take the
    special token there).
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
        """Return the text of `ids`, with special tokens as they are written only if `special`.

        Invalid UTF-8 is replaced, ids that are no byte are dropped.
        """
        written = {256: BOS.encode(), self.eos_id: EOS.encode()} if special else {}
        parts = (bytes([i]) if 0 <= i < 256 else written.get(i, b"") for i in ids)
        return b"".join(parts).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """Return the id of a special token, by its text, if there is one."""
        return {BOS: 256, EOS: self.eos_id}.get(token)

    def vocabulary(self) -> dict[int, str]:
        """Return each id's token, as tokenizer.json writes it."""
        tokens = {number: text for text, number in byte_level_bpe()["model"]["vocab"].items()}
        return tokens | {256: BOS, self.eos_id: EOS}

    def named_id(self, role: str) -> int | None:
        """Return the id of the `bos`, `eos` or `pad` token, if there is one."""
        return {"bos": 256, "eos": self.eos_id}.get(role)

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json for transformers.AutoTokenizer.

        They replace another tokenizer's files.
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
    """Return the tokenizer.json of a byte-level BPE that never merges: the bytes are the tokens.

    Each byte has GPT-2's character: a printable one its own, others the next from 256 on.
    """
    return json.loads(Path(__file__).with_name("bytes.json").read_text(encoding="utf-8"))


def is_byte_tokenizer(tree: dict) -> bool:
    """Return True if a tokenizer.json is ByteTokenizer's, perhaps saved again by another program."""
    ours = byte_level_bpe()
    try:
        specials = sorted((token["id"], token["content"]) for token in tree["added_tokens"])
        same = tree["model"].items() >= ours["model"].items() and not tree.get("normalizer")
    except (AttributeError, KeyError, TypeError):
        return False
    return same and specials == [(256, BOS), (257, EOS)]


def remove_others(
    folder: str | Path, names: Iterable[str], templates: Path | None = None
) -> None:
    """Remove an earlier tokenizer's files that are not among the new names, and copy `templates`.

    They would still be read: a chat template even before the new one.
    """
    for name in set(COMPANIONS) - set(names):
        Path(folder, name).unlink(missing_ok=True)
    target = Path(folder, MORE_TEMPLATES).resolve()
    if templates is None or templates.resolve() != target:
        shutil.rmtree(target, ignore_errors=True)
        if templates and templates.exists():
            shutil.copytree(templates, target)
