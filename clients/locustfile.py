"""Load test of the rollout service; the code is in `rollout_load`, `docs/operate.md` says how to use it.

    locust -f clients/locustfile.py --headless -u 16 -r 4 -t 30s --host http://127.0.0.1:8000

A rollout with `status: error` is a failure. The exit code is 1 if a bound is not kept (`--max-error-rate`,
`--max-p95-s`, `--min-tokens-per-s`) or no request was answered, else 0. The last line of the output is JSON.
`ROLLOUT_API_KEY` holds the key where the service asks for one.
"""

from rollout_load.report import connect
from rollout_load.users import AgentSession, GroupBatch, Interactive, MultiTurn, StreamReader, WeightPusher

__all__ = ["AgentSession", "GroupBatch", "Interactive", "MultiTurn", "StreamReader", "WeightPusher"]

connect()
