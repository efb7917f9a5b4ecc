"""Methods of the client that describe the service, list tasks, check a trainer's tokenizer, and keep images."""

from os import PathLike
from pathlib import Path
from typing import Any, Unpack

from rollout_client.calls.async_client.connection import AsyncResource
from rollout_client.calls.call import Call, call_for, path_of
from rollout_client.calls.concurrency import async_call_blocking
from rollout_client.calls.options import CallOptions
from rollout_client.contract.info import BlobInfo, ServiceInfo, TaskInfo, TaskList, TaskSamples, Vocabulary
from rollout_client.contract.rollouts import SampleInput


class AsyncInfoCalls(AsyncResource):
    async def info(self, **options: Unpack[CallOptions]) -> ServiceInfo:
        """Model, tokenizer, limits, versions and tasks of the service."""
        return await self._connection.short(call_for(ServiceInfo, "GET", "/info"), options)

    async def check_tokenizer(self, tokenizer: Any, **options: Unpack[CallOptions]) -> None:
        """Checks that `tokenizer`, one of transformers, makes the tokens that the service's tokenizer makes.

        Vocabulary, tokens of some texts and chat template are compared.

        Raises:
            TokenizerDiffers: it makes other tokens; the message names what differs.
        """
        from rollout_client.tokenizer_check import check_tokenizer, has_other_vocabulary

        limits = self._connection.settings.short_limits(options)
        info = await self._connection.result(call_for(ServiceInfo, "GET", "/info"), limits)
        service_tokens = None
        if await async_call_blocking(has_other_vocabulary, tokenizer, info):
            vocabulary = call_for(Vocabulary, "GET", "/info/vocabulary")
            service_tokens = (await self._connection.result(vocabulary, limits)).tokens
        await async_call_blocking(check_tokenizer, tokenizer, info, service_tokens)

    async def tasks(self, **options: Unpack[CallOptions]) -> list[TaskInfo]:
        """The tasks of the service, the fields they need and an example of each."""
        return (await self._connection.short(call_for(TaskList, "GET", "/tasks"), options)).tasks

    async def example_samples(
        self, task_name: str, count: int = 8, seed: int = 0, **options: Unpack[CallOptions]
    ) -> list[SampleInput]:
        """The first samples of `task_samples`, without where the next ones begin."""
        return (await self.task_samples(task_name, count, seed=seed, **options)).samples

    async def task_samples(
        self,
        task_name: str,
        count: int = 8,
        start: int = 0,
        *,
        seed: int | None = None,
        split: str | None = None,
        **options: Unpack[CallOptions],
    ) -> TaskSamples:
        """A page of the task's data, or of what its environment makes: samples that can be posted as they are.

        Equal arguments give equal samples. They are those that `samples_from` plays for a `SampleRange` like them.
        """
        query = {"count": count, "start": start, "seed": seed, "split": split}
        return await self._connection.short(
            call_for(TaskSamples, "GET", path_of("tasks", task_name, "samples"), query=query), options
        )

    async def upload_image(self, image: bytes | str | PathLike[str], **options: Unpack[CallOptions]) -> str:
        """Uploads a PNG or JPEG image, and returns its name for messages.

        A part `{"type": "image", "image": name}` of a message shows it. Uploaded again it has the same name.

        Args:
            image: the content of the file, or its path.
        """
        content = image if isinstance(image, bytes) else await async_call_blocking(Path(image).read_bytes)
        octets = {"content-type": "application/octet-stream"}
        call = call_for(BlobInfo, "POST", "/blobs", body=content, content_headers=octets)
        return (await self._connection.short(call, options)).name

    async def image(self, name: str, **options: Unpack[CallOptions]) -> bytes:
        """The file of an image, by the name that `upload_image`, a message or `mm_ranges` has."""
        return await self._connection.short(Call("GET", path_of("blobs", name), b"".join, accept="image/*"), options)
