"""What callers read of jobs: state, progress, candidates, traces, timings."""
