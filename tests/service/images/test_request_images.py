"""The images of a request become names, or the request is refused and nothing is kept."""

import asyncio
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.images.book import ImagesFull, ImagesSettings
from deployments.protocols.images import name_of_image
from rollout_client.contract.rollouts import RolloutRequest
from service.access.keys import Caller
from service.images.request_images import RequestImages, with_names
from service.problems import MOST_PROBLEMS, RequestProblem
from tests.deployments.images.pictures import animation, picture
from tests.fakes.image_store import ImagesInProcess
from tests.virtual_time import runs

RED, BLUE, GREEN = picture("red"), picture("blue", "JPEG"), picture("green", size=(5, 3))
ANN, BOB = Caller("ann", frozenset(["rollout"])), Caller("bob", frozenset(["rollout"]))


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{b64encode(data).decode()}"


def parts(*images: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": "look"}, *({"type": "image", "image": image} for image in images)]


def request_of(*prompts: Sequence[str], shown: Sequence[str] = ()) -> RolloutRequest:
    """A request with a sample for each prompt, and with `shown` one more that goes on with a log which shows these."""
    samples: list[dict[str, Any]] = [
        {"task_name": "math", "messages": [{"role": "user", "content": parts(*images)}]} for images in prompts
    ]
    if shown:
        ranges = [{"media": name, "start": place, "end": place + 1} for place, name in enumerate(shown)]
        given = {"role": "user", "content": "", "token_ids": [1] * len(shown), "mm_ranges": ranges}
        samples.append({"task_name": "math", "message_log": [given]})
    return RolloutRequest.model_validate({"samples": samples, "num_generations": 1})


def images_of(request: RolloutRequest) -> list[list[str]]:
    return [
        [part.image for message in sample.messages or () for part in message.content or () if part.type == "image"]  # type: ignore[union-attr]
        for sample in request.samples
    ]


class Images:
    """Images of requests, over a store in this process."""

    def __init__(self, **settings: Any) -> None:
        self.settings = ImagesSettings(**settings)
        self.store = ImagesInProcess(self.settings)
        self.images = RequestImages(self.store, self.settings)

    @runs
    async def named(self, body: RolloutRequest, caller: Caller = ANN, before: Sequence[bytes] = ()) -> RolloutRequest:
        """The named request, where the caller has put images `before`."""
        if before:
            await self.store.put(before, caller.name)
        self.store.puts.clear()
        return await with_names(self.images, body, caller)

    def problems(self, request: RolloutRequest, **options: Any) -> list[tuple[str, str]]:
        """The fields and messages with which the request is refused. Nothing is kept of it."""
        with pytest.raises(RequestProblem) as refused:
            self.named(request, **options)
        assert refused.value.problem.status == 422
        assert self.store.puts == []
        return [(error.field, error.message) for error in refused.value.problem.errors]


def test_data_urls_and_names_become_names_in_their_places() -> None:
    images = Images()
    red, blue, green = map(name_of_image, (RED, BLUE, GREEN))
    request = request_of([data_url(RED), data_url(BLUE, "jpeg")], [green, data_url(RED)], [], shown=[green])
    named = images.named(request, before=[GREEN])
    assert images_of(named) == [[red, blue], [green, red], [], []]
    assert images.store.puts == [[red, blue]]
    assert named.samples[2] is request.samples[2]
    assert images_of(request)[0] == [data_url(RED), data_url(BLUE, "jpeg")], "the request itself stays as it is"
    log = named.samples[3].message_log
    assert log is not None and log[0].mm_ranges is not None and log[0].mm_ranges[0].media == green  # noqa: PT018


def test_a_request_without_images_is_returned_itself() -> None:
    request = request_of([])
    images = Images()
    assert images.named(request) is request
    assert images.store.puts == []


def test_what_the_caller_has_here_is_not_put_again() -> None:
    images = Images()
    assert images_of(images.named(request_of([data_url(RED), data_url(BLUE)]), before=[RED])) == [
        [name_of_image(RED), name_of_image(BLUE)]
    ]
    assert images.store.puts == [[name_of_image(BLUE)]]
    # Another key's is put for this one.
    images.named(request_of([data_url(RED)]), BOB)
    assert images.store.puts == [[name_of_image(RED)]]


def test_every_problem_is_named_by_its_field() -> None:
    images = Images(max_pixels=100)
    gone, large = name_of_image(b"gone"), picture(size=(20, 20))
    request = request_of(
        [data_url(RED), data_url(b"plain text")],
        [data_url(large), data_url(b"GIF89a")],
        [gone, data_url(animation("PNG"))],
        shown=[gone],
    )
    assert [field for field, _ in images.problems(request)] == [
        "samples[0].messages[0].content[2].image",
        "samples[1].messages[0].content[1].image",
        "samples[1].messages[0].content[2].image",
        "samples[2].messages[0].content[1].image",
        "samples[2].messages[0].content[2].image",
        "samples[3].message_log[0].mm_ranges[0].media",
    ]


def test_an_image_of_another_key_is_refused() -> None:
    images = Images()
    [name] = asyncio.run(images.store.put([RED], "ann"))
    assert [field for field, _ in images.problems(request_of([name]), caller=BOB)] == [
        "samples[0].messages[0].content[1].image"
    ]
    # Whoever has the content may name it.
    assert images_of(images.named(request_of([data_url(RED)]), BOB)) == [[name]]
    assert images_of(images.named(request_of([name]), BOB)) == [[name]]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("data:image/gif;base64,R0lGODlh", "'data:image/gif;base64' does not begin a data URL of an image"),
        ("data:image/svg+xml,<svg/>", "'data:image/svg+xml' does not begin a data URL"),
        ("data:image/png;charset=utf-8;base64,AAAA", "does not begin a data URL"),
        ("data:image/png;base64,AAA", "its data URL is not base64 (Incorrect padding); encode the file again"),
        ("data:image/png;base64,AA\nAA", "is not base64 (Only base64 data is allowed)"),
        ("data:image/png;base64,ÄÄÄÄ", "its data URL is not base64 ('ascii' codec"),
        ("data:image/png;base64,", "it begins with nothing; convert it"),
    ],
)
def test_a_data_url_is_read_strictly(url: str, says: str) -> None:
    [(field, message)] = Images().problems(request_of([url]))
    assert field == "samples[0].messages[0].content[1].image"
    assert says in message


def test_a_large_data_url_is_refused_before_it_is_decoded() -> None:
    assert images_of(Images(max_image_bytes=len(RED)).named(request_of([data_url(RED)]))) == [[name_of_image(RED)]]
    [(_, message)] = Images(max_image_bytes=len(RED) - 1).problems(request_of([data_url(RED)]))
    assert message.startswith(f"it has {len(RED)} bytes, and images.max_image_bytes allows {len(RED) - 1}")
    not_base64 = "data:image/png;base64," + "*" * 4_000
    [(_, message)] = Images(max_image_bytes=1000).problems(request_of([not_base64]))
    assert message.startswith("it has 2998 bytes, and images.max_image_bytes allows 1000")


def test_a_sample_shows_a_bounded_number_of_images() -> None:
    [(field, message)] = Images(max_images=2).problems(request_of([data_url(RED)] * 2, [data_url(RED)] * 3))
    assert (field, message) == ("samples[1]", "it shows 3 images, and images.max_images allows 2; show fewer")


def test_many_bad_images_are_a_small_error() -> None:
    images = Images(max_images=300)
    problems = images.problems(request_of(*[[f"data:image/png;base64,{number:04}"] for number in range(100)]))
    assert len(problems) == MOST_PROBLEMS
    with pytest.raises(RequestProblem) as refused:
        images.named(request_of([data_url(bytes(10**5)) for _ in range(200)]))
    assert len(refused.value.problem.model_dump_json()) < 20_000


def test_a_store_without_room_refuses_the_request() -> None:
    with pytest.raises(ImagesFull):
        Images(max_bytes=10).named(request_of([data_url(RED)]))


def test_a_service_without_images_names_each_that_it_refuses() -> None:
    request = request_of([], [data_url(RED)], shown=[name_of_image(BLUE)])
    with pytest.raises(RequestProblem) as refused:
        asyncio.run(with_names(None, request))
    assert [error.field for error in refused.value.problem.errors] == [
        "samples[1].messages[0].content[1].image",
        "samples[2].message_log[0].mm_ranges[0].media",
    ]
    assert asyncio.run(with_names(None, request_of([]))) == request_of([])


@given(st.lists(st.lists(st.sampled_from([RED, BLUE, GREEN, b"bad"]), max_size=4), min_size=1, max_size=5), st.data())
def test_all_images_are_named_or_all_bad_ones_are_reported(shown: list[list[bytes]], data: st.DataObject) -> None:
    by_name = {name for name in (RED, BLUE, GREEN) if data.draw(st.booleans())}
    images = Images()

    def given_as(content: bytes) -> str:
        return name_of_image(content) if content in by_name else data_url(content)

    request = request_of(*[[given_as(content) for content in contents] for contents in shown])
    bad = [
        f"samples[{position}].messages[0].content[{1 + place}].image"
        for position, contents in enumerate(shown)
        for place, content in enumerate(contents)
        if content == b"bad"
    ]
    if bad:
        assert [field for field, _ in images.problems(request, before=sorted(by_name))] == bad[:MOST_PROBLEMS]
    else:
        named = images.named(request, before=sorted(by_name))
        assert images_of(named) == [[name_of_image(content) for content in contents] for contents in shown]
        put = [name for call in images.store.puts for name in call]
        assert set(put) == {name_of_image(each) for contents in shown for each in contents if each not in by_name}
