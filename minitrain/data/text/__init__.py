"""Documents as rows of tokens. Read text_rows.py first, then corpus.py and token_files.py.

text_rows.py      the datasets: documents end to end or packed whole, cut into rows
corpus.py         documents of tokens, in memory or in files; texts become tokens there
choices.py        questions with choices, of which `minitrain evaluate` measures the likeliest
token_files.py    files that hold tokens already: .npy, raw, llm.c's, Megatron's
"""
