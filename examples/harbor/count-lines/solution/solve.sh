#!/bin/bash
cat /app/books/*.txt | wc -l > /app/lines.txt
