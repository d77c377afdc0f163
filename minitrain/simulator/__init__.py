"""Predict a config's step on other machines: count it on fake tensors, then turn counts into seconds.

Read in this order:
    fake_world  run one rank's training step, by the code that also trains, in a world of any size;
                dry_run: only its memory and parameter counts
    trace       record kernels, collectives and memory; operators: the cost of each operator; marks:
                where passes and blocks begin; host_copies: copies to the host, and updates there;
                repeat: trace a compiled graph once
    timeline    turn a trace into seconds on a System (bench/systems.yaml)
    replay      run a pipeline's ranks side by side
    simulate    from a config to its simulated step; simulate_policy: a GRPO step
    predict     from a row to its result, and to the prediction of the published run
    calibrate   a System with the measured rates of this machine
    sweep       try combinations of settings; chrome: write Chrome traces
    tracers     start the server whose processes trace ranks in parallel

Not here: published figures, and constants of machines (bench/).
"""
