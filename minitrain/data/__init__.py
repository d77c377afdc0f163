"""Data in: files become datasets, whose row n is a pure function of (seed, n).

    files.py, records.py    which files a setting stands for, and the objects and texts in them
    tokenizer.py            text to ids and back
    held_out.py             what is not trained on, but validated on
    text/                   documents and files of tokens
    chat/                   chats, pairs of replies, problems for GRPO
    video/                  latents of videos, and how they are made
    datasets.py             opens what a config names, and mixes several

Not here: batches and packing (training/packing.py), toy worlds (examples/, see toys.py), and
streaming from a network. Read text/text_rows.py first, then chat/sft.py and datasets.py.
"""
