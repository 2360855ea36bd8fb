"""Benchmarks: each is a module to run with `python -m bench.NAME`, and nothing here is imported by the service."""
