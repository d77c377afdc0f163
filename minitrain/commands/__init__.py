"""The command lines, one file each: options and `main(arguments)` on top.

What needs torch is imported inside the functions that do the work, so that --help and the answer to
a typo come at once. generate.py has two tasks, generate_text.py, which uses generate_answers.py,
and generate_video.py. They import everything and nothing imports them but `minitrain/__main__.py`
and the three lines of train.py, generate.py and merge.py, whose names people type.
"""
