"""Fine-tuning a causal language model from the Hub: packed documents, LoRA, FSDP and a folder for `from_pretrained`.

    legato fit finetune.yaml                                        a tiny Llama learns to add; no downloads
    legato fit finetune.yaml trainer.devices=2 trainer.strategy=fsdp
    legato fit finetune.yaml task.model=PATH task.lora_rank=16 data.file=pairs.jsonl
    legato export runs/finetune/version_0 tuned --format hf         or use pretrained/ in the run directory

This example requires `pip install transformers peft`. For an explanation, see docs/how-to/fine-tuning.md.
"""

import json
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorWithFlattening, LlamaConfig
from transformers import PreTrainedTokenizerFast as FastTokenizer
from transformers import get_cosine_schedule_with_warmup as cosine_with_warmup

import legato as lg

NO_LOSS = -100


class FineTuning(lg.Task):
    def __init__(
        self, model=None, lora_rank=0, lora_modules="all-linear", adapter=None, lr=3e-3, warmup=20, prompt="2+3="
    ):
        """`model`: a folder or a model name on the Hub. `adapter`: a LoRA adapter to continue training."""
        super().__init__()
        self.save_hyperparameters()
        self.tokenizer = make_tokenizer(model)  # an export saves it beside the model

    def configure_model(self):  # in each process: weights created in __init__ would be sent to all processes
        if not hasattr(self, "model"):
            self.model = self.make_model(**self.hparams)

    def make_model(self, model, lora_rank, lora_modules, adapter, **_):
        if model is None:
            sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
            net = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=len(self.tokenizer), **sizes))
        else:  # in float32, since bfloat16 loses small updates; `precision` selects the dtype for computation
            net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        if adapter is not None:
            return PeftModel.from_pretrained(net, adapter, is_trainable=True)
        lora = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules=lora_modules, task_type="CAUSAL_LM")
        return get_peft_model(net, lora) if lora_rank else net

    def step(self, batch, name):
        # position_ids tell the model where documents begin, unless there is a cache or a mask
        loss = self.model(**batch, use_cache=False).loss
        tokens = (batch["labels"][:, 1:] != NO_LOSS).sum()
        self.log(name, loss, prog_bar=True, batch_size=tokens)
        return {"loss": loss, "weight": tokens}  # the gradient is the mean over all tokens in the step

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train/loss")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val/loss")

    def forward(self, **inputs):
        return self.model.generate(**inputs, max_new_tokens=16, do_sample=False)

    def on_validation_epoch_end(self):  # on every process, since under fsdp each one holds only part of the weights
        inputs = self.tokenizer(self.hparams.prompt, return_tensors="pt", return_token_type_ids=False)
        text = self.tokenizer.decode(self(**inputs.to(self.device))[0], skip_special_tokens=True)
        for logger in self.loggers:
            logger.log_text("val/sample", text, self.global_step)

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.hparams.lr, weight_decay=0.01)
        steps = self.trainer.estimated_stepping_batches
        schedule = cosine_with_warmup(optimizer, self.hparams.warmup, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Documents(lg.DataModule):
    """Prompts and answers from a JSON Lines file, or generated sums. Every tenth document is used for validation."""

    def __init__(self, model=None, file=None, length=64, batch_size=64):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        lines = Path(self.hparams.file).read_text(encoding="utf-8").splitlines() if self.hparams.file else []
        sums = [{"prompt": f"{a}+{b}=", "answer": f"{a + b}"} for a in range(40) for b in range(40)]
        tokenizer = make_tokenizer(self.hparams.model)
        pairs = [json.loads(line) for line in lines] or sums
        self.documents = [encode(tokenizer, self.hparams.length, **pair) for pair in pairs]

    def train_dataloader(self):
        documents = [document for index, document in enumerate(self.documents) if index % 10]
        return DataLoader(documents, self.hparams.batch_size, shuffle=True, collate_fn=DataCollatorWithFlattening())

    def val_dataloader(self):
        return DataLoader(self.documents[::10], self.hparams.batch_size, collate_fn=DataCollatorWithFlattening())


def encode(tokenizer, length, prompt, answer):
    """Return at most `length` tokens of a document. The loss covers only the tokens of the answer."""
    first = tokenizer(prompt).input_ids
    rest = tokenizer(answer + tokenizer.eos_token, add_special_tokens=False).input_ids
    return {"input_ids": (first + rest)[:length], "labels": ([NO_LOSS] * len(first) + rest)[:length]}


def make_tokenizer(model):
    if model is not None:
        return AutoTokenizer.from_pretrained(model)
    words = {word: number for number, word in enumerate(["<end>", *"0123456789+="])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return FastTokenizer(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
