"""The decoder that most people use today, to compare with: soft attention as the common PyTorch ports arrange it.

Written for this comparison from a description of those ports, and no slower than they are:

- captions are sorted by length, and a row leaves the batch when its caption has ended;
- at every step the annotations of the rows that are left are projected again, and the context is formed by multiplying
  and summing over locations;
- the gate is as wide as the context, the LSTM cell reads [embedding; gated context] concatenated, and the words are
  predicted inside the loop from h alone;
- the loss is the cross entropy over packed words plus the mean of (1 - sum_t alpha_ti)^2, and gradients are clamped;
- beam search takes one image at a time, with K copies of its annotations, and continues with the beams that are alive.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from captioning.vocabulary import END, START


class PortOutput(NamedTuple):
    """Teacher forcing over B captions in the order of ``order``, longest first; zeros after a caption's end.

    Attributes:
        logits: (B, T, V).
        alphas: (B, T, L).
        lengths: Steps of each caption, <end> counted.
        order: (B,) int64; row i has the caption ``order[i]`` of the arguments.
    """

    logits: Tensor
    alphas: Tensor
    lengths: list[int]
    order: Tensor


class CommonPort(nn.Module):
    """Soft attention, LSTM and output layer; letters as in the package (D, A, E, H, V)."""

    def __init__(
        self,
        *,
        vocabulary_size: int,
        annotation_dim: int,
        attention_dim: int = 512,
        embedding_dim: int = 512,
        hidden_dim: int = 512,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.annotation_projection = nn.Linear(annotation_dim, attention_dim)
        self.query_projection = nn.Linear(hidden_dim, attention_dim)
        self.score = nn.Linear(attention_dim, 1)
        self.embedding = nn.Embedding(vocabulary_size, embedding_dim)
        self.cell = nn.LSTMCell(embedding_dim + annotation_dim, hidden_dim)
        self.init_h = nn.Linear(annotation_dim, hidden_dim)
        self.init_c = nn.Linear(annotation_dim, hidden_dim)
        self.gate = nn.Linear(hidden_dim, annotation_dim)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(hidden_dim, vocabulary_size)
        for layer in (self.embedding, self.output):
            nn.init.uniform_(layer.weight, -0.1, 0.1)
        nn.init.zeros_(self.output.bias)

    def attend(self, annotations: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Return the context (B, D) and alphas (B, L) of annotations (B, L, D) and hidden states (B, H)."""
        projected = self.annotation_projection(annotations)  # (B, L, A), again at every step
        query = self.query_projection(h).unsqueeze(1)
        alphas = self.score(torch.relu(projected + query)).squeeze(2).softmax(dim=1)
        return (annotations * alphas.unsqueeze(2)).sum(dim=1), alphas

    def start(self, annotations: Tensor) -> tuple[Tensor, Tensor]:
        """Return h_0 and c_0, (B, H)."""
        mean = annotations.mean(dim=1)
        return self.init_h(mean), self.init_c(mean)

    def step(
        self, embedded: Tensor, annotations: Tensor, h: Tensor, c: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return logits (B, V), h, c and alphas (B, L) after reading the embedded words (B, E)."""
        context, alphas = self.attend(annotations, h)
        context = torch.sigmoid(self.gate(h)) * context
        h, c = self.cell(torch.cat([embedded, context], dim=1), (h, c))
        return self.output(self.dropout(h)), h, c, alphas

    def forward(self, annotations: Tensor, captions: Tensor, lengths: Tensor) -> PortOutput:
        """Predict every word from the true words before it.

        Args:
            annotations: (B, L, D), those of each caption's image.
            captions: (B, T+1) int64, ``<start> w_1 .. <end> <pad> ..``.
            lengths: (B,) int64, words and <end>.
        """
        lengths, order = lengths.sort(descending=True)
        annotations, captions = annotations[order], captions[order]
        steps = lengths.tolist()
        B, T = len(steps), steps[0]
        embedded = self.embedding(captions)
        h, c = self.start(annotations)
        logits = annotations.new_zeros(B, T, self.output.out_features)
        alphas = annotations.new_zeros(B, T, annotations.shape[1])
        for t in range(T):
            rows = sum(length > t for length in steps)
            step_logits, h, c, alpha = self.step(embedded[:rows, t], annotations[:rows], h[:rows], c[:rows])
            logits[:rows, t] = step_logits
            alphas[:rows, t] = alpha
        return PortOutput(logits, alphas, steps, order)


def port_loss(output: PortOutput, captions: Tensor) -> Tensor:
    """Return the mean cross entropy over words plus the mean of (1 - sum_t alpha_ti)^2 over captions and locations."""
    targets = captions[output.order, 1:]
    packed_logits = pack_padded_sequence(output.logits, output.lengths, batch_first=True).data
    packed_targets = pack_padded_sequence(targets, output.lengths, batch_first=True).data
    penalty = ((1.0 - output.alphas.sum(dim=1)) ** 2).mean()
    return nn.functional.cross_entropy(packed_logits, packed_targets) + penalty


def port_training_step(
    model: CommonPort, optimizer: torch.optim.Optimizer, annotations: Tensor, captions: Tensor, lengths: Tensor
) -> Tensor:
    """Forward, backward, gradients clamped to [-5, 5], one update; return the loss before the update."""
    loss = port_loss(model(annotations, captions, lengths), captions)
    optimizer.zero_grad()
    loss.backward()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.clamp_(-5.0, 5.0)
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def port_beam_search(
    model: CommonPort, annotations: Tensor, *, beam_size: int, max_length: int = 50, ends_after: int | None = None
) -> tuple[list[int], Tensor]:
    """Search the caption of one image.

    Args:
        annotations: (1, L, D).
        beam_size: K.
        max_length: Largest number of steps.
        ends_after: Number of words before which <end> is impossible and after which it is certain. None leaves the
            length to the model.

    Returns:
        The best caption's word ids without <start> and <end>, and its alphas (words and <end>, L).
    """
    K, L = beam_size, annotations.shape[1]
    device = annotations.device
    annotations = annotations.expand(K, -1, -1).contiguous()
    words = torch.full((K, 1), START, device=device)
    seen_alphas = torch.ones(K, 1, L, device=device)
    log_prob = torch.zeros(K, 1, device=device)
    finished: list[tuple[float, list[int], Tensor]] = []
    h, c = model.start(annotations)
    for t in range(max_length):
        logits, h, c, alphas = model.step(model.embedding(words[:, -1]), annotations, h, c)
        log_probs = logits.log_softmax(dim=1)
        if ends_after is not None:
            log_probs[:, END] = 0.0 if t >= ends_after else float("-inf")
        path_log_probs = log_prob + log_probs  # (K, V)
        V = path_log_probs.shape[1]
        best, index = (path_log_probs[0] if t == 0 else path_log_probs.view(-1)).topk(K - len(finished))
        parent, word = index // V, index % V
        words = torch.cat([words[parent], word.unsqueeze(1)], dim=1)
        seen_alphas = torch.cat([seen_alphas[parent], alphas[parent].unsqueeze(1)], dim=1)
        ended = [beam for beam, last in enumerate(word.tolist()) if last == END]
        alive = [beam for beam in range(len(word)) if beam not in set(ended)]
        finished += [(float(best[beam]), words[beam].tolist(), seen_alphas[beam]) for beam in ended]
        if not alive or len(finished) >= K:
            break
        words, seen_alphas, log_prob = words[alive], seen_alphas[alive], best[alive].unsqueeze(1)
        survivors = parent[alive]
        h, c, annotations = h[survivors], c[survivors], annotations[survivors]
    if not finished:
        finished = [(float(log_prob[0]), words[0].tolist(), seen_alphas[0])]
    _, ids, alphas = max(finished, key=lambda caption: caption[0])
    return [i for i in ids if i not in (START, END)], alphas[1:]
