"""What a dataset of packed rows must hold: every row, one token at a time."""

import json
from collections import Counter

from minitrain.data.tokenizer import ByteTokenizer

EOS = ByteTokenizer.eos_id


def brute_force_rows(documents: list[list[int]], seq_len: int) -> list[dict[str, list[int]]]:
    """Every row of an epoch, one token at a time."""
    stream = [(d, i) for d, document in enumerate(documents) for i in range(len(document))]
    result = []
    for start in range(0, len(stream) - seq_len + 1, seq_len):
        row = {"tokens": [], "labels": [], "positions": [], "document_ids": []}
        seen = []
        for d, i in stream[start : start + seq_len]:
            row["tokens"].append(documents[d][i])
            row["labels"].append(documents[d][i + 1] if i + 1 < len(documents[d]) else -100)
            row["positions"].append(seen.count(d))
            seen.append(d)
            row["document_ids"].append(len(set(seen)) - 1)
        result.append(row)
    return result


def epoch_of(dataset, epoch=0) -> list[dict[str, list[int]]]:
    numbers = range(epoch * len(dataset), (epoch + 1) * len(dataset))
    return [{key: value.tolist() for key, value in dataset.row(n).items()} for n in numbers]


def multiset(some_rows) -> Counter:
    return Counter(json.dumps(row, sort_keys=True) for row in some_rows)


def tokens_of(dataset) -> Counter:
    return Counter(token for row in epoch_of(dataset) for token in row["tokens"])
