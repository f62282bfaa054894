"""Requests to batches to steps and back: request, block_pool, scheduler, batch, cache, sampler, step, engine."""
