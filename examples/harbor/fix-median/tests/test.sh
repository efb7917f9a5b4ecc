#!/bin/bash
cd /app && python3 /tests/check.py > /logs/verifier/reward.json
