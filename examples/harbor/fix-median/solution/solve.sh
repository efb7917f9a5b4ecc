#!/bin/bash
cat > /app/statistics_of.py <<'PY'
def median(numbers):
    ordered, half = sorted(numbers), len(numbers) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
PY
