#!/bin/bash
python3 /tests/ask.py
