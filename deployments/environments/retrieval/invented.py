"""A corpus about invented people and towns, with questions: what a model knows of the world does not help."""

import random
from typing import Any

from deployments.environments.retrieval.corpus import Document

SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
JOBS = ("baker", "pilot", "singer", "farmer", "doctor", "painter", "sailor", "teacher")
PEOPLE, TOWNS = 200, 40


def invented_corpus(seed: int = 0) -> tuple[list[Document], list[dict[str, Any]]]:
    """Documents about people and towns, and samples about them, some of which need two searches."""
    draw = random.Random(seed)
    names = invented_names(draw, 2 * PEOPLE + 2 * TOWNS)
    people = [f"{first} {last}" for first, last in zip(names[:PEOPLE], names[PEOPLE : 2 * PEOPLE], strict=True)]
    towns, countries = names[2 * PEOPLE : 2 * PEOPLE + TOWNS], names[2 * PEOPLE + TOWNS :]
    documents = [
        Document(id=f"town-{place}", title=town, text=f"{town} is a town in {country}.")
        for place, (town, country) in enumerate(zip(towns, countries, strict=True))
    ]
    samples = []
    for place, person in enumerate(people):
        job, home = draw.choice(JOBS), draw.randrange(TOWNS)
        own = f"person-{place}"
        documents.append(Document(id=own, title=person, text=f"{person} is a {job} and lives in {towns[home]}."))
        for question, answer, relevant in (
            (f"Where does {person} live?", towns[home], [own]),
            (f"What does {person} do?", job, [own]),
            (f"In which country does {person} live?", countries[home], [own, f"town-{home}"]),
        ):
            info = {"answers": [answer], "relevant": relevant}
            samples.append({"messages": [{"role": "user", "content": question}], "extra_env_info": info})
    return documents, samples


def invented_names(draw: random.Random, count: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(draw.choices(SYLLABLES, k=3)).capitalize()] = None
    return list(names)
