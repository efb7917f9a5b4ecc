"""An agent that brings its own loop: opens a session, calls chat completions under it, rewards and ends it.

The service needs `sessions: {}` in its config.
"""

from locust import task

from rollout_load.outcomes import Json, outcome_of_call
from rollout_load.users.base import POOL, FastLoadUser

FOLLOW_UP = {"role": "user", "content": "Go on."}
Headers = dict[str, str]


class AgentSession(FastLoadUser):
    kind = "agent"

    @task
    def session(self) -> None:
        [sample] = POOL.some(1)
        session = self.call("POST", "/v1/sessions", "/v1/sessions", self.headers, {"sample": sample})
        if session is None:
            return
        key = {"Authorization": f"Bearer {session['api_key']}"}
        self.converse(session["base_url"], key, sample.get("messages") or [FOLLOW_UP])
        path = f"/v1/sessions/{session['id']}"
        self.call("POST", f"{path}/reward", "/v1/sessions/{id}/reward", self.headers, {"reward": 0.0})
        self.call("DELETE", path, "/v1/sessions/{id}", self.headers)

    def converse(self, base_url: str, key: Headers, messages: list[Json]) -> None:
        """`--agent-calls` calls of one conversation; ends with the first that fails."""
        messages = list(messages)
        for _ in range(self.options.agent_calls):
            body = {"messages": messages, "max_tokens": self.options.max_new_tokens}
            answer = self.call("POST", f"{base_url}/v1/chat/completions", "/v1/chat/completions", key, body)
            if answer is None:
                return
            content = answer["choices"][0]["message"]["content"] or ""
            messages += [{"role": "assistant", "content": content}, FOLLOW_UP]

    def call(self, method: str, url: str, shown: str, headers: Headers, body: Json | None = None) -> Json | None:
        """The answer, or `None` if it is an error, which is counted."""
        with self.client.request(
            method, url, json=body, headers=headers, name=self.entry(shown), catch_response=True
        ) as response:
            outcome, answer = outcome_of_call(response.status_code, response.headers or {}, response.content or b"")
            self.count(outcome, response)
        self.obey(outcome)
        return answer
