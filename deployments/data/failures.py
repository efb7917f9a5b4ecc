"""What can be wrong with the data of a task."""


class DataNotLoadable(Exception):
    """The config names data that cannot be read, or whose rows are no samples. The message is a
    sentence, which begins with the setting or the row."""


class DataRefused(Exception):
    """The data cannot give the samples that were asked for. The message says why and what to do.

    Attributes:
        field: of the `SampleRange` that is at fault; empty if it is the data.
        value: of that field.
    """

    def __init__(self, message: str, field: str = "", value: str | int | None = None) -> None:
        self.field = field
        self.value = value
        super().__init__(message)

    def __reduce__(self) -> tuple[type["DataRefused"], tuple[str, str, str | int | None]]:
        # It travels between replicas: an exception is pickled with its message alone.
        return DataRefused, (str(self), self.field, self.value)
