"""Turn files into datasets, whose row n is a pure function of (seed, n).

    sources           the data that a config names, and its held-out part
    files, records    find the files that a setting names, and read the objects and texts in them
    sample            tokens and labels of a document or a chat
    tokenizer         text to ids and back
    held_out          hold data out of training, for validation
    text/             documents, and files of tokens
    chat/             chats, preference pairs, problems for GRPO
    video/            latents of videos, and how to make them
    datasets          open the dataset of a config, and mix several

Not here: batches and packing (training/packing.py), toy worlds (examples/, see toys.py), streaming
from a network. Read text/text_rows.py first, then chat/sft.py and datasets.py.
"""
