"""Read, check and explain settings. The settings themselves are defined in minitrain/settings.py.

Read load.py first: it turns a file and `key=value` words into a checked Config. config_yaml.py
converts values to the types of the fields. checks.py, task_checks.py and layout_checks.py find
contradictions, unread.py finds settings that have no effect. ranks.py counts ranks and micro-
batches. aliases.py maps other trainers' names to ours, for error messages. describe.py prints
--help. environment.py reads the launcher's environment variables. Data and weights are not
checked here, but by the code that reads the files.
"""
