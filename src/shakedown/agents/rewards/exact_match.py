"""The rule of the demo task: the answer and nothing else."""


def exact_match(completion: str, answer: str) -> float:
    """1 when the texts are equal but for white space around them, else 0."""
    return float(completion.strip() == answer.strip())
