"""Measure a run, check its numbers, and show them.

    meter           measure each step: tokens/s, FLOP/s, MFU, memory
    flops           count FLOPs; hardware: peak rates, measured rates and the name of this machine
    health          report skipped steps and spikes of the loss
    metrics         write and show a run's numbers; metrics_file: lines of metrics.jsonl (no torch)
    progress        the texts that are shown: progress bar, validation, closing lines
    draw_curves     draw curves.svg; svg: plots as SVG text; tensorboard: the same for TensorBoard
    profiling       record profiles on request

Not here: computing the loss (training/), timing benchmarks (bench/).
"""
