"""What a step costs, what the machine can do, and the published rows to compare with.

Read in this order:
    rows        a config as a row: its name, what was published of it, whether its work is the row's
    figures     accounting: rates, MFU and ratios from tokens per second, whoever took the time
    measure     the stopwatch: training steps; measure_policy: GRPO's; measure_sampling: the sampler
    breakdown   a profiled step's seconds by kind of kernel
    versus      the same step by another library, in turns; decoding: the bytes that bound a sampler
    proxy       a row on one GPU, with fewer layers; shrink: its layout at toy width, on gloo
    tables      results as lines of JSON and as tables; report: beside all rows; report_html: as HTML
    systems.yaml   each machine's constants, with sources

Not here: predictions (simulator/), options and modes (commands/bench.py), FLOPs and the rates of
this machine (run/monitor/).
"""
