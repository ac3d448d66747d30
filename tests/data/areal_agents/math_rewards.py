"""A reward function of AReaL's form (areal/api/reward_api.py)."""


def last_characters(prompt, completions, prompt_ids, completion_ids, answer, **kwargs) -> float:
    """1 where the answer stands in the completion."""
    assert len(prompt_ids) > 1 and completion_ids and prompt
    return float(str(answer) in completions)
