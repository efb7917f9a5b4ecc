"""Math problems with one right answer."""

from deployments.environments.math.additions import LARGEST_OPERAND as LARGEST_OPERAND
from deployments.environments.math.additions import addition_prompt as addition_prompt
from deployments.environments.math.additions import addition_sample as addition_sample
from deployments.environments.math.answers import last_box as last_box
from deployments.environments.math.environment import MathEnvironment as MathEnvironment
from deployments.environments.math.environment import MathInfo as MathInfo
