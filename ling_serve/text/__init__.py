"""Text on one side, token ids on the other: tokenizer, chat template, detokeniser, stop strings. No MLX here."""
