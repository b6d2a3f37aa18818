"""rmqstore beside its peers, alternately in one run: ``python -m asv_bench.peers`` (`make bench-peers`).

Each part is a module with a function `works(setting)` that yields what is measured; `rounds` runs the contenders in turns and
holds the statistics; `data` makes the bytes that all of them get.
"""
