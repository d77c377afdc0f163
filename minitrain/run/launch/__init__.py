"""Start, watch and end the processes of a run, and of any command line.

    start       choose the device, join the process group, build the meshes (read this first)
    rendezvous  meet the other ranks, also after torchrun has restarted them
    same_run    check that all ranks have the same config, code and data
    interrupts  end a command soon after a signal, with a line of its own
    watch       notice signals and dead ranks
    failures    record why a rank failed, and explain known failures in one line
    lock        keep a second run out of out_dir
    cli         wrap a command's `main`: errors in one line, exit codes; needs no torch

Not here: how work is split over ranks (parallel/).
"""
