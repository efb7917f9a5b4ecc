"""Makes the embedded model from nothing: `python -m models.tiny.train --output models/tiny`.

A Llama small enough to commit, trained for a few minutes on what the environments themselves ask and answer:
additions for `math` and 2x2 games for `sliding_puzzle`. It is stopped while it still makes mistakes, so that
reinforcement learning has something to improve. The same seed on the same machine gives the same weights.
"""

# mypy: disable-error-code="no-untyped-call"

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from deployments.tasks.math import addition_prompt
from deployments.tasks.sliding_puzzle import (
    DIRECTIONS,
    Board,
    Direction,
    SlidingPuzzleEnvironment,
    SlidingPuzzleState,
    game_sample,
    slide,
    solved_board,
)
from models.recipes import (
    END,
    NEWLINE,
    NO_LOSS,
    PAD,
    ROLE_TOKENS,
    Conversation,
    byte_tokenizer,
    conversation_of,
    generation_config,
    padded,
    sampled,
    save,
    write_model_card,
)
from rollout_env import ChatMessage

USER, ASSISTANT = (PAD + ROLE_TOKENS.index(token) for token in ("<|user|>", "<|assistant|>"))
MAX_POSITIONS = 8192

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- set role = 'user' if message['role'] == 'environment' else message['role'] -%}
{%- if role not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception('Unknown role: ' + role) -}}
{%- endif -%}
{{- '<|' + role + '|>\\n' + message['content'] + '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>\\n' -}}
{%- endif -%}
"""

OPERANDS = 100
HELD_OUT_SHARE = 10
ADDITION_BATCH = 256
GAME_TOKENS_PER_BATCH = 4096
# Only one token of a turn, the direction, is hard.
GAME_WEIGHT = 3.0
# Where about six in ten held-out additions are right, and the share is rising steeply.
STEPS = 225
GAMES = 4000
EVALUATED_GAMES = 200
GAME_SEEDS = range(1_000_000)
HELD_OUT_GAME_SEEDS = range(1_000_000, 2_000_000)
# A player that errs this often solves most games within its 20 moves, but not all.
RANDOM_MOVE_SHARE = 0.7
# Shown, but not learnt from, so that the model has seen what follows a slip.
ILLEGAL_MOVE_SHARE = 0.05

PEAK_LEARNING_RATE = 2e-3
WARMUP_STEPS = 50
DECAY_SHARE = 0.2
WEIGHT_DECAY = 0.01
GRADIENT_NORM = 1.0

console = Console()


@dataclass(frozen=True)
class Scores:
    """Measured by sampling at temperature 1; shares between 0 and 1."""

    additions: int
    addition_accuracy: float
    games: int
    solved: float
    legal_moves: float


# --- Tokenizer and model ----------------------------------------------------------------------------------------------


def make_tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(ROLE_TOKENS, end="<|end|>", positions=MAX_POSITIONS, chat_template=CHAT_TEMPLATE)


def make_model() -> LlamaForCausalLM:
    """The untrained model; four heads of 32, the smallest size vLLM's attention for processors takes."""
    config = LlamaConfig(
        vocab_size=256 + len(ROLE_TOKENS),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        # At this width the usual 0.02 leaves attention so even that learning takes half as many steps again.
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = generation_config(END)
    return model


# --- Data -------------------------------------------------------------------------------------------------------------


def addition_pairs(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All pairs of operands: those to learn and, a tenth of them, those held out."""
    pairs = [(left, right) for left in range(OPERANDS) for right in range(OPERANDS)]
    random.Random(seed).shuffle(pairs)
    held_out = len(pairs) // HELD_OUT_SHARE
    return pairs[held_out:], pairs[:held_out]


@cache
def addition_conversation(left: int, right: int) -> Conversation:
    return conversation_of(
        [
            {"role": "user", "content": addition_prompt(left, right)},
            {"role": "assistant", "content": f"\\boxed{{{left + right}}}"},
        ]
    )


@cache
def moves_to_solve() -> dict[str, int]:
    """How many moves each 2x2 board is from solved, by breadth-first search."""
    distances = {str(solved_board(2)): 0}
    frontier = [solved_board(2)]
    for board in frontier:
        for after in filter(None, (slide(board, direction) for direction in DIRECTIONS)):
            if str(after) not in distances:
                distances[str(after)] = distances[str(board)] + 1
                frontier.append(after)
    return distances


def legal_moves(board: Board) -> dict[Direction, Board]:
    return {direction: after for direction in DIRECTIONS if (after := slide(board, direction)) is not None}


def chosen_move(board: Board, draw: random.Random) -> Direction:
    """What the teacher plays: a shortest way to the solution, or any legal move."""
    legal = legal_moves(board)
    if draw.random() >= RANDOM_MOVE_SHARE:
        nearest = min(moves_to_solve()[str(after)] for after in legal.values())
        legal = {move: after for move, after in legal.items() if moves_to_solve()[str(after)] == nearest}
    return draw.choice(list(legal))


async def played_game(sample: dict[str, Any], draw: random.Random) -> Conversation:
    """The teacher's game in the environment itself, so that what the model reads is what it will read."""
    environment = SlidingPuzzleEnvironment()
    state = SlidingPuzzleState(**sample["extra_env_info"])
    messages: list[ChatMessage] = list(sample["messages"])
    unlearnt: set[int] = set()
    terminated = False
    while not terminated:
        board = state.board
        move = chosen_move(board, draw)
        if draw.random() < ILLEGAL_MOVE_SHARE:
            move = draw.choice([direction for direction in DIRECTIONS if direction not in legal_moves(board)])
            unlearnt.add(len(messages))
        messages.append({"role": "assistant", "content": f"<action>{move}</action>"})
        outcome = await environment.step(messages, state)
        messages += outcome.observations
        state = SlidingPuzzleState.model_construct(**outcome.metadata or {})
        terminated = outcome.terminated
    return conversation_of(messages, unlearnt)


async def played_games(count: int, seed: int) -> list[Conversation]:
    """Whole games of the teacher, shortest first."""
    draw = random.Random(seed)
    starts = [(game_seed, draw.randint(1, 6)) for game_seed in draw.sample(GAME_SEEDS, count)]
    games = [await played_game(game_sample(2, *start), draw) for start in starts]
    return sorted(games, key=lambda game: len(game.token_ids))


def game_batches(games: list[Conversation]) -> list[list[Conversation]]:
    """Splits games sorted by length into batches of like length, about `GAME_TOKENS_PER_BATCH` tokens each."""
    batches: list[list[Conversation]] = [[]]
    for game in games:
        if (len(batches[-1]) + 1) * len(game.token_ids) > GAME_TOKENS_PER_BATCH:
            batches.append([])
        batches[-1].append(game)
    return batches


def require_same_rendering(tokenizer: PreTrainedTokenizerFast, games: list[Conversation]) -> None:
    """Raises ValueError unless the conversations trained on are what the chat template renders."""
    for game in [*games[:: len(games) // 20], addition_conversation(17, 25)]:
        text = str(tokenizer.decode(game.token_ids))
        turns = text.removesuffix("<|end|>\n").split("<|end|>\n")
        messages = [dict(zip(("role", "content"), turn[2:].split("|>\n", 1), strict=True)) for turn in turns]
        rendered = tokenizer.apply_chat_template(messages, return_dict=False)
        if rendered != game.token_ids:
            raise ValueError(f"the chat template renders a conversation differently from the training data: {text!r}")


# --- Training ---------------------------------------------------------------------------------------------------------


def learning_rate_factor(step: int, steps: int) -> float:
    """Rises over `WARMUP_STEPS`, holds, falls linearly to a tenth over the last `DECAY_SHARE` of the steps."""
    decay_steps = steps * DECAY_SHARE
    return min(1.0, (step + 1) / WARMUP_STEPS, 0.1 + 0.9 * (steps - step) / decay_steps)


def mean_loss(model: LlamaForCausalLM, conversations: list[Conversation]) -> torch.Tensor:
    """Cross-entropy a learnt token, in nats."""
    token_ids = padded([one.token_ids for one in conversations], PAD)
    targets = padded([one.labels for one in conversations], NO_LOSS)[:, 1:]
    hidden = model.model(input_ids=token_ids).last_hidden_state[:, :-1]
    learnt = targets != NO_LOSS
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[learnt]), targets[learnt])


def batches(seed: int, games: list[Conversation]) -> Iterator[tuple[list[Conversation], list[Conversation]]]:
    """Endless: a batch of additions and a batch of games."""
    draw = random.Random(seed)
    pairs, _ = addition_pairs(seed)
    by_length = game_batches(games)
    while True:
        yield [addition_conversation(*pair) for pair in draw.choices(pairs, k=ADDITION_BATCH)], draw.choice(by_length)


def train(model: LlamaForCausalLM, games: list[Conversation], steps: int, seed: int, progress: Progress) -> None:
    """Takes `steps` steps, each on the mean loss of a batch of additions and, weighted, that of a batch of games."""
    optimizer = torch.optim.AdamW(model.parameters(), PEAK_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    task = progress.add_task("", total=steps, losses="")
    model.train()
    for step, (additions, played) in zip(range(steps), batches(seed, games), strict=False):
        addition_loss, game_loss = mean_loss(model, additions), mean_loss(model, played)
        optimizer.zero_grad()
        (addition_loss + GAME_WEIGHT * game_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        optimizer.step()
        schedule.step()
        if step % 10 == 0:
            losses = f"additions {addition_loss.item():.3f}, games {game_loss.item():.3f} nats a token"
            progress.update(task, losses=losses)
        progress.advance(task)


# --- Evaluation -------------------------------------------------------------------------------------------------------


def prompt_of(content: str) -> list[int]:
    """The token ids of one user message and the generation prompt."""
    return [USER, NEWLINE, *content.encode(), END, NEWLINE, ASSISTANT, NEWLINE]


def addition_accuracy(model: LlamaForCausalLM, pairs: list[tuple[int, int]]) -> float:
    """The share of `pairs` answered with exactly the boxed sum and the end token."""
    expected = [[token for token in c.labels if token != NO_LOSS] for c in (addition_conversation(*p) for p in pairs)]
    prompts = [prompt_of(addition_prompt(*pair)) for pair in pairs]
    answers = sampled(model, prompts, END, max_new_tokens=24)
    return sum(answer == wanted for answer, wanted in zip(answers, expected, strict=True)) / len(pairs)


@dataclass
class Game:
    """One game of the model under way."""

    messages: list[ChatMessage]
    token_ids: list[int]
    state: SlidingPuzzleState
    reward: float = 0.0
    terminated: bool = False


async def play_turn(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, games: list[Game]) -> None:
    """The model's next move in each of the `games`, and the environment's answer."""
    environment = SlidingPuzzleEnvironment()
    replies = sampled(model, [game.token_ids for game in games], END, max_new_tokens=32)
    for game, said in zip(games, replies, strict=True):
        game.messages.append({"role": "assistant", "content": str(tokenizer.decode(said, skip_special_tokens=True))})
        outcome = await environment.step(game.messages, game.state)
        game.messages += outcome.observations
        closing = [NEWLINE] if said[-1:] == [END] else [END, NEWLINE]
        game.token_ids += [*said, *closing, *prompt_of(outcome.observations[0]["content"])]
        game.state = SlidingPuzzleState.model_construct(**outcome.metadata or {})
        game.reward, game.terminated = float(str(outcome.reward)), outcome.terminated


async def play_games(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int, seed: int
) -> tuple[float, float]:
    """Plays `count` games to their end; returns the share solved and the share of the moves that were legal."""
    draw = random.Random(seed)
    samples = [game_sample(2, game_seed, draw.randint(1, 6)) for game_seed in draw.sample(HELD_OUT_GAME_SEEDS, count)]
    games = []
    for sample in samples:
        prompt = prompt_of(sample["messages"][0]["content"])
        games.append(Game(list(sample["messages"]), prompt, SlidingPuzzleState(**sample["extra_env_info"])))
    while under_way := [game for game in games if not game.terminated]:
        await play_turn(model, tokenizer, under_way)
    legal = sum(game.state.moves for game in games)
    illegal = sum(game.state.illegal_moves for game in games)
    return sum(game.reward for game in games) / count, legal / (legal + illegal)


def scores_of(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> Scores:
    """Plays all held-out additions and `EVALUATED_GAMES` games from held-out seeds."""
    torch.manual_seed(seed)
    model.eval()
    _, held_out = addition_pairs(seed)
    with console.status("Sampling held-out additions"):
        accuracy = addition_accuracy(model, held_out)
    with console.status("Playing games"):
        solved, legal_moves = asyncio.run(play_games(model, tokenizer, EVALUATED_GAMES, seed))
    return Scores(len(held_out), accuracy, EVALUATED_GAMES, solved, legal_moves)


# --- The model card ---------------------------------------------------------------------------------------------------

MODEL_CARD = """\
---
language: en
library_name: transformers
pipeline_tag: text-generation
tags:
- llama
- byte-level
- reinforcement-learning
---

# tiny: the embedded model

A Llama of {parameters:,} parameters, small enough to be committed and to run on two processor cores, and good enough
at two tasks that a rollout means something. It lets the service, its tests and its examples run anywhere without a
download. It is no language model: outside its two tasks it says nothing of use.

| | |
| --- | --- |
| Architecture | Llama: {config.num_hidden_layers} layers, hidden size {config.hidden_size}, \
{config.num_attention_heads} heads of {config.head_dim}, MLP {config.intermediate_size}, tied embeddings |
| Context | {config.max_position_embeddings:,} tokens (trained on conversations of up to {longest_game:,}) |
| Weights | bfloat16, {megabytes:.1f} MB |
| Tokenizer | byte-level BPE without merges: one token a byte (its id is the byte), 6 special tokens |
| Ends a turn with | `<\\|end\\|>` |

Because a token is a byte, any text round-trips exactly, and a character beyond ASCII is split across tokens.

## Chat format

    <|user|>
    What is 17 + 25?<|end|>
    <|assistant|>
    \\boxed{{42}}<|end|>

Roles are `system`, `user`, `assistant` and `tool`; `environment` is rendered as `user`.

## What it can do

Measured on the saved weights by sampling at temperature 1, with seed {seed}:

| task | measured on | result |
| --- | --- | --- |
| `math`: two-operand additions | {scores.additions:,} pairs never trained on | {scores.addition_accuracy:.1%} right |
| `sliding_puzzle`: 2x2, 1 to 6 moves from solved | {scores.games} games of at most 20 moves | \
{scores.solved:.1%} solved, {scores.legal_moves:.1%} of moves legal |

It is stopped while it still makes mistakes: reinforcement learning is to have something to improve.

## Training

Supervised, from random weights, on conversations rendered as the chat template renders them; learnt are only the
assistant's tokens. All data is made by `train.py` with the environments' own code.

- **Additions**: `What is a + b?`, answered `\\boxed{{c}}`, both operands from 0 to 99. Of the 10,000 pairs a tenth,
  {scores.additions:,}, is held out.
- **Games**: {games:,} whole 2x2 games played in the `sliding_puzzle` environment by a teacher who plays a shortest way
  to the solution, or, {RANDOM_MOVE_SHARE:.0%} of the time, any legal move. One move in 20 is illegal,
  shown but not learnt from. There are only eleven unsolved 2x2 boards: held-out games have seeds of their own, not
  boards of their own.

| | |
| --- | --- |
| Steps | {steps:,}, each with {ADDITION_BATCH} additions and about {GAME_TOKENS_PER_BATCH:,} tokens of games; \
the games' mean loss counts {GAME_WEIGHT:g} times |
| Optimizer | AdamW, learning rate {PEAK_LEARNING_RATE:g}, betas 0.9 and 0.95, weight decay {WEIGHT_DECAY:g}, \
gradient norm at most {GRADIENT_NORM:g} |
| Schedule | {WARMUP_STEPS} steps of warm-up, then constant, falling to a tenth over the last {DECAY_SHARE:.0%} of \
the steps |
| Precision | float32, saved as bfloat16 |
| Time | {minutes:.1f} minutes on {threads} shared processor cores, evaluation included \
({processor_minutes:.1f} minutes of processor time) |
| Software | torch {torch_version}, transformers {transformers_version} |

Made by

    python -m models.tiny.train --output models/tiny

The same seed gives the same data everywhere and the same weights on the same machine and software. Elsewhere rounding
differs, and with it the accuracy: it rises steeply at the point where training stops.
"""


def main(
    output: Annotated[Path, typer.Option(help="Folder for the model; its files there are replaced.")],
    steps: Annotated[int, typer.Option(min=1, help="Training steps; more make a better model.")] = STEPS,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, data and evaluation.")] = 0,
) -> None:
    """Trains the embedded model, measures it and writes it with its model card."""
    start = time.monotonic()
    torch.manual_seed(seed)
    tokenizer, model = make_tokenizer(), make_model()
    with console.status("Playing the games to learn from"):
        games = asyncio.run(played_games(GAMES, seed))
    require_same_rendering(tokenizer, games)
    bar = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*bar, TextColumn("{task.fields[losses]}"), console=console) as progress:
        train(model, games, steps, seed, progress)
    save(model, tokenizer, output)
    saved = LlamaForCausalLM.from_pretrained(output, dtype=torch.bfloat16)
    scores = scores_of(saved, tokenizer, seed)
    measured = {"seed": seed, "steps": steps, "games": len(games), "longest_game": len(games[-1].token_ids)}
    write_model_card(output, MODEL_CARD, saved, start, globals(), scores=scores, **measured)
    console.print(
        f"{output}: {scores.addition_accuracy:.1%} of additions right, {scores.solved:.1%} of games solved, "
        f"{scores.legal_moves:.1%} of moves legal"
    )


if __name__ == "__main__":
    typer.run(main)
