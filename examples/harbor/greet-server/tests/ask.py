import os
import time
from pathlib import Path
from urllib.request import urlopen

url = f"http://127.0.0.1:{os.environ['PORT']}/{os.environ['NAME']}"
reward = 0
for _ in range(400):
    try:
        with urlopen(url, timeout=5) as answer:
            reward = int(answer.read().decode().strip() == f"Hello, {os.environ['NAME']}!")
        break
    except OSError:
        time.sleep(0.25)
Path("/logs/verifier/reward.txt").write_text(str(reward))
