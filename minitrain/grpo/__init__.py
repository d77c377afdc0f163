"""GRPO: a policy learns from the rewards of its own responses.

In the order of reading:

    policy_loop      the steps: sample, reward, train, bring the new weights to the sampler
    responses        problems, responses to them, and the numbers that these give
    rollouts         sample and reward groups of responses; evaluate
    environments     what samples talk to before they end: tools, games, users
    episodes         a sample with its environment
    episode_runner   the sampler's side: who is decoded, and who waits for an answer
    environment_threads  the environment's side: its calls, in threads
    rewards          what a response is worth: `exact`, `math`, or your own function
    math_answers     how `math` compares answers
    advantages       how much better a response is than the others of its prompt
    batches          examples of responses, packed into micro-batches
    policy_trainer   log-probabilities, and one or several updates
    objective        the loss, with its derivations
    weight_sync      weights from the trainer's layout to the sampler's
    offload          which tensors are on the device in which part of a step

Not here: sampling (rollout/), problems (data/chat/problems.py), checkpoints and files (run/tasks/).
"""
