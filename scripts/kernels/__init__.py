"""What `scripts/bench_kernels.py` checks and times: a module per operation, whose `cases()` lists its cases."""
