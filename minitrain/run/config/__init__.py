"""Read, check and explain settings. What they are stands in minitrain/settings.py, nothing else.

Read load.py first, from a file and words to a checked Config; config_yaml.py converts by types,
checks.py and layout_checks.py say what contradicts what, unread.py what is given in vain.
aliases.py knows other trainers' names for a mistake's answer, describe.py makes --help.
environment.py is what a launcher says and hears. Not here: checks of data or weights, which whoever
reads the files makes.
"""
