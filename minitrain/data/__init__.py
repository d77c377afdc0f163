"""Turn files into datasets, whose row n is a pure function of (seed, n).

The life of a row; a function calls those that are indented below it:

    datasets.open_dataset            the dataset of a config, or several mixed by weight
      text_rows.open_data            of documents:
        files.find_files               data.path -> files
        documents.read_corpus          files -> the tokens of all documents
          text_files.read_texts          a file -> its text, or
          records.read_records           a file -> its JSON objects, of which one key holds the text
          corpus.tokenize                texts -> tokens, laid end to end
        text_rows.Packed               tokens -> rows, which are read by number: row(n)
      sft.open_chats                 of chats:
        sft.read_samples
          files.find_files               data.path -> files
          records.read_records           a file -> its JSON objects
          read_chats.read_messages       an object -> messages
          chats.encode_chat              messages -> text -> tokens, and which of them are learned
        sample_rows.fit                leave out what is longer than a row
        sft.Chats                      samples -> rows

Pairs of replies (chat/preferences.py) and problems for GRPO (chat/problems.py) go the way of chats.
Files of tokens (text/token_files.py) and of latents (video/latents.py) are read when their row is.

    sources        the data that a config names, and its held-out part
    held_out       hold data out of training, for validation
    tokenizer      text to ids and back
    sample         tokens and labels of a document or a chat
    faults/        tell what is wrong with data; nothing there reads a row
    text/          documents, and files of tokens
    chat/          chats, pairs of replies, problems with answers
    video/         latents of videos, and how to make them

Not here: batches and packing (training/packing.py), toy worlds (examples/, see toys.py), streaming
from a network. Read text/text_rows.py first, then chat/sft.py and datasets.py.
"""
