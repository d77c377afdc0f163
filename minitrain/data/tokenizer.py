"""Text to token ids and back: the built-in byte tokenizer, and Hugging Face `tokenizer.json` files.

Bytes need no vocabulary file, no training and no package, and lose nothing; they make sequences
about four times longer than a trained vocabulary does. Both kinds share one small interface:
encode, encode_prompt, encode_array, decode, eos, eos_id, token_id, vocab_size, beginning,
beginning_ids, chat_template, save. Left out: rendering chat templates, which data/chat_templates.py
does, and training a vocabulary.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from minitrain.errors import InputError, hub_hint, refused
from minitrain.formats.config_hf import read_json

BOS = "<|bos|>"
EOS = "<|eos|>"
NAMING_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
)  # which token is eos; see `_naming_files`
ADDED = (
    "content",
    "single_word",
    "lstrip",
    "rstrip",
    "normalized",
    "special",
)  # what files say of an added token
CHAT_TEMPLATE = "chat_template.jinja"
SENTENCEPIECE = (
    "tokenizer.model"  # the same vocabulary: of Nemotron-4's, llama.cpp reads no other file
)
COMPANIONS = (*NAMING_FILES, CHAT_TEMPLATE, SENTENCEPIECE)  # what stands beside a tokenizer.json
REPLACEMENT = "\ufffd"  # what bytes that are not UTF-8 decode to


class ByteTokenizer:
    """ids 0..255 are the bytes of UTF-8, 256 begins and 257 ends a document.

    Text never encodes to 256 or 257, not even the text "<|eos|>" (transformers would take the
    special token there).
    """

    eos_id = 257
    vocab_size = 258
    eos = EOS
    beginning = ""
    beginning_ids = ()
    chat_template = ""

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without bos and eos."""
        return list(text.encode("utf-8"))

    def encode_prompt(self, text: str) -> list[int]:
        """The same: nothing stands before a text."""
        return self.encode(text)

    def encode_array(self, text: str) -> np.ndarray:
        """As `encode`, as a compact array: for a corpus."""
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def decode(self, ids: list[int], special: bool = False) -> str:
        """Return the text of `ids`, with special tokens as they are written only if `special`.
        Invalid UTF-8 is replaced, ids that are no byte are dropped."""
        written = {256: BOS.encode(), self.eos_id: EOS.encode()} if special else {}
        parts = (bytes([i]) if 0 <= i < 256 else written.get(i, b"") for i in ids)
        return b"".join(parts).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """The id of the special token that is written so, if there is one."""
        return {BOS: 256, EOS: self.eos_id}.get(token)

    def vocabulary(self) -> dict[int, str]:
        """Each id's token, as tokenizer.json writes it."""
        return {number: text for text, number in _byte_vocabulary().items()} | {
            256: BOS,
            self.eos_id: EOS,
        }

    def named_id(self, role: str) -> int | None:
        """The id of the `bos`, `eos` or `pad` token, if there is one."""
        return {"bos": 256, "eos": self.eos_id}.get(role)

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, as transformers.AutoTokenizer loads, in
        place of others.
        """
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
        config["clean_up_tokenization_spaces"] = False
        Path(folder).mkdir(parents=True, exist_ok=True)
        files = {"tokenizer.json": _byte_level_bpe(), "tokenizer_config.json": config}
        for name, tree in files.items():
            Path(folder, name).write_text(json.dumps(tree, indent=1), encoding="utf-8")
        _remove_others(folder, files)


class HuggingFaceTokenizer:
    """A `tokenizer.json`, read by the `tokenizers` package; eos_id: None if no file beside it names
    one.

    below: what is encoded must be, if not None.
    """

    below: int | None = None

    def __init__(self, file: Path):
        try:
            import tokenizers
        except ImportError as error:
            raise InputError(
                f"{file} needs the tokenizers package: pip install 'minitrain[text]'"
            ) from error
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except (
            BaseException
        ) as error:  # the package raises nothing narrower, and a panic in Rust is not an Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            raise InputError(f"{file} is not a Hugging Face tokenizer: {error}") from error
        self.tokenizer.no_truncation()  # which a file may ask for, of whoever saved it; transformers does neither too
        self.tokenizer.no_padding()
        self.file = file
        self.config_file = file.with_name(NAMING_FILES[0])
        self.config = _read_json(self.config_file)
        self._add_listed(tokenizers.AddedToken)
        self.vocab_size = (
            max(self.tokenizer.get_vocab().values(), default=-1) + 1
        )  # ids may have gaps
        self.eos_id = self._eos_id()
        self.bos_id = self._bos_id()

    def encode(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False)

    def encode_prompt(self, text: str) -> list[int]:
        """With what the files put around a text, such as bos: what a model is given to continue."""
        ids = self._encode(text, add_special_tokens=True)
        return ids if self.bos_id is None or ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # the package raises nothing narrower
            raise InputError(f"{self.file} cannot encode {text[:40]!r}: {error}") from error
        if self.below is not None and max(ids, default=0) >= self.below:
            raise InputError(
                f"{text[:40]!r} holds a token that the model's vocabulary of {self.below} does not have"
            )
        return ids

    def encode_array(self, text: str) -> np.ndarray:
        return np.array(self.encode(text), np.uint32)

    def decode(self, ids: list[int], special: bool = False) -> str:
        return self.tokenizer.decode(list(map(int, ids)), skip_special_tokens=not special)

    def token_id(self, token: str) -> int | None:
        return self.tokenizer.token_to_id(token)

    def vocabulary(self) -> dict[int, str]:
        return {number: text for text, number in self.tokenizer.get_vocab().items()}

    def named_id(self, role: str) -> int | None:
        token = self.special_tokens().get(f"{role}_token")
        return None if token is None else self.token_id(token)

    def added_tokens(self) -> list[str]:
        """Those that no merge makes: the special ones, and others found in a text as a whole."""
        return [token.content for token in self.tokenizer.get_added_tokens_decoder().values()]

    def special_tokens(self) -> dict[str, str]:
        """bos_token, eos_token, pad_token, ... as the files beside it name them, to which chat
        templates refer.
        """
        named = {}
        for file in self._naming_files():
            named = _read_json(file) | named
        texts = {
            key: token.get("content") if isinstance(token, dict) else token
            for key, token in named.items()
        }
        return {
            key: text
            for key, text in texts.items()
            if key.endswith("_token") and isinstance(text, str)
        }

    @property
    def eos(self) -> str | None:
        """What is written for eos_id."""
        return None if self.eos_id is None else self.tokenizer.id_to_token(self.eos_id)

    @property
    def beginning(self) -> str:
        """What the files put before a text, such as bos, as it is written."""
        return "".join(map(self.tokenizer.id_to_token, self.beginning_ids))

    @cached_property  # each chat and each corpus asks
    def beginning_ids(self) -> list[int]:
        """The same as tokens."""
        whole = self.encode_prompt("x")
        text = self.encode("x")
        count = next((i for i in range(len(whole)) if whole[i : i + len(text)] == text), 0)
        return whole[:count]

    @property
    def chat_template(self) -> str:
        """The template that came with the tokenizer, in Jinja; empty if none did."""
        file = self.file.with_name(CHAT_TEMPLATE)
        if file.exists():
            with refused(f"{file} cannot be read as text"):
                return file.read_text(encoding="utf-8")
        stored = self.config.get("chat_template") or ""
        if isinstance(stored, list):  # several, by name
            named = [
                entry
                for entry in stored
                if isinstance(entry, dict) and entry.get("name") == "default"
            ]
            stored = named[0].get("template") if named else ""
        if not isinstance(stored, str):
            raise InputError(
                f"{self.config_file}: chat_template must be text, or a list of texts with names"
            )
        return stored

    def save(self, folder: str | Path) -> None:
        """Copy the file, and those beside it that transformers.AutoTokenizer or llama.cpp reads, in
        place of others.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        sources = with_companions(self.file)
        for source in sources:
            target = Path(folder, "tokenizer.json" if source == self.file else source.name)
            if source.resolve() != target.resolve():
                shutil.copyfile(source, target)
        _remove_others(folder, [source.name for source in sources])

    def _add_listed(self, added_token: type) -> None:
        """The tokens that tokenizer_config.json lists: new ones, and others with what is said there
        of spaces.
        """
        try:
            listed = sorted(
                (self.config.get("added_tokens_decoder") or {}).items(),
                key=lambda item: int(item[0]),
            )
            settings = [
                {key: token[key] for key in ADDED if token.get(key) is not None}
                for _, token in listed
            ]
            self.tokenizer.add_tokens([added_token(**each) for each in settings])
        except (AttributeError, TypeError, ValueError) as error:
            problem = f"added_tokens_decoder must list tokens by their ids: {error}"
            raise InputError(f"{self.config_file}: {problem}") from None

    def _eos_id(self) -> int | None:
        """From the first file that mentions it (null: there is none)."""
        for file in self._naming_files():
            tree = _read_json(file)
            if "eos_token" in tree:
                token = tree["eos_token"]
                token = token.get("content") if isinstance(token, dict) else token
                if not isinstance(token, str | None):
                    raise InputError(f"{file}: eos_token must be text, not {token!r}")
                return None if token is None else self._known_id(token, file)
        file = self.file.with_name("config.json")
        ids = _read_json(file).get("eos_token_id")
        first = next(iter(ids), None) if isinstance(ids, list) else ids
        if type(first) not in (int, type(None)):
            raise InputError(f"{file}: eos_token_id must be a token id, not {ids!r}")
        return first

    def _naming_files(self) -> list[Path]:
        """In the order in which they count in transformers: tokenizer_config.json comes first if it
        lists all tokens, as it does since 2023; older ones are overruled."""
        files = [self.file.with_name(name) for name in NAMING_FILES]
        return files if "added_tokens_decoder" in self.config else files[::-1]

    def _bos_id(self) -> int | None:
        """The token before a text, if tokenizer_config.json wants one. DeepSeek's tokenizer.json,
        which has none there, relies on that; transformers 4 heeds it, 5 does not."""
        token = self.special_tokens().get("bos_token")
        return (
            self._known_id(token, self.config_file)
            if token and self.config.get("add_bos_token") is True
            else None
        )

    def _known_id(self, token: str, file: Path) -> int:
        """The id of a token that `file` names."""
        number = self.token_id(token.encode("utf-8", "replace").decode())
        if number is None:
            raise InputError(f"{file} names the token {token!r}, which {self.file} does not hold")
        return number


Tokenizer = ByteTokenizer | HuggingFaceTokenizer


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """ "bytes", a tokenizer.json, or a folder that holds one. A saved ByteTokenizer needs no
    package.
    """
    return (
        ByteTokenizer()
        if is_of_bytes(name_or_path)
        else HuggingFaceTokenizer(tokenizer_file(name_or_path))
    )


def is_of_bytes(name_or_path: str | Path) -> bool:
    """Is a ByteTokenizer meant? Raises InputError as `tokenizer_file` does."""
    file = tokenizer_file(name_or_path)
    return file is None or _is_byte_tokenizer(_read_json(file))


def tokenizer_file(name_or_path: str | Path) -> Path | None:
    """The tokenizer.json that is meant, None for "bytes". Raises InputError where there is no such
    file.
    """
    if name_or_path == "bytes":
        return None
    file = Path(name_or_path)
    if file.is_dir():
        file = file / "tokenizer.json"
        if not file.is_file():
            hint = "save_pretrained of transformers' AutoTokenizer writes one"
            raise InputError(f"{name_or_path} holds no tokenizer.json ({hint})")
    if not file.is_file():
        hint = hub_hint(str(name_or_path), "give ")
        raise InputError(
            f"tokenizer {str(name_or_path)!r} is not 'bytes', a tokenizer.json or a folder with one{hint}"
        )
    return file


def tokenizer_folder(model: str | Path, adapter: str | Path | None) -> str | Path:
    """Where the tokenizer is: beside adapters, if one is there, as it has the chat template that
    they were tuned in.
    """
    return adapter if adapter and Path(adapter, "tokenizer.json").exists() else model


def check_same_ids(name_or_path: str | Path, folder: str | Path, option: str) -> None:
    """Raises InputError if a tokenizer's ids are other tokens in the tokenizer of a model's folder,
    if that has one.

    Either may have more tokens. option: what stands before the tokenizer's name on a command line.
    """
    file = Path(folder, "tokenizer.json")
    if not file.exists() or ((own := tokenizer_file(name_or_path)) and own.samefile(file)):
        return
    ours, theirs = (load_tokenizer(each).vocabulary() for each in (name_or_path, folder))
    count = sum(theirs.get(number, text) != text for number, text in ours.items())
    if count:
        what = f"{option}{name_or_path}: {count:,} of {len(ours):,} ids"
        raise InputError(
            f"{what} are other tokens in {folder}/tokenizer.json (use {option}{folder})"
        )


def check_free_of_tokenizer(folder: str | Path) -> None:
    """Raises InputError if a folder has the tokenizer of an older model, where one that comes
    without is to be.
    """
    if Path(folder, "tokenizer.json").exists():
        raise InputError(
            f"{folder} holds a tokenizer.json, which is not this model's (remove it, or use another)"
        )


def with_companions(file: Path) -> list[Path]:
    """A tokenizer.json, and the files beside it that say more of the same tokenizer."""
    return [file, *(beside for name in COMPANIONS if (beside := file.with_name(name)).exists())]


def stream(tokenizer: Tokenizer, ids: Iterable[int], prompt: Iterable[int] = ()) -> Iterator[str]:
    """The text of `ids`, which follow `prompt`, in pieces: each as soon as it is certain, at the
    latest after the last.

    A character whose bytes have not all come decodes to the replacement character, so a text that
    ends in one waits. The last piece is decoded again with the next, as context: many vocabularies
    drop a space at the start of a text.
    """
    context = list(prompt)
    pending = []
    for token in ids:
        pending.append(token)
        text = tokenizer.decode(context + pending)[len(tokenizer.decode(context)) :]
        if text and not text.endswith(REPLACEMENT):
            yield text
            context = pending
            pending = []
    if rest := tokenizer.decode(context + pending)[len(tokenizer.decode(context)) :]:
        yield rest


def _remove_others(folder: str | Path, names: Iterable[str]) -> None:
    """What an earlier tokenizer has left beside those that are new would count: a chat template
    even before theirs.
    """
    for name in set(COMPANIONS) - set(names):
        Path(folder, name).unlink(missing_ok=True)


def _read_json(file: Path) -> dict:
    """The object in a JSON file; empty if there is no such file."""
    return read_json(file) if file.exists() else {}


def _byte_vocabulary() -> dict[str, int]:
    """Byte-level BPE (GPT-2) writes a byte as a visible character: itself if printable, else the
    next from 256 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return {chr(byte if byte in printable else next(spare)): byte for byte in range(256)}


def _byte_level_bpe() -> dict:
    """The tokenizer.json of a byte-level BPE that never merges, so that the bytes are the
    tokens.
    """
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, **flags} for i, token in ((256, BOS), (257, EOS))
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": _byte_vocabulary(), "merges": []},
    }


def _is_byte_tokenizer(tree: dict) -> bool:
    """Is this what ByteTokenizer.save writes, perhaps saved again by another program?"""
    ours = _byte_level_bpe()["model"]
    model = tree.get("model")
    added = tree.get("added_tokens")
    if not isinstance(model, dict) or any(model.get(key) != value for key, value in ours.items()):
        return False
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        return False
    specials = sorted((str(token.get("id")), str(token.get("content"))) for token in added)
    return specials == [("256", BOS), ("257", EOS)] and not tree.get("normalizer")
