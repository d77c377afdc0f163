"""The sampler: continues many prompts at once with the trainer's model, from paged caches.

In the order of reading:

    engine          Sampler: requests in, tokens out; what a model must have; texts: of its samples
    scheduler       which prompts are prefilled next, which samples decoded; pages: who holds them
    batch           the buffers of a decoding step, and CUDA graphs; sampling: logits to tokens
    drafting        a step that verifies guesses of a sample's next tokens
    steps, caches   what a forward pass is about, and the caches that read it; kv_cache: in pages
    weights         joined Linears; compiled: blocks; capacity: what fits; streaming: tokens to text
    cpu             packed products and row buffers, for CPUs alone
    flow_sampling   videos by flow matching, which needs none of the rest

Not here: networks (models/), rewards (grpo/), the command (commands/generate.py).
"""
