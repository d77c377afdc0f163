"""What a step costs, what the machine can do, and the published rows to compare with.

A row is a config with a published figure. A result is one line of JSON: a row that was measured,
simulated or extrapolated. Read in this order:
    rows        load a config as a row, and note which of its settings change the published work
    figures     turn tokens per second into TFLOP/s, MFU and the ratio to the published figure
    measure     time training steps; measure_policy: GRPO steps; measure_sampling: the sampler
    breakdown   split a profiled step's seconds by kind of kernel
    versus      time another library's step in turns with ours; decoding: bytes that a decode step reads
    proxy       run a row on one GPU with fewer layers; shrink: run its layout at toy width on gloo
    tables      read results and print tables; report: set results beside the published rows;
                report_accuracy, report_tables, report_html: what it says, as Markdown and as a page
    systems.yaml   constants of machines and of other stacks, each with its source

Not here: predictions (simulator/), options and modes (commands/bench*.py), FLOP counts and the
measured rates of this machine (run/monitor/).
"""
