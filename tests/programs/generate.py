"""A language model that generates: one forward pass over the prompt, then one for each new token, with a cache."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class TinyLM(nn.Module):
    def __init__(self, vocabulary=64, width=32):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.lm_head = nn.Linear(width, vocabulary)

    def forward(self, input_ids, cache=None):
        q, k, v = self.qkv(self.embed(input_ids)).chunk(3, -1)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
        mask = torch.ones(q.shape[1], k.shape[1], device=q.device).tril(k.shape[1] - q.shape[1])
        scores = (q @ k.transpose(1, 2)).masked_fill(mask == 0, -torch.inf)
        return self.lm_head(scores.softmax(-1) @ v), (k, v)

    @torch.no_grad()
    def generate(self, input_ids, max_new_tokens):
        tokens, cache = input_ids, None
        for _ in range(max_new_tokens):
            logits, cache = self(input_ids, cache)
            input_ids = logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, input_ids], 1)
        return tokens


model = TinyLM().to(device).eval()
for request in range(7):
    prompt = torch.randint(64, (1, 5 + request), device=device)
    print(request, model.generate(prompt, max_new_tokens=4).tolist())
