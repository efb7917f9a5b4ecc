"""Instructions whose following can be verified: the 25 kinds of IFEval, judged by the library `if-verifiable`.

Judging runs in worker processes (`worker_pool`): detecting a language takes milliseconds, and a reply can keep a
regular expression busy. What the library would download at first use comes from a package: nothing is downloaded.
"""

import logging
import random
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from deployments.tasks.replies import text_outcome
from deployments.tasks.support import PooledEnvironment
from rollout_env import ChatMessage, Reference, StepOutcome
from rollout_env.worker_pool import ProcessorTimeExceeded

_STEPS_PER_WORKER = 2
"""One is judged while the next one waits at the worker."""
_TOPICS = ("a cat", "the sea", "a bicycle", "winter", "a bridge", "bread", "a lighthouse", "music", "the moon")
_WORDS = ("river", "quiet", "seven", "light", "stone", "morning", "paper", "green", "north", "glass")
logger = logging.getLogger("rollout_service.environments")


@cache
def _arguments() -> dict[str, list[str]]:
    """The names of the `kwargs` of each kind, of which the library draws one that is missing at random."""
    from if_verifiable.ifeval import INSTRUCTION_DICT  # type: ignore[import-untyped]

    return {name: kind(name).get_instruction_args_keys() for name, kind in sorted(INSTRUCTION_DICT.items())}


class _InstructionInfo(BaseModel):
    """The `extra_env_info` of a sample, as a row of IFEval's data has it; further fields are ignored."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    instruction_id_list: list[str] = Field(min_length=1, max_length=64)
    """The instructions of the prompt, such as `punctuation:no_comma`."""
    kwargs: list[dict[str, JsonValue]]
    """For each instruction its arguments, such as `{"num_words": 300, "relation": "at least"}`. Nulls are ignored."""

    @model_validator(mode="after")
    def has_the_arguments_of_its_instructions(self) -> Self:
        if len(self.kwargs) != len(self.instruction_id_list):
            raise ValueError(
                f"there are {len(self.instruction_id_list)} instructions and {len(self.kwargs)} kwargs: send as many"
            )
        known = _arguments()
        for name, kwargs in zip(self.instruction_id_list, self.kwargs, strict=True):
            if name not in known:
                raise ValueError(f"there is no instruction {name!r}; the known ones are {', '.join(known)}")
            if missing := [argument for argument in known[name] if kwargs.get(argument) is None]:
                raise ValueError(f"the instruction {name!r} needs {', '.join(missing)} among its kwargs")
        return self


class InstructionFollowingEnvironment(PooledEnvironment):
    """One turn. The reward is 1.0 if all instructions were followed, or their share."""

    description: ClassVar[str] = "Instructions that a program can verify, as in IFEval; reward for following them."
    ExtraEnvInfo: ClassVar[type[BaseModel]] = _InstructionInfo

    def __init__(
        self,
        score: Literal["all", "share"] = "all",
        strict: bool = True,
        workers: Annotated[int, Field(ge=1)] | None = None,
        processor_time_limit_s: Annotated[float, Field(gt=0)] = 5.0,
    ) -> None:
        """Starts the worker processes in the background.

        Args:
            score: `all`: 1.0 if every instruction was followed, else 0.0; `share`: the share that was.
            strict: whether the reply must follow them as it is; otherwise also without its first line, its last line,
                or asterisks.
            workers: how many; by default the `num_cpus` that Ray reserves for the replica, rounded up.
            processor_time_limit_s: of judging one reply, in seconds. One that needs more has followed nothing.
        """
        _arguments()  # Imported before the first step, because that takes seconds.
        self._score = score
        self._strict = strict
        self._processor_time_limit_s = processor_time_limit_s
        preloaded = ["if_verifiable", "punkt", __name__]
        self.start_pool(workers, _STEPS_PER_WORKER, _prepare_worker, preloaded)

    async def step(self, message_log: list[ChatMessage], extra_env_info: _InstructionInfo) -> StepOutcome:
        """Judges the reply without its reasoning (`</think>`).

        Raises:
            TemporaryFailure: there is no result, for a reason other than the limit of processor time.
        """
        names = extra_env_info.instruction_id_list
        reply = message_log[-1]["content"]
        try:
            followed = await self.pool.run(
                self._processor_time_limit_s, _followed, reply, names, extra_env_info.kwargs, self._strict
            )
        except ProcessorTimeExceeded as error:
            logger.info("A reply was judged to follow no instruction because judging it took %s.", error)
            followed = [False] * len(names)
        broken = [name for name, is_followed in zip(names, followed, strict=True) if not is_followed]
        share = sum(followed) / len(followed)
        content = f"Not followed: {', '.join(broken)}." if broken else "All instructions were followed."
        return text_outcome(content, share if self._score == "share" else float(share == 1.0), terminated=True)

    def reference(self, sample: Mapping[str, Any]) -> Reference:
        """A quoted text, which follows all instructions of the examples.

        The task judges the form alone, so that a reply without work can be worth as much.
        """
        words = [word for each in sample["extra_env_info"]["kwargs"] for word in each.get("keywords", ())]
        return Reference([f'"this is a text about the {" ".join(words) or "sea"}"'], floor=1.0)

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Short texts to write with one or two instructions."""
        draw = random.Random(seed)
        return [_example_sample(draw, seed * count + number) for number in range(count)]


def _example_sample(draw: random.Random, number: int) -> dict[str, Any]:
    word, most_words = draw.choice(_WORDS), draw.randint(10, 60)
    instructions: list[tuple[str, str, dict[str, JsonValue]]] = [
        (f"Include the word {word}.", "keywords:existence", {"keywords": [word]}),
        (
            f"Use less than {most_words} words.",
            "length_constraints:number_words",
            {"num_words": most_words, "relation": "less than"},
        ),
        ("Use no commas.", "punctuation:no_comma", {}),
        ("Use lowercase letters only.", "change_case:english_lowercase", {}),
        ("Put the whole reply in double quotation marks.", "startend:quotation", {}),
    ]
    chosen = draw.sample(instructions, k=draw.randint(1, 2))
    texts = " ".join(text for text, _, _ in chosen)
    return {
        "messages": [{"role": "user", "content": f"Text {number}: write about {draw.choice(_TOPICS)}. {texts}"}],
        "extra_env_info": {
            "instruction_id_list": [name for _, name, _ in chosen],
            "kwargs": [kwargs for _, _, kwargs in chosen],
        },
    }


def _prepare_worker() -> None:
    """Gives the library the sentence tokenizer of a package, where it would download it, and loads what it needs."""
    import langdetect  # type: ignore[import-untyped]
    import punkt
    from if_verifiable.ifeval import instructions_util
    from nltk.tokenize import NLTKWordTokenizer  # type: ignore[import-untyped]

    sentences = punkt.PunktSentenceTokenizer(punkt.load_model("english"))
    words = NLTKWordTokenizer()

    def word_tokenize(text: str) -> list[str]:
        return [word for sentence in sentences.tokenize(text) for word in words.tokenize(sentence)]

    instructions_util._get_sentence_tokenizer = lambda: sentences
    instructions_util.nltk.word_tokenize = word_tokenize
    # It draws otherwise, and the same reply would be of another language the next time.
    langdetect.DetectorFactory.seed = 0
    _followed("One sentence in English.", ["language:response_language"], [{"language": "en"}], strict=True)


def _followed(reply: str, names: list[str], kwargs: list[dict[str, Any]], strict: bool) -> list[bool]:
    """Whether each instruction was followed; an empty reply follows none."""
    from if_verifiable.common import evaluate_instructions  # type: ignore[import-untyped]
    from if_verifiable.ifeval import INSTRUCTION_DICT

    results, _ = evaluate_instructions(reply, names, kwargs, "", INSTRUCTION_DICT)
    return [one.strict_pass if strict else one.loose_pass for one in results] or [False] * len(names)
