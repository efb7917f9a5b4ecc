"""The tool of the agents in this folder: a plain function, of which each framework makes a tool."""

from deployments.tasks.tool_calls import calculate


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression.

    Args:
        expression: numbers, brackets, +, -, * and /.
    """
    try:
        return calculate(expression)
    except (ValueError, ZeroDivisionError) as error:
        return f"Error: {error}"
