"""The base of what the policy store and the job store refuse. The ingress answers with problem documents."""

from typing import ClassVar

from rollout_client.problem_contract import FieldProblem


class StoreFailure(Exception):
    """A call of a store was not carried out, with what is wrong, field by field."""

    status: ClassVar[int] = 422
    name: ClassVar[str]
    title: ClassVar[str]

    def __init__(self, *problems: FieldProblem) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return " ".join(f"{problem.field}: {problem.message}." for problem in self.problems)
