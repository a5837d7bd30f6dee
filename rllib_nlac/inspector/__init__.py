"""``rllib inspect``: what a run recorded, as one page to read, or in other programs' formats."""
