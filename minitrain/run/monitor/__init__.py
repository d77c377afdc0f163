"""Measure a run, judge its numbers, and show them.

    measured   meter.py, with the FLOPs of flops.py and the rates of hardware.py
    judged     health.py: skipped steps, spikes
    kept       metrics.py, in the lines of metrics_file.py (which needs no torch)
    shown      progress.py in words, draw_curves.py over svg.py, tensorboard.py
    recorded   profiling.py, where it is asked for

Not here: the loss, which training/ computes, and the stopwatch of benchmarks, which is bench/.
"""
