"""The command lines, one file each: options and `main(arguments)` on top.

What needs torch is imported inside the functions that do the work, so that --help and the answer to
a typo come at once. Two have parts: generate.py has generate_text.py, with generate_answers.py, and
generate_video.py; bench.py has bench_cases.py, what is run, bench_runs.py, how, and bench_results.py,
what is printed and kept. They import everything and nothing imports them but `minitrain/__main__.py`
and the three lines of train.py, generate.py and merge.py, whose names people type.
"""
