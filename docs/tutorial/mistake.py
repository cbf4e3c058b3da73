"""segments.py with one mistake: every segment counts its positions from zero."""

import warnings

import segments
import torch


def from_zero(self, tokens):
    return self.words(tokens) + self.places(torch.arange(tokens.shape[1]))


segments.Embedding.forward = from_zero
warnings.showwarning = lambda message, *others: print(message)
segments.main()
