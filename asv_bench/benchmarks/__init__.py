"""Benchmarks of rmqstore, one module per part of the store; asv finds and runs them."""
