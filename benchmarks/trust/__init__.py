"""What `benchmarks/reliability.py` tries: hostile arrays, models and files, kills, threads, properties."""
