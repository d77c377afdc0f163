"""Turn documents into rows of tokens.

text_rows      the datasets: documents laid end to end, or packed whole, in rows (read this first)
corpus         documents of tokens, in memory or in files; tokenize texts
choices        questions with choices, for `minitrain evaluate`
token_files    files that already hold tokens: .npy, raw, llm.c's, Megatron's
"""
