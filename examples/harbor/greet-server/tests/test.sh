#!/bin/bash
if [ ! -x serve ]; then
    echo 0 > /logs/verifier/reward.txt
    exit
fi
./serve > /dev/null 2>&1 &
python3 /tests/ask.py
