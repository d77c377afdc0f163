"""The sampler."""

import torch

from minitrain.rollout.sampling import Completion, SamplingParams


class Sampler:
    """`generate` continues prompts with `model`, whose weights it uses in place.

    tokenizer: for stop strings. After the weights have changed, call `refresh`.
    """

    def __init__(self, model, tokenizer=None):
        self.model, self.tokenizer = model, tokenizer

    def refresh(self) -> None:
        """Forget all that was computed with earlier weights."""

    def free(self) -> None:
        """Give the memory of the caches back; the next `generate` allocates it again."""

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[Completion]:
        """The samples of all prompts in order: prompt 0's n samples, prompt 1's, ..."""
        params = params if isinstance(params, list) else [params] * len(prompts)
        requests = [(prompt, p) for prompt, p in zip(prompts, params, strict=True) for _ in range(p.n)]
        return [self._complete(number, *request) for number, request in enumerate(requests)]

    def _complete(self, number: int, prompt: list[int], params: SamplingParams) -> Completion:
        done, limit = Completion([], [], "length"), self.model.config.max_position_embeddings
        generator = torch.Generator().manual_seed(params.seed * 1000003 + number)
        for _ in range(min(params.max_tokens, limit - len(prompt))):
            logits = self.model(torch.tensor([prompt + done.tokens]))[0, -1].float()
            logprobs = (logits / (params.temperature or 1.0)).log_softmax(-1)
            token = logprobs.argmax() if not params.temperature else logprobs.exp().multinomial(1, generator=generator)
            done.tokens.append(int(token))
            done.logprobs.append(logprobs[int(token)].item())
            if done.tokens[-1] in params.stop_tokens:
                done.finish_reason = "stop"
                break
        return done
