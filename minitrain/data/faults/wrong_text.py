"""Recognize what a text is that is not UTF-8, not JSON or not YAML, and tell what to do with it."""

import ast
import codecs
import json
import re
from contextlib import suppress

# byte order mark -> iconv's name of the encoding
MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
# encodings that are tried for text without a mark
UNMARKED = ("UTF-32LE", "UTF-32BE", "UTF-16LE", "UTF-16BE")
# bytes from which an encoding is recognized
LOOKED_AT = 1 << 12
# characters of a line of JSON that are examined
LONGEST = 1 << 20
# signs beyond ASCII, besides letters, that western text contains
WESTERN = (
    "\u2018\u2019\u201c\u201d\u2013\u2014\u2026\u20ac\xa3\xa9\xae\xb0\xab\xbb\xbf\xa1\xbd\xa0"
)
# characters that look like a sign of YAML -> that sign
LOOK_ALIKES = {
    "\uff1a": ":",
    "\uff0c": ",",
    "\u00a0": "a space",
    "\u3000": "a space",
    "\u200b": "nothing",
    "\u201c": '"',
    "\u201d": '"',
}
CSV = "a table in text (datasets' Dataset.from_csv(FILE).to_json(NEW) converts it)"


def encoding_of(raw: bytes) -> str:
    """Return the encoding of a text that is not UTF-8, from its mark, zero bytes or letters.

    "" if it may be UTF-8, or if the encoding is not recognized.
    """
    head = raw[:LOOKED_AT]
    for mark, code in MARKS.items():
        if head.startswith(mark):
            return code
    for code in UNMARKED if b"\0" in head else ():
        with suppress(UnicodeDecodeError):
            # whole characters only
            text = head[: len(head) // 4 * 4].decode(code)
            plain = all(letter.isprintable() or letter in "\t\n\r" for letter in text)
            ascii_letters = sum(map(str.isascii, text))
            if plain and text[:1].isascii() and 2 * ascii_letters > len(text):
                return code
    return one_byte_encoding(raw)


def one_byte_encoding(raw: bytes) -> str:
    """Return the encoding of western text with one byte per character; "" for all else.

    In such text, bytes beyond ASCII are letters or signs such as quotes, at most two in a row.
    """
    with suppress(UnicodeDecodeError):
        raw.decode()
        return ""
    runs = re.findall(rb"[\x80-\xff]+", raw)
    letters = b"".join(runs).decode("cp1252", "replace")
    is_western = all(letter.isalpha() or letter in WESTERN for letter in letters)
    if b"\0" in raw or max(map(len, runs)) > 2 or not is_western:
        return ""
    return "WINDOWS-1252" if re.search(rb"[\x80-\x9f]", raw) else "ISO-8859-1"


def in_utf8(raw: bytes) -> str:
    """Return in parentheses how to convert bytes that are not UTF-8."""
    code = encoding_of(raw)
    reason = f"it is {code}" if code else "if it is text of another ENCODING"
    return f" ({reason}: iconv -f {code or 'ENCODING'} -t UTF-8 FILE > NEW)"


def look_alike(text: str) -> str:
    """Return where a text that is no YAML has a character of LOOK_ALIKES, as LINE: what to write."""
    for number, line in enumerate(text.splitlines(), 1):
        for letter, sign in LOOK_ALIKES.items():
            if letter in line.partition("#")[0]:
                return f"{number}: U+{ord(letter):04X} is no sign of YAML (write {sign})"
    return ""


def not_json(text: str, texts: str) -> str:
    """Return in parentheses what is wrong with a line of JSON that cannot be parsed; "" if unknown.

    texts: where lines of text belong.
    """
    text = text[:LONGEST].strip()
    if text[:1] not in ("{", "["):
        return f" ({not_an_object(text, texts)})"
    # what json itself says in these cases names the place behind the mistake
    commas = {
        "a comma ends it: remove it": re.sub(r",$", "", text),
        "a comma stands before a closing bracket: remove it": re.sub(r",(\s*[}\]])", r"\1", text),
    }
    for mistake, mended in commas.items():
        if mended != text and is_json(mended):
            return f" ({mistake})"
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        ast.literal_eval(text)
        return " (it is written by Python's print: json.dumps writes JSON)"
    with suppress(ValueError, RecursionError):
        end = json.JSONDecoder().raw_decode(text)[1]
        more = "another object" if text[end:].lstrip()[:1] == "{" else "something"
        return f" ({more} follows the first one: one stands in a line)"
    return " (it has no end: cut off, or broken over several lines?)" if is_open(text) else ""


def not_an_object(text: str, texts: str) -> str:
    """Return what a line is that does not begin like an object or an array of JSON."""
    if text.startswith(("//", "#", "/*")):
        return "a comment: JSON has none"
    if text.startswith("<"):
        return "XML or HTML, not JSON"
    if re.match(r"(data|event|id): ?", text):
        return "a stream of a server: what stands behind data: is JSON"
    if re.search(r"\t|[,;](?=\S)", text):
        return CSV
    return f"text: {texts}"


def is_open(text: str) -> bool:
    """Return True if a text opens more brackets, outside of quotes, than it closes."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*("|$)', "", text)
    return len(re.findall(r"[{\[]", bare)) > len(re.findall(r"[}\]]", bare))


def is_json(text: str) -> bool:
    try:
        json.loads(text)
        return True
    except (ValueError, RecursionError):
        return False
