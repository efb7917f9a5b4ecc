"""The images of a request become names, or the request is refused and nothing is kept."""

import asyncio
from base64 import b64encode
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from deployments.images.failures import ImagesFull, ImageUnknown
from deployments.images.settings import ImagesSettings
from deployments.jobs.records import JobWrite
from deployments.protocols.images import name_of_image
from deployments.storage.storage import EntryName
from rollout_client.contract.rollouts import RolloutRequest
from service.access.keys import Caller
from service.images import fetching
from service.images.fetching import ImageFetcher
from service.images.request_images import RequestImages, refuse_images
from service.jobs.journal import JobJournal
from service.problems import MOST_PROBLEMS, RequestProblem
from tests.deployments.images.pictures import ImagesInProcess, animation, picture

RED, BLUE, GREEN = picture("red"), picture("blue", "JPEG"), picture("green", "WEBP")
ANN, BOB = Caller("ann", frozenset(["rollout"])), Caller("bob", frozenset(["rollout"]))
HOST = "http://pictures.example.org"


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
    """Images of requests, over a store in this process and a host that serves what it has."""

    def __init__(self, hosted: dict[str, bytes] | None = None, **settings: Any) -> None:
        self.settings = ImagesSettings(**{"allowed_hosts": ["pictures.example.org"], **settings})
        self.store = ImagesInProcess(self.settings)
        self.hosted = hosted or {}
        self.fetched: list[str] = []
        fetcher = ImageFetcher(self.settings, self._resolve, httpx.MockTransport(self._answer))
        self.images = RequestImages(self.store, self.settings, fetcher)

    def named(self, request: RolloutRequest, caller: Caller = ANN, before: Sequence[bytes] = ()) -> RolloutRequest:
        """The named request, where the caller has put images `before`."""

        async def name() -> RolloutRequest:
            if before:
                await self.store.put(before, caller.name)
            self.store.puts.clear()
            return await self.images.named(request, caller)

        return asyncio.run(name())

    def problems(self, request: RolloutRequest, **options: Any) -> list[tuple[str, str]]:
        """The fields and messages with which the request is refused. Nothing is kept of it."""
        with pytest.raises(RequestProblem) as refused:
            self.named(request, **options)
        assert refused.value.problem.status == 422
        assert self.store.puts == []
        return [(error.field, error.message) for error in refused.value.problem.errors]

    async def _resolve(self, host: str, port: int) -> list[str]:
        return ["93.184.216.34"]

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.fetched.append(request.url.path)
        found = self.hosted.get(request.url.path)
        return httpx.Response(404) if found is None else httpx.Response(200, stream=httpx.ByteStream(found))


def test_data_urls_addresses_and_names_become_names_in_their_places() -> None:
    images = Images({"/blue.jpg": BLUE})
    red, blue, green = map(name_of_image, (RED, BLUE, GREEN))
    request = request_of([data_url(RED), f"{HOST}/blue.jpg"], [green, data_url(RED)], [], shown=[green])
    named = images.named(request, before=[GREEN])
    assert images_of(named) == [[red, blue], [green, red], [], []]
    assert images.store.puts == [[red, blue]]
    assert images.fetched == ["/blue.jpg"]
    assert named.samples[2] is request.samples[2]
    assert images_of(request)[0] == [data_url(RED), f"{HOST}/blue.jpg"], "the request itself stays as it is"
    log = named.samples[3].message_log
    assert log is not None and log[0].mm_ranges is not None and log[0].mm_ranges[0].media == green  # noqa: PT018


def test_a_job_that_another_process_takes_up_shows_the_images_that_it_has_shown() -> None:
    images = Images({"/a": RED, "/b": BLUE})
    request = request_of([f"{HOST}/a", data_url(GREEN), f"{HOST}/b"], [f"{HOST}/a"])
    written: dict[EntryName, bytes] = {}

    class Writer:
        async def write(self, write: JobWrite) -> None:
            written.update(write.added)

    def journal() -> JobJournal:
        record: Any = SimpleNamespace(record=SimpleNamespace(job_id="job", epoch=1, last_event=0), entries=[])
        writer: Any = Writer()
        return JobJournal(record, writer)

    red, green, blue = map(name_of_image, (RED, GREEN, BLUE))
    names = [[red, green, blue], [red]]
    assert images_of(asyncio.run(images.images.named(request, ANN, journal()))) == names
    images.hosted.update({"/a": GREEN, "/b": RED})
    taken_up = journal()
    taken_up.load(written, [], group_size=1)
    images.store.puts.clear()
    assert images_of(asyncio.run(images.images.named(request, ANN, taken_up))) == names
    assert (images.fetched, images.store.puts, len(written)) == (["/a", "/b"], [], 1)
    with pytest.raises(RequestProblem) as refused:
        asyncio.run(images.images.named(request, BOB, taken_up))
    assert [error.field for error in refused.value.problem.errors] == [
        "samples[0].messages[0].content[1].image",
        "samples[0].messages[0].content[3].image",
        "samples[1].messages[0].content[1].image",
    ]


def test_a_request_fetches_no_more_than_fits_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "MOST_FETCHED_BYTES", len(RED))
    images = Images({f"/{number}": RED for number in range(64)})
    problems = images.problems(request_of([f"{HOST}/{number}" for number in range(64)]))
    assert len(images.fetched) <= fetching.FETCHES_AT_ONCE
    assert problems[-1] == (
        "samples[0].messages[0].content[21].image",
        f"the addresses before it lead to {len(RED) * len(images.fetched)} bytes, and those of a request may lead to "
        f"{len(RED)}; split the request, or upload the images",
    )
    images.fetched.clear()
    assert len(images_of(images.named(request_of([f"{HOST}/1"])))[0]) == 1, "another request has room of its own"


def test_a_request_without_images_is_returned_itself() -> None:
    request = request_of([])
    images = Images()
    assert images.named(request) is request
    assert images.store.puts == []


def test_names_alone_are_checked_and_nothing_is_put() -> None:
    images, name = Images(), name_of_image(RED)
    assert images_of(images.named(request_of([name]), before=[RED])) == [[name]]
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
    images = Images({"/gif": b"GIF89a", "/red": RED}, max_pixels=100)
    gone, large = name_of_image(b"gone"), picture(size=(20, 20))
    request = request_of(
        [data_url(RED), data_url(b"plain text")],
        [data_url(large), f"{HOST}/gif", f"{HOST}/nowhere", "http://other.example.org/red"],
        [gone, data_url(animation("WEBP"), "webp")],
        shown=[gone],
    )
    refused = dict(images.problems(request))
    advice = "upload it again"
    assert refused == {
        "samples[0].messages[0].content[2].image": (
            "it is not PNG, JPEG or WebP, it begins with 70 6c 61 69 6e 20 74 65; convert it"
        ),
        "samples[1].messages[0].content[1].image": (
            "it has 20 x 20 pixels, and images.max_pixels allows 100; scale it down"
        ),
        "samples[1].messages[0].content[2].image": (
            "it is not PNG, JPEG or WebP, it begins with 47 49 46 38 39 61; convert it"
        ),
        "samples[1].messages[0].content[3].image": "its host answers 404; upload the image",
        "samples[1].messages[0].content[4].image": (
            "images.allowed_hosts of the service's config does not list other.example.org; upload the image"
        ),
        "samples[2].messages[0].content[1].image": (
            f"there is no such image: it has expired, or it is another key's; {advice}"
        ),
        "samples[2].messages[0].content[2].image": "it is animated; send one picture",
        "samples[3].message_log[0].mm_ranges[0].media": (
            f"there is no such image: it has expired, or it is another key's; {advice}"
        ),
    }


def test_an_image_of_another_key_is_refused() -> None:
    images = Images()

    async def put() -> str:
        [name] = await images.store.put([RED], "ann")
        return name

    name = asyncio.run(put())
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
        ("http://", "it is not an http or https address"),
        ("https://pictures.example.org:port/", "it cannot be fetched (InvalidURL)"),
    ],
)
def test_a_data_url_is_read_strictly(url: str, says: str) -> None:
    [(field, message)] = Images().problems(request_of([url]))
    assert field == "samples[0].messages[0].content[1].image"
    assert says in message


def test_a_large_data_url_is_refused_before_it_is_decoded() -> None:
    exact = Images(max_image_bytes=len(RED))
    assert images_of(exact.named(request_of([data_url(RED)]))) == [[name_of_image(RED)]]
    [(_, message)] = Images(max_image_bytes=len(RED) - 1).problems(request_of([data_url(RED)]))
    assert message.startswith(f"it has {len(RED)} bytes, and images.max_image_bytes allows {len(RED) - 1}")
    not_base64 = "data:image/png;base64," + "*" * 4_000
    [(_, message)] = Images(max_image_bytes=1000).problems(request_of([not_base64]))
    assert message.startswith("it has 2998 bytes, and images.max_image_bytes allows 1000")


def test_a_sample_shows_a_bounded_number_of_images() -> None:
    images = Images(max_images=2)
    assert images.problems(request_of([data_url(RED)] * 2, [data_url(RED)] * 3)) == [
        ("samples[1]", "it shows 3 images, and images.max_images allows 2; show fewer")
    ]


def test_many_bad_images_are_a_small_error() -> None:
    images = Images(max_images=300)
    problems = images.problems(request_of(*[[f"data:image/png;base64,{number:04}"] for number in range(1000)]))
    assert len(problems) == MOST_PROBLEMS
    with pytest.raises(RequestProblem) as refused:
        images.named(request_of([data_url(bytes(10**6)) for _ in range(200)]))
    assert len(refused.value.problem.model_dump_json()) < 20_000


def test_ten_thousand_parts_are_refused_in_a_few_words() -> None:
    content = parts(*[data_url(RED)] * 10_000)
    with pytest.raises(ValidationError) as refused:
        RolloutRequest.model_validate(
            {"samples": [{"task_name": "math", "messages": [{"role": "user", "content": content}]}]}
        )
    assert refused.value.error_count() == 1
    assert len(refused.value.errors()[0]["msg"]) < 300


def test_a_store_without_room_refuses_the_request() -> None:
    with pytest.raises(ImagesFull):
        Images(max_bytes=10).named(request_of([data_url(RED)]))


def test_a_service_without_images_names_each_that_it_refuses() -> None:
    request = request_of([], [data_url(RED)], shown=[name_of_image(BLUE)])
    with pytest.raises(RequestProblem) as refused:
        asyncio.run(refuse_images(request))
    assert [error.field for error in refused.value.problem.errors] == [
        "samples[1].messages[0].content[1].image",
        "samples[2].message_log[0].mm_ranges[0].media",
    ]
    asyncio.run(refuse_images(request_of([])))


def test_an_image_can_be_downloaded_by_its_owner_alone() -> None:
    images = Images()

    async def download() -> Any:
        info = await images.images.upload(BLUE, ANN)
        content = await images.images.download(info.name, ANN)
        with pytest.raises(ImageUnknown):
            await images.images.download(info.name, BOB)
        return info, content

    info, content = asyncio.run(download())
    assert (info.name, info.bytes, info.media_type, info.width, info.height) == (
        name_of_image(BLUE),
        len(BLUE),
        "image/jpeg",
        4,
        3,
    )
    assert content == (BLUE, "image/jpeg")


@given(st.lists(st.lists(st.sampled_from([RED, BLUE, GREEN, b"bad"]), max_size=4), min_size=1, max_size=5), st.data())
def test_either_all_images_are_named_or_all_bad_ones_are_reported_and_none_is_kept(
    shown: list[list[bytes]], data: st.DataObject
) -> None:
    by_name = {name for name in (RED, BLUE, GREEN) if data.draw(st.booleans())}
    images = Images({"/": GREEN})

    def given_as(content: bytes) -> str:
        if content in by_name:
            return name_of_image(content)
        return f"{HOST}/" if content is GREEN and data.draw(st.booleans()) else data_url(content)

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
