"""Stands in for AReaL's own `areal.utils.hf_utils`."""

from typing import Any


def apply_chat_template(tokenizer: Any, messages: Any, *, tokenize: bool = True, **kwargs: Any) -> Any:
    """Token ids, also of transformers 5, which gives them in a dict."""
    result = tokenizer.apply_chat_template(messages, tokenize=tokenize, **kwargs)
    return list(result["input_ids"]) if tokenize else result
