"""Who calls the service: one class of users in each file, all of them from `base.LoadUser`."""

from rollout_load.users.agent import AgentSession
from rollout_load.users.groups import GroupBatch
from rollout_load.users.interactive import Interactive
from rollout_load.users.multi_turn import MultiTurn
from rollout_load.users.pusher import WeightPusher
from rollout_load.users.streaming import StreamReader

__all__ = ["AgentSession", "GroupBatch", "Interactive", "MultiTurn", "StreamReader", "WeightPusher"]
