"""The shape that `--shape` names, as locust asks for one."""

from locust import LoadTestShape

from rollout_load.shapes import users_at

DEFAULT_LENGTH_S = 60.0


class OptionShape(LoadTestShape):
    """Ends the run with `--run-time`."""

    use_common_options = True

    def __init__(self, shape: str, peak: int | None, length_s: float | None) -> None:
        super().__init__()
        self._shape = shape
        self._peak = peak or 1
        self._length_s = length_s or DEFAULT_LENGTH_S

    def tick(self) -> tuple[int, float] | None:
        elapsed = self.get_run_time() / self._length_s
        if elapsed >= 1:
            return None
        return users_at(self._shape, elapsed, self._peak), float(self._peak)
