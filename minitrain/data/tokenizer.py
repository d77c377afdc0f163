"""Convert text to token ids and back, by Hugging Face's `tokenizer.json` files or by bytes.

Both kinds share one small interface: encode, encode_prompt, encode_array, decode, eos, eos_id,
token_id, vocab_size, beginning, beginning_ids, chat_template, save. Left out: rendering chat
templates, which data/chat/chat_templates.py does, and training a vocabulary.
"""

import shutil
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from minitrain.data.byte_tokenizer import ByteTokenizer, is_byte_tokenizer
from minitrain.data.tokenizer_files import (
    CHAT_TEMPLATE,
    COMPANIONS,
    MORE_TEMPLATES,
    NAMING_FILES,
    remove_others,
)
from minitrain.errors import InputError, as_input_error, hub_hint
from minitrain.formats.json_files import read_json
from minitrain.formats.magic import kind_of_checkpoint

# the number of characters before a text on which its first token can depend
LONGEST_TOKEN = 64
# settings of an added token
ADDED = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


class HuggingFaceTokenizer:
    """A `tokenizer.json`, read by the `tokenizers` package.

    eos_id: None if no file names one. below: if not None, ids must be less than it.
    """

    below: int | None = None

    def __init__(self, file: Path):
        try:
            import tokenizers
        except ImportError as error:
            raise InputError(
                f"{file} needs the tokenizers package: pip install -e '.[text]'"
            ) from error
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except KeyboardInterrupt:
            raise
        # the package raises no specific exceptions, and a panic in Rust is not an Exception
        except BaseException as error:
            raise InputError(f"{file} is not a Hugging Face tokenizer: {error}") from error
        # a file may turn these on; transformers ignores that too
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.file = file
        self.config_file = file.with_name(NAMING_FILES[0])
        self.config = _read_json(self.config_file)
        self._add_listed(tokenizers.AddedToken)
        # ids may have gaps
        self.vocab_size = max(self.tokenizer.get_vocab().values(), default=-1) + 1
        self.eos_id = self._eos_id()
        # DeepSeek's tokenizer.json adds no bos and relies on add_bos_token, which transformers 4
        # follows and 5 ignores
        bos = self.special_tokens().get("bos_token")
        self.bos_id = None
        if bos and self.config.get("add_bos_token") is True:
            self.bos_id = self._known_id(bos, self.config_file)

    def __repr__(self) -> str:
        return f"{self.file}: {self.vocab_size:,} tokens, texts end with {self.eos!r}"

    def encode(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt, with special tokens such as bos."""
        ids = self._encode(text, add_special_tokens=True)
        return ids if self.bos_id is None or ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        # the package raises no specific exceptions
        except Exception as error:
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
        """Return the added tokens, special or not, which are matched as a whole."""
        return [token.content for token in self.tokenizer.get_added_tokens_decoder().values()]

    def special_tokens(self) -> dict[str, str]:
        """Return bos_token, eos_token, pad_token, ... for chat templates, as the files name them."""
        named = {}
        for file in self._naming_files():
            named = _read_json(file) | named
        texts = {key: _content(token) for key, token in named.items() if key.endswith("_token")}
        return {key: text for key, text in texts.items() if isinstance(text, str)}

    @property
    def eos(self) -> str | None:
        """Return the text of eos_id."""
        return None if self.eos_id is None else self.tokenizer.id_to_token(self.eos_id)

    @property
    def beginning(self) -> str:
        """Return the text of beginning_ids."""
        return "".join(map(self.tokenizer.id_to_token, self.beginning_ids))

    # cached, because it is needed for every chat
    @cached_property
    def beginning_ids(self) -> list[int]:
        """Return the tokens that are added before a prompt, such as bos."""
        whole = self.encode_prompt("x")
        text = self.encode("x")
        count = next((i for i in range(len(whole)) if whole[i : i + len(text)] == text), 0)
        return whole[:count]

    @property
    def chat_template(self) -> str:
        """Return the template that came with the tokenizer, in Jinja; empty if none did."""
        file = self.file.with_name(CHAT_TEMPLATE)
        if file.exists():
            with as_input_error(f"{file} cannot be read as text"):
                return file.read_text(encoding="utf-8")
        stored = self.config.get("chat_template") or ""
        # a list of templates with names
        if isinstance(stored, list):
            entries = [entry for entry in stored if isinstance(entry, dict)]
            named = [entry.get("template") for entry in entries if entry.get("name") == "default"]
            stored = named[0] if named else ""
        if not isinstance(stored, str):
            raise InputError(
                f"{self.config_file}: chat_template must be text, or a list of texts with names"
            )
        return stored

    def save(self, folder: str | Path) -> None:
        """Copy the file, and those beside it that transformers.AutoTokenizer or llama.cpp reads.

        Files of another tokenizer in the folder are replaced or removed.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        sources = with_companions(self.file)
        for source in sources:
            target = Path(folder, "tokenizer.json" if source == self.file else source.name)
            if source.resolve() != target.resolve():
                shutil.copyfile(source, target)
        remove_others(
            folder, [source.name for source in sources], self.file.with_name(MORE_TEMPLATES)
        )

    def _add_listed(self, added_token: type) -> None:
        """Add the tokens that tokenizer_config.json lists, or change their settings."""
        listed = self.config.get("added_tokens_decoder") or {}
        tokens = []
        try:
            for _, given in sorted(listed.items(), key=lambda item: int(item[0])):
                settings = {key: given[key] for key in ADDED if given.get(key) is not None}
                tokens.append(added_token(**settings))
            self.tokenizer.add_tokens(tokens)
        except (AttributeError, TypeError, ValueError) as error:
            problem = f"added_tokens_decoder must list tokens by their ids: {error}"
            raise InputError(f"{self.config_file}: {problem}") from None

    def _eos_id(self) -> int | None:
        """Return the id of eos from the first file that has it; null there means that there is none."""
        for file in self._naming_files():
            tree = _read_json(file)
            if "eos_token" in tree:
                token = _content(tree["eos_token"])
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
        """Return the files that name special tokens, in the order of precedence in transformers.

        tokenizer_config.json comes first if it lists all tokens, as those since 2023 do, otherwise
        last.
        """
        files = [self.file.with_name(name) for name in NAMING_FILES]
        return files if "added_tokens_decoder" in self.config else files[::-1]

    def _known_id(self, token: str, file: Path) -> int:
        """Return the id of a token that `file` names."""
        number = self.token_id(token.encode("utf-8", "replace").decode())
        if number is None:
            raise InputError(f"{file} names the token {token!r}, which {self.file} does not hold")
        return number


Tokenizer = ByteTokenizer | HuggingFaceTokenizer


def load_tokenizer(
    name_or_path: str | Path,
    of_bytes: type[ByteTokenizer] = ByteTokenizer,
    of_file: type[HuggingFaceTokenizer] = HuggingFaceTokenizer,
) -> Tokenizer:
    """Return the tokenizer named "bytes", or that of a tokenizer.json, or of a folder.

    A saved ByteTokenizer can be loaded without the package tokenizers.
    """
    file = tokenizer_file(name_or_path)
    if file is None or is_byte_tokenizer(read_json(file)):
        return of_bytes()
    return of_file(file)


def tokenizer_file(name_or_path: str | Path) -> Path | None:
    """Return the tokenizer.json, or None for "bytes". Raises InputError if there is no such file."""
    if name_or_path == "bytes":
        return None
    file = Path(name_or_path)
    if file.is_dir():
        file = file / "tokenizer.json"
        if not file.is_file():
            hint = " (save_pretrained of transformers' AutoTokenizer writes one)"
            hint = kind_of_checkpoint(file.parent) or hint
            raise InputError(f"{name_or_path} holds no tokenizer.json{hint}")
    if not file.is_file():
        hint = hub_hint(str(name_or_path), "give ")
        raise InputError(
            f"tokenizer {str(name_or_path)!r} is not 'bytes', a tokenizer.json or a folder with one{hint}"
        )
    return file


def fitting_tokenizer(name: str, vocab_size: int) -> Tokenizer:
    """Return the tokenizer `name`. Raises InputError if an id is not less than `vocab_size`.

    Only the id of pad may be, which is neither read nor predicted; texts that contain pad are refused.
    """
    tokenizer = load_tokenizer(name)
    beyond = {number for number in tokenizer.vocabulary() if number >= vocab_size}
    if beyond == {tokenizer.named_id("pad")}:
        tokenizer.below = vocab_size
    elif beyond:
        raise InputError(
            f"model.vocab_size={vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}"
        )
    if not 0 <= (tokenizer.eos_id or 0) < vocab_size:
        raise InputError(
            f"data.tokenizer={name} has eos={tokenizer.eos_id}, outside model.vocab_size={vocab_size}"
        )
    return tokenizer


def encode_after(before: str, text: str, encode: Callable[[str], Sequence]) -> Sequence:
    """Return the tokens of `text` as a continuation of `before`.

    Many tokenizers treat the start of a text differently, for example by adding a space. If a token
    would span both, return the tokens of `text` alone.
    """
    context = encode(before)
    whole = encode(before + text)
    start = len(context)
    return whole[start:] if np.array_equal(whole[:start], context) else encode(text)


def tokenizer_folder(model: str | Path, adapter: str | Path | None) -> str | Path:
    """Return the adapter's folder if it has a tokenizer, otherwise the model's.

    The adapter's tokenizer has the chat template of its training.
    """
    return adapter if adapter and Path(adapter, "tokenizer.json").exists() else model


def check_same_ids(
    name_or_path: str | Path, folder: str | Path, option: str, use: str = ""
) -> None:
    """Raise InputError if ids of a tokenizer are other tokens in the tokenizer of a model's folder.

    Either may have further tokens; without a tokenizer in the folder, nothing is checked. option: the
    option or setting that names the tokenizer, for the message. use: what to use instead, by default
    the folder's.
    """
    file = Path(folder, "tokenizer.json")
    if not file.exists() or ((own := tokenizer_file(name_or_path)) and own.samefile(file)):
        return
    ours, theirs = (load_tokenizer(each).vocabulary() for each in (name_or_path, folder))
    count = sum(theirs.get(number, text) != text for number, text in ours.items())
    if count:
        use = use or f"{option}{folder}"
        raise InputError(
            f"{option}{name_or_path}: {count:,} of {len(ours):,} ids are other tokens in {folder}/tokenizer.json (use "
            f"{use})"
        )


def check_free_of_tokenizer(folder: str | Path) -> None:
    """Raise InputError if a folder holds a tokenizer; for saving a model that has none."""
    if Path(folder, "tokenizer.json").exists():
        raise InputError(
            f"{folder} holds a tokenizer.json, which is not this model's (remove it, or use another)"
        )


def with_companions(file: Path) -> list[Path]:
    """Return a tokenizer.json and the files beside it that belong to the tokenizer."""
    return [file, *(beside for name in COMPANIONS if (beside := file.with_name(name)).exists())]


def _read_json(file: Path) -> dict:
    """Return the object in a JSON file; empty if there is no such file."""
    return read_json(file) if file.exists() else {}


def _content(token: Any) -> Any:
    """Return the text of a special token, which files hold alone or in an object."""
    return token.get("content") if isinstance(token, dict) else token
