"""A config's step on machines that are not here: counted on fake tensors, then turned into seconds.

Read in this order:
    fake_world  runs one rank's step, the product's own path, in a world of any size; dry_run: its
                memory and sizes alone
    trace       what it does: kernels, messages, memory; operators: what each costs; marks: where
                passes and blocks begin; repeat: a compiled graph is traced once
    timeline    a trace and a System of bench/systems.yaml become seconds
    replay      a pipeline's ranks side by side
    simulate    from a config to its step; simulate_policy: a GRPO step
    predict     from a row to its result, and to that of the published run
    calibrate   a System with the rates of this machine; sweep: rank layouts; chrome: traces to see
    tracers     the processes that trace ranks side by side

Not here: what a measured step is compared with (bench/), constants (bench/systems.yaml).
"""
