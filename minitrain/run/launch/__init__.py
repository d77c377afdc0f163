"""Start, watch and end the processes of a run, and of any command line.

Read start.py first: device, process group, meshes, model. Several processes also need
rendezvous.py (meet, also after a restart), same_run.py (do all run the same?) and watch.py (signals,
dead ranks). cli.py wraps each command: one line for a mistake, exit codes; it needs no torch.
failures.py says what a failing rank leaves, lock.py keeps a second run out of out_dir. Not here:
how work is split over ranks, which is parallel/.
"""
