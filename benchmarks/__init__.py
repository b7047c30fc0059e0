"""Benchmarks: lowtide beside the raw mechanism it stands on, as ratios within one run. `python -m benchmarks`."""
