"""A language model: a small GPT that generates English text character by character.

    legato fit characters.yaml

The model learns from the documentation that ships with Python. `configure_blocks` lets a pipeline split the model, and
`tensor_plan` lets tensor parallelism shard it. Generated samples are written to TensorBoard.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import legato as lg
from legato.base.errors import TaskError

ALPHABET = "\n" + "".join(map(chr, range(32, 127))) + "\N{REPLACEMENT CHARACTER}"
"""Newline, printable ASCII and one character for all others. Fixed, so that checkpoints work in any Python version."""

_TOKEN_OF = {character: token for token, character in enumerate(ALPHABET)}

Batch = tuple[Tensor, Tensor]
"""Tokens (n, time) and their next tokens (n, time)."""


def encode(text: str) -> Tensor:
    """Return one token per character, (len(text),) int64."""
    unknown = len(ALPHABET) - 1
    return torch.tensor([_TOKEN_OF.get(character, unknown) for character in text], dtype=torch.int64)


def decode(tokens: Tensor) -> str:
    """Return the text for tokens (time,)."""
    return "".join(ALPHABET[token] for token in tokens.tolist())


class CharacterGPT(lg.Task):
    """A decoder-only transformer as in GPT-2 (Radford et al., 2019); about 0.8 million parameters by default.

    `embedding`, `blocks` and `head` are called in sequence, so that a strategy can shard or split the model.
    """

    def __init__(
        self,
        n_layer: int = 4,
        n_head: int = 4,
        n_embd: int = 128,
        block_size: int = 128,
        dropout: float = 0.0,
        lr: float = 4e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 50,
        sample_length: int = 400,
    ) -> None:
        super().__init__()
        if n_embd % n_head:
            raise TaskError(f"n_embd must be a multiple of n_head, not {n_embd} with n_head {n_head}.")
        self.save_hyperparameters()
        self.embedding = Embedding(len(ALPHABET), block_size, n_embd, dropout)
        self.blocks = nn.ModuleList(Block(n_embd, n_head, dropout) for _ in range(n_layer))
        # Not tied to the embedding, so that the first and last blocks can be on different pipeline stages.
        self.head = nn.Sequential(nn.LayerNorm(n_embd), nn.Linear(n_embd, len(ALPHABET), bias=False))
        self._initialize(n_layer, n_embd)

    def _initialize(self, n_layer: int, n_embd: int) -> None:
        """Initialize the weights as in GPT-2, whose standard deviation of 0.02 for width 768 is scaled to the width.

        The deeper the model, the smaller the initial weights of layers that write to the residual stream.
        """
        deviation = 0.02 * math.sqrt(768 / n_embd)
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                layers = 2 * n_layer if name.endswith("into_stream.weight") else 1
                nn.init.normal_(parameter, std=deviation / math.sqrt(layers))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return next-token logits (n, time, characters) for tokens (n, time), where time <= block_size."""
        if tokens.shape[1] > self.hparams.block_size:
            raise TaskError(
                f"The model takes at most {self.hparams.block_size} characters, but the batch has {tokens.shape[1]}: "
                "set block_size to the same number in the task and its data."
            )
        stream = self.embedding(tokens)
        for block in self.blocks:
            stream = block(stream)
        logits: Tensor = self.head(stream)
        return logits

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean cross-entropy in nats per character."""
        tokens, targets = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def configure_blocks(self) -> list[nn.Module]:
        """Return the blocks between which a pipeline may split the model."""
        return [self.embedding, *self.blocks, self.head]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy of the batch."""
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log val/loss in nats and val/bits_per_character."""
        loss = self.loss(batch)
        values = {"val/loss": loss, "val/bits_per_character": loss / math.log(2)}
        self.log_dict(values, prog_bar=True, batch_size=len(batch[0]))

    def on_validation_end(self) -> None:
        """Log a generated sample to TensorBoard."""
        if not self.loggers or self.trainer.sanity_checking:
            return
        # A separate generator, seeded with the step, so that sampling does not change the run's random numbers.
        generator = torch.Generator(self.device).manual_seed(self.global_step)
        # On every rank, since a forward pass with sharded weights is collective. Loggers write only on rank 0.
        sample = self.generate("\n", self.hparams.sample_length, generator)
        for logger in self.loggers:
            logger.log_text("sample", f"```\n{sample}\n```", self.global_step)

    @torch.no_grad()
    def generate(self, prompt: str, length: int, generator: torch.Generator, temperature: float = 0.8) -> str:
        """Return a nonempty `prompt` and `length` more characters. `generator` must be on the task's device."""
        training = self.training
        self.eval()
        tokens = encode(prompt).to(self.device)
        for _ in range(length):
            logits = self(tokens[None, -self.hparams.block_size :])[0, -1].float()
            drawn = torch.multinomial((logits / temperature).softmax(dim=0), 1, generator=generator)
            tokens = torch.cat([tokens, drawn])
        self.train(training)
        return decode(tokens)

    def tensor_plan(self) -> dict[str, str]:
        """Split attention by head, and perceptrons by hidden unit."""
        return {
            "blocks.*.attention.query_key_value": "column",
            "blocks.*.attention.into_stream": "row",
            "blocks.*.perceptron.out_of_stream": "column",
            "blocks.*.perceptron.into_stream": "row",
        }

    def configure_optimizers(self) -> dict[str, Any]:
        """Return AdamW with weight decay only for matrices, linear warmup, and cosine decay to a tenth of `lr`."""
        parameters = list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": self.hparams.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr, betas=(0.9, 0.95))
        warmup: int = self.hparams.warmup_steps
        total = self.trainer.estimated_stepping_batches

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / (warmup + 1)
            progress = min(1.0, (step - warmup) / max(1, total - warmup))
            return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Embedding(nn.Module):
    """Token plus position embeddings: tokens (n, time) -> residual stream (n, time, width)."""

    def __init__(self, vocabulary: int, block_size: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(block_size, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the residual stream (n, time, width)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        stream: Tensor = self.dropout(self.token(tokens) + self.position(places))
        return stream


class Block(nn.Module):
    """One transformer layer: pre-norm attention and perceptron with residual connections."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron = Perceptron(width, dropout)

    def forward(self, stream: Tensor) -> Tensor:
        """Return the residual stream (n, time, width) after this layer."""
        attended: Tensor = stream + self.attention(self.attention_norm(stream))
        output: Tensor = attended + self.perceptron(self.perceptron_norm(attended))
        return output


class Attention(nn.Module):
    """Causal multi-head self-attention.

    The outputs of `query_key_value` are grouped by head, so that tensor parallelism can split them between heads. The
    outputs of `into_stream` are then summed across processes.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width = width // heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.into_stream = nn.Linear(width, width)

    def forward(self, stream: Tensor) -> Tensor:
        """Return (n, time, width) for (n, time, width)."""
        packed = self.query_key_value(stream)
        if packed.shape[2] % (3 * self.head_width):
            raise TaskError(
                f"n_head must be a multiple of the tensor-parallel process count: got {packed.shape[2]} features of "
                f"queries, keys and values, {3 * self.head_width} per head. Choose another n_head, or fewer processes."
            )
        packed = packed.unflatten(2, (-1, 3, self.head_width))  # (n, time, heads, 3, width of a head)
        query, key, value = packed.permute(3, 0, 2, 1, 4)  # each (n, heads, time, width of a head)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        output: Tensor = self.into_stream(mixed.transpose(1, 2).flatten(2))
        return F.dropout(output, self.dropout, self.training)


class Perceptron(nn.Module):
    """Linear layers that expand to four times the width and back, with a GELU in between."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.out_of_stream = nn.Linear(width, 4 * width)
        self.into_stream = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, stream: Tensor) -> Tensor:
        """Return (n, time, width) for (n, time, width)."""
        output: Tensor = self.dropout(self.into_stream(F.gelu(self.out_of_stream(stream))))
        return output


class PydocText(lg.DataModule):
    """The English text that ships with CPython as `pydoc_data.topics` (about half a million characters).

    The first nine tenths are used for training, with a sample starting at every character. The rest is used for
    validation, in windows that don't overlap. The text differs between Python versions, so only compare losses from the
    same version.
    """

    def __init__(self, block_size: int = 128, batch_size: int = 16, num_workers: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.parts: dict[str, Windows] = {}

    def setup(self, stage: str) -> None:
        """Encode the text and split it into training and validation parts."""
        if self.parts:
            return
        from pydoc_data.topics import topics

        tokens = encode("\n".join(topics[name] for name in sorted(topics)))
        cut, size = len(tokens) * 9 // 10, self.hparams.block_size
        self.parts = {"train": Windows(tokens[:cut], size, stride=1), "val": Windows(tokens[cut:], size, stride=size)}

    def train_dataloader(self) -> DataLoader[Any]:
        """Load windows that start at every character, shuffled."""
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Load windows that do not overlap."""
        return self._loader("val")

    def _loader(self, split: str, shuffle: bool = False) -> DataLoader[Any]:
        size, workers = self.hparams.batch_size, self.hparams.num_workers
        return DataLoader(self.parts[split], size, shuffle=shuffle, num_workers=workers)


class Windows(Dataset[Batch]):
    """Windows of `size` tokens, each with the tokens that follow. There is one window for every `stride` tokens."""

    def __init__(self, tokens: Tensor, size: int, stride: int) -> None:
        self.tokens = tokens
        self.size = size
        self.stride = stride

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - self.size - 1) // self.stride + 1)

    def __getitem__(self, index: int) -> Batch:
        window = self.tokens[index * self.stride :][: self.size + 1]
        return window[:-1], window[1:]
