"""The identity of the waterfall, whatever the index believed."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.accounts.record import PromptTokens
from gateway.accounts.waterfall import waterfall

tokens = st.integers(0, 5000)


@settings(deadline=None)
@given(st.builds(PromptTokens, tokens, tokens, tokens, tokens, tokens, tokens))
def test_steps_add_up_and_none_is_negative(prompt: PromptTokens) -> None:
    """Also with an index that is behind, ahead, or renders differently."""
    steps = waterfall(prompt)
    lost = (steps.never_seen, steps.evicted, steps.elsewhere, steps.not_delivered)
    assert min(*lost, steps.uncached, steps.unpredicted) >= 0
    assert sum(lost) + steps.device + steps.memory == steps.total
    assert sum(lost) == steps.uncached
    assert steps.delivered == prompt.delivered
