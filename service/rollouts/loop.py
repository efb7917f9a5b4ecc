"""The rollout loop, plain asyncio over `Generator` and `Environment`: one turn, one sample, one request.

Guarantees: every episode that goes in comes out exactly once, whatever its status; a failed episode carries its error
and leaves its siblings alone; an episode that is cut off (deadline, early stopping, staleness) keeps its message log,
with the tokens of the generation that was under way, and can be posted again; cancelling a request cancels all its
calls; no number of episodes makes an iteration of the event loop long.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, time

from deployments.failures import RestartableSessionLost, RolloutFailure, failure_of
from deployments.protocols.chat import ResponseParser, images_shown
from deployments.protocols.generation import Environment, Generator, takes_no_images
from rollout_client.contract.rollouts import SampleError
from rollout_env import StepOutcome
from service.rollouts.agent_episode import AgentEpisode, Agents
from service.rollouts.episode import CutOff, Episode
from service.rollouts.episode_records import PlayedStep
from service.rollouts.group_selection import EarlyStopping
from service.rollouts.messages import ImageReader
from service.rollouts.pacing import LoopPacer, PacedWork, Schedule
from service.rollouts.progress import UNOBSERVED, ProgressLog, RolloutObserver, traced
from service.rollouts.retries import with_retries
from service.rollouts.staleness import VersionFeed

MOST_CHARACTERS_INLINE = 2**13
"""Longest observation that is tokenized on the event loop, in up to 8 ms; a longer one is tokenized in a thread."""
logger = logging.getLogger("rollout_service.rollouts")


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """The ports and settings that all episodes of a request share."""

    generator: Generator
    environments: Mapping[str, Environment]
    """By task name."""
    schedule: Schedule
    pacer: LoopPacer = field(default_factory=LoopPacer)
    """Shared by all requests of the event loop."""
    versions: VersionFeed | None = None
    """`None` where no version ever changes."""
    response_parser: ResponseParser | None = None
    """`None` where responses are text alone."""
    progress: ProgressLog | None = None
    """`None` where a request starts over if its process is lost."""
    agents: Agents | None = None
    """`None` where no task has an agent."""
    observer: RolloutObserver = UNOBSERVED
    images: ImageReader | None = None
    """`None` where no model sees."""


async def _play_turn(episode: Episode, context: RolloutContext) -> None:
    """Plays one generation and one environment step.

    A message log that was posted may end with a generation that was not stepped: its first turn is the step alone. A
    whole run of an agent is one turn, whatever the number of the agent's calls.
    """
    if isinstance(episode, AgentEpisode):
        await _play_run(episode, context)
        if not episode.done:
            await _play_step(episode, context)
        return
    begins_with_the_step = episode.step_is_due
    await context.schedule.wait_for_phase()
    if not begins_with_the_step:
        await _play_generation(episode, context)
    await _parse_response(episode, context)
    if not episode.done:
        await context.schedule.wait_for_phase()
        await _play_step(episode, context)


async def _play_run(episode: AgentEpisode, context: RolloutContext) -> None:
    """Runs the agent, again where a failure of the fleet ended it. Raises what `AgentEpisode.add_run` raises."""
    agents = context.agents
    assert agents is not None

    async def run() -> None:
        with context.observer.during("agent", episode):
            ended = await agents.run(episode.next_run())
        await context.pacer.wait_for_turn(episode)
        episode.add_run(ended)

    await with_retries(run, episode.retries, context.pacer)


async def _play_generation(episode: Episode, context: RolloutContext) -> None:
    """Generates until the response is whole: an interrupted generation goes on where it ended."""
    while not (episode.done or episode.step_is_due):
        await with_retries(partial(_generate_part, episode, context), episode.retries, context.pacer)


async def _generate_part(episode: Episode, context: RolloutContext) -> None:
    """Generates the response, or what is missing of it.

    Raises:
        RolloutFailure: the failure of the generation, or why it was interrupted; its tokens are kept.
    """
    request = episode.next_generation()
    if request is None:
        return
    with context.observer.during("generate", episode):
        generation = await context.generator.generate(traced(request, context.observer))
    await context.pacer.wait_for_turn(episode, len(generation.token_ids))
    episode.add_generation(generation)
    if generation.failure is not None and not (episode.done or episode.step_is_due):
        raise generation.failure


async def _parse_response(episode: Episode, context: RolloutContext) -> None:
    """Parses calls and reasoning out of the response that is stepped next. An unreadable response fails no sample."""
    if context.response_parser is None or (response := episode.response_to_parse()) is None:
        return
    parsed = await context.response_parser.parse(response)
    await context.pacer.wait_for_turn(episode)
    episode.add_parsed(parsed)
    if parsed.parse_error is not None:
        logger.info("A response was not parsed: %s", parsed.parse_error, extra=episode.identity.log_fields())


async def _play_step(episode: Episode, context: RolloutContext) -> None:
    """Steps the environment. An episode whose session is lost restarts at its prompt, where that is possible."""
    request = episode.step_request(context.schedule.in_lockstep)
    environment = context.environments[episode.identity.task_name]

    async def step() -> StepOutcome:
        began_at, began = time(), monotonic()
        with context.observer.during("step", episode):
            outcome = await environment.step(traced(request, context.observer))
        episode.steps.append(PlayedStep(request.turn, began_at, monotonic() - began))
        return outcome

    try:
        outcome = await with_retries(step, episode.retries, context.pacer)
    except RestartableSessionLost as lost:
        environment.release(request.session_id)
        if not episode.take_restart():
            raise
        episode.retries.note(lost)
        logger.info("A rollout is played anew: %s", lost, extra=episode.identity.log_fields())
        return
    await _learn_images(outcome, episode, context)
    observed = None
    characters = sum(len(message["content"]) for message in outcome.observations)
    if characters > MOST_CHARACTERS_INLINE or episode.start.renders:
        observed = await asyncio.to_thread(episode.tokenized_observations, outcome)
    await context.pacer.wait_for_turn(episode, characters if observed is None else 0)
    episode.add_outcome(outcome, observed)


async def _learn_images(outcome: StepOutcome, episode: Episode, context: RolloutContext) -> None:
    """Asks for the tokens of the images that the observation shows. Raises what `ImageReader.learn` raises."""
    if names := images_shown(outcome.observations):
        if context.images is None:
            raise takes_no_images(names)
        learn = partial(context.images.learn, names, episode.start.chat.images)
        await with_retries(learn, episode.retries, context.pacer)


async def _play_turns(episode: Episode, context: RolloutContext) -> None:
    """Plays until the episode is done, and notes each turn that has ended."""
    while not episode.done:
        with context.observer.during("turn", episode):
            await _play_turn(episode, context)
        # A journal holds turns. A rollout of an agent that it would have to take up is played anew.
        if context.progress is not None and not isinstance(episode, AgentEpisode):
            await context.progress.turn_ended(episode)


async def _play_sample(episode: Episode, context: RolloutContext) -> Episode:
    """Plays until the episode is done. Whatever exception is raised becomes the episode's error."""
    episode.began_at = time()
    try:
        with context.observer.during("rollout", episode):
            await _play_turns(episode, context)
    except Exception as error:
        # A named failure was logged with its traceback where it was noticed, once for all the rollouts that it hit.
        # Thousands of tracebacks of one dead replica would keep the event loop busy for seconds.
        unknown = None if isinstance(error, RolloutFailure) else error
        logger.warning("A sample failed: %s", error, exc_info=unknown, extra=episode.identity.log_fields())
        episode.fail(failure_of(error))
    return episode


async def play_request(
    episodes: Sequence[Episode],
    context: RolloutContext,
    early_stopping: EarlyStopping[Episode],
    deadline_s: float | None = None,
) -> AsyncGenerator[Episode, None]:
    """Plays all episodes concurrently and yields each when it is done. Closing the generator cancels the others.

    Nothing is started before the first iteration. Episodes that early stopping no longer needs end as `cancelled`.
    Those that are not done `deadline_s` seconds after the start end as `deadline`, however slowly the caller iterates.
    An episode that generates at that moment ends when its tokens are there, at most its `interruption_s` later.
    Those whose tokens are too old for a new version of the weights end as `stale` in the same way.
    An episode that was yielded is not referenced any longer: thousands of them are not freed at once at the end.
    """
    count = len(episodes)
    running = RunningEpisodes(episodes, context, early_stopping)
    del episodes
    if deadline_s is not None:
        running.cut_off_after(deadline_s)
    try:
        for _ in range(count):
            yield await running.ended.get()
    finally:
        await running.stop()


class RunningEpisodes:
    """The episodes of one request while they are played. Each is put into `ended` exactly once, when it is done.

    Many episodes are started, interrupted or cancelled over several iterations of the event loop.
    """

    def __init__(
        self, episodes: Sequence[Episode], context: RolloutContext, early_stopping: EarlyStopping[Episode]
    ) -> None:
        self.ended: asyncio.Queue[Episode] = asyncio.Queue()
        self._context = context
        self._early_stopping = early_stopping
        self._deadline: asyncio.TimerHandle | None = None
        self._tasks: dict[Episode, asyncio.Task[None]] = {}
        """The tasks of the episodes that were started and have not been released."""
        self._starting = PacedWork[Episode]()
        self._interrupting = PacedWork[Episode]()
        self._checking = PacedWork[tuple[Episode, int]]()
        self._cancelling = PacedWork[Episode]()
        self._dropping = PacedWork[Episode]()
        self._is_stopping = False
        self.is_over = False
        """Whether the deadline of the request has passed."""
        self._not_ended: dict[Episode, None] = {}
        """Episodes that were not put into `ended`."""
        self._bounds = {episode.versions.bounds for episode in episodes}
        """One object, where all episodes are of one request."""
        self._register(episodes)
        policy = next((bounds.policy for bounds in self._bounds), None)
        self._unsubscribe = context.versions.subscribe(self.note_version, policy) if context.versions else None
        self._starting.add(self._start, episodes)

    def add(self, episodes: Sequence[Episode]) -> None:
        """Plays further episodes of the request. After its deadline they end at their prompts."""
        self._register(episodes)
        if self.is_over:
            for episode in episodes:
                episode.cut_off("deadline")
        self._starting.add(self._start, episodes)

    def _register(self, episodes: Sequence[Episode]) -> None:
        self._not_ended.update(dict.fromkeys(episodes))
        for _ in episodes:
            self._context.schedule.add_sample()

    def _start(self, episode: Episode) -> None:
        if episode.versions.is_stale and not episode.done:
            # The log that was posted is too old already.
            episode.cut_off("stale")
            self._put(episode)
        if episode.was_cut_off or episode.has_ended_before:
            # It was cut off before its turn came, or has ended in the process before this one.
            self._put(episode)
            self._release(episode)
            return
        task = self._tasks[episode] = asyncio.create_task(self._play(episode))
        # A callback, because a task that is cancelled before its first step runs none of its code, not even `finally`.
        task.add_done_callback(partial(self._release, episode))

    def _release(self, episode: Episode, _task: "asyncio.Task[None] | None" = None) -> None:
        self._tasks.pop(episode, None)
        self._context.schedule.remove_sample()
        self._context.generator.release(episode.identity.rollout_id)
        self._context.environments[episode.identity.task_name].release(episode.session_id)

    async def _play(self, episode: Episode) -> None:
        try:
            await _play_sample(episode, self._context)
        except asyncio.CancelledError as error:
            if not episode.was_cut_off:
                # A deployment call cancelled itself: the sample must not be lost.
                message = "A call of the sample was cancelled."
                logger.warning(message, exc_info=error, extra=episode.identity.log_fields())
                episode.fail(SampleError(kind="internal", message=message, retryable=True))
        self._put(episode)

    def _put(self, episode: Episode) -> None:
        if episode not in self._not_ended:
            return
        del self._not_ended[episode]
        episode.versions.note_end()
        if not self._is_stopping:
            self.ended.put_nowait(episode)
        succeeded = not episode.was_cut_off and episode.status != "error"
        if unneeded := self._early_stopping.unneeded_after(episode, succeeded):
            self.cut_off(unneeded, "cancelled")

    def cut_off(self, episodes: Iterable[Episode], status: CutOff) -> None:
        """Ends those of `episodes` that are not done yet. One that generates ends when its tokens so far are there."""
        unfinished = [episode for episode in episodes if not episode.done and episode.interrupted_by is None]
        for episode in unfinished:
            episode.interrupt(status)
        for seconds in {episode.interruption_s for episode in unfinished}:
            waiting = [episode for episode in unfinished if episode.interruption_s == seconds]
            asyncio.get_running_loop().call_later(seconds, self._end, waiting, status)
        self._interrupting.add(self._interrupt, unfinished)

    def cut_off_all(self, status: CutOff) -> None:
        self.is_over = True
        self.cut_off(self._not_ended, status)

    def cut_off_after(self, deadline_s: float) -> None:
        self._deadline = asyncio.get_running_loop().call_later(deadline_s, self.cut_off_all, "deadline")

    def note_version(self, version: int | None) -> None:
        """Records that a version of the policy has become current, or that the policy was dropped."""
        changed = [(bounds, bounds.note_current(version)) for bounds in self._bounds]
        before = min((before for bounds, before in changed if before is not None and not bounds.is_any), default=None)
        if before is not None:
            self._checking.add(self._check_versions, [(episode, before) for episode in self._not_ended])

    def _check_versions(self, check: tuple[Episode, int]) -> None:
        episode, before = check
        if episode.done or episode.interrupted_by is not None:
            return
        generator, rollout_id = self._context.generator, episode.identity.rollout_id
        if episode.versions.is_stale:
            self.cut_off((episode,), "stale")
        elif episode.versions.must_interrupt(before, generator.is_generating(rollout_id)):
            # With its tokens, the episode itself can tell how it goes on.
            generator.interrupt(rollout_id)

    def _interrupt(self, episode: Episode) -> None:
        if episode.done or episode.interrupted_by is None:
            return
        # One that waits for its turn has the tokens of its generation already.
        is_generating = self._is_interrupted(episode.identity.rollout_id)
        if not (is_generating or self._context.pacer.is_waiting(episode)):
            episode.cut_off(episode.interrupted_by)
            self._cancel(episode)

    def _is_interrupted(self, rollout_id: str) -> bool:
        """Interrupts the rollout's generation or run; returns whether there is one."""
        agents = self._context.agents
        return self._context.generator.interrupt(rollout_id) or (agents is not None and agents.interrupt(rollout_id))

    def _end(self, episodes: Iterable[Episode], status: CutOff) -> None:
        """Ends those of `episodes` that are not done yet at once, without the tokens of their generations."""
        unfinished = [episode for episode in episodes if not episode.done]
        for episode in unfinished:
            episode.cut_off(status)
        self._cancelling.add(self._cancel, unfinished)
        # Those that have ended may be referenced here alone: freeing thousands of them takes long.
        self._dropping.add(_drop, episodes)

    def _cancel(self, episode: Episode) -> None:
        if task := self._tasks.get(episode):
            task.cancel()
        self._put(episode)

    async def stop(self) -> None:
        """Cancels the episodes that are not done, and returns when all their calls have ended."""
        if self._deadline is not None:
            # The timer would keep every episode of a finished request in memory until a distant deadline.
            self._deadline.cancel()
        if self._unsubscribe is not None:
            self._unsubscribe()
        self._is_stopping = True
        # They wait for their journal, without end if the job was lost.
        done = [episode for episode in self._not_ended if episode.done]
        self._end(self._not_ended, "cancelled")
        self._cancelling.add(self._cancel, done)
        await self._starting.finish()
        await self._checking.finish()
        await self._interrupting.finish()
        await self._cancelling.finish()
        self._dropping.add(_drop, _taken_out(self.ended))
        await self._dropping.finish()
        while self._tasks:
            await asyncio.wait([next(iter(self._tasks.values()))])


def _taken_out(queue: asyncio.Queue[Episode]) -> Iterator[Episode]:
    """Empties the queue."""
    while not queue.empty():
        yield queue.get_nowait()


def _drop(_: Episode) -> None:
    """Its caller drops the last reference."""
