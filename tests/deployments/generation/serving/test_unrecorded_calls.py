"""Calls of a session that vLLM's own layers would answer past its record."""

from typing import Any

import pytest
from vllm.inputs import tokens_input

from deployments.failures import RolloutFailure
from deployments.generation.serving.session_renderer import SessionOnlineRenderer
from deployments.sessions.session_table import _ModelNotRecordable, refuse_unrecordable
from tests.deployments.generation.serving.vllm_layers import Served

# Importing vLLM takes seconds.
pytestmark = [pytest.mark.slow, pytest.mark.true_clock]
CHAT = {"messages": [{"role": "user", "content": "2 + 3?"}]}
SAYS = "vLLM has made the prompt of this call by itself, so that nothing of it can be recorded"


@pytest.fixture
def harmony(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's way for gpt-oss, which does not come through `preprocess_chat`; without its vocabulary."""

    def made(*_arguments: Any) -> Any:
        return [], [tokens_input([10, 11])]

    monkeypatch.setattr(SessionOnlineRenderer, "_make_request_with_harmony", made)
    monkeypatch.setattr(SessionOnlineRenderer, "use_harmony", property(lambda _: True, lambda *_: None), raising=False)


@pytest.mark.usefixtures("harmony")
async def test_a_call_whose_prompt_is_made_past_its_session_is_refused() -> None:
    served = await Served().open()
    served.reply("5")
    status, refused = await served.answer("chat/completions", CHAT, "s")
    assert (status, SAYS in refused["error"]["message"]) == (400, True)
    *_, last = await served.events("chat/completions", CHAT, "s")
    assert SAYS in last["error"]["message"]
    assert served.core.prompts == []
    # It is one call that was begun and ended: the session goes on.
    assert (await served.store.info("s", "")).calls_in_flight == 0


async def test_a_call_whose_session_is_deleted_while_it_runs_fails() -> None:
    served = await Served().open()
    served.core.meanwhile = lambda: served.store.delete("s", "")
    served.reply("5")
    with pytest.raises(RolloutFailure, match="The answer broke off"):
        await served.events("chat/completions", CHAT, "s")
    await served.open()
    served.reply("5")
    status, refused = await served.answer("chat/completions", CHAT, "s")
    assert (status, "there is no such session" in refused["error"]["message"]) == (404, True)


def test_a_model_that_sessions_cannot_record_is_refused_at_the_start() -> None:
    refuse_unrecordable("qwen3")
    refuse_unrecordable(None)
    with pytest.raises(_ModelNotRecordable, match="leave `sessions` and agents out"):
        refuse_unrecordable("gpt_oss")
