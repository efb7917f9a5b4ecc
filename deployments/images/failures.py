"""Every way in which an image can be refused. The ingress answers with problem documents."""

from deployments.failures import StoreFailure


class ImageFailure(StoreFailure):
    """A call of the image store was not carried out."""


class ImageUnknown(ImageFailure):
    """The image never was, is another key's, or is not kept any more."""

    status = 404
    name = "image-unknown"
    title = "The image is not known"


class ImagesFull(ImageFailure):
    """The images that are kept leave no room for another one."""

    status = 429
    name = "images-full"
    title = "The kept images leave no room for another one; nothing was started"
    # Images can go once nobody has used them for images.keep_s.
    retry_after_s = 30


class ImagesNotConfigured(ImageFailure):
    """The config has no `images`."""

    status = 501
    name = "images-not-configured"
    title = "The service takes no images"


NOT_KEPT = "there is no such image: it is not kept any more, or it is another key's; send its file"


def image_unknown(name: str) -> ImageUnknown:
    return ImageUnknown.of("name", NOT_KEPT, name)


class ImageRefused(Exception):
    """The bytes are not an image that the service takes. The message says what to send, without a full stop."""
