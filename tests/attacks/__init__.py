"""What the tests attack: hostile texts, rows, programs and damaged checkpoints."""
