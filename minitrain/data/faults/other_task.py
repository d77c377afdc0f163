"""Tell that a line is data for another task, and which task takes it."""

from minitrain.data.faults.wording import Wording


def other_task(record: dict, words: Wording, *kinds: str) -> str:
    """Return what an object is, and what takes it, if it is one of `kinds`; "" otherwise.

    kinds: of document, chat and pair.
    """
    has_pair = record.get("chosen") is not None and record.get("rejected") is not None
    chats = [key for key in ("messages", "conversations") if record.get(key)]
    found = {
        "pair": "'chosen' and 'rejected' are a pair of replies" if has_pair else "",
        "chat": f"{chats[0]!r} is a chat" if chats else "",
        "document": "'text' is a document" if isinstance(record.get("text"), str) else "",
    }
    return next((found[kind] + getattr(words, kind) for kind in kinds if found[kind]), "")
