"""The sampler: pages, scheduler, sampling, caches, engine."""
