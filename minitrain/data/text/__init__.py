"""Turn documents into rows of tokens.

text_rows      the datasets: documents laid end to end, or packed whole, in rows (read this first)
documents      files -> documents -> a corpus
corpus         documents of tokens, in memory or in files; tokenize texts
token_cache    tokens of texts, kept in a file of data.cache
token_files    files that already hold tokens: .npy, raw, llm.c's, Megatron's
choices        questions with choices, for `minitrain evaluate`
"""
