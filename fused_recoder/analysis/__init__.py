"""What recoding does: to single words, to the error signal, to perplexity at inference."""
