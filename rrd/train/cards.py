"""The README beside an adapter: what it is, and how it is used. Every command and program in it runs as it stands."""

from __future__ import annotations

import json

from rrd.models.rwkv7_config import RwkvConfig


def peft_card(base: str) -> str:
    """Of an adapter whose base transformers loads."""
    name = json.dumps(base)
    return f"""{_head(name, "lora, rrd")}
A LoRA adapter trained by rrd. To use it:

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({name})
model = PeftModel.from_pretrained(model, ".")  # this directory
```
"""


def rwkv_card(base: str, config: RwkvConfig) -> str:
    """Of an adapter in PEFT's layout of an RWKV, which transformers does not load."""
    plain = not config.prefix and all(b.kind == "rwkv" for b in config.blocks)
    return f"""{_head(json.dumps(base), "lora, rrd, rwkv")}
A LoRA adapter trained by rrd, in PEFT's layout, of an RWKV model in the names of RWKV's own files. transformers
does not load such a model. To use the adapter, have it merged where it was trained, JOB being the job's name:

```sh
rrd export JOB merged --merged
```

rrd reads the result, as the `model` of a job and in Python:

```python
import torch
from rrd.models import build, load_base

model = build(load_base("merged")).eval()
logits = model(torch.tensor([[1, 2, 3]]))  # [1, 3, vocabulary]
```
{_PACKAGE if plain else ""}
Other tools of RWKV's merge the adapter themselves from `rrd export JOB native --format rwkv`. PEFT puts this
directory on any torch model whose linears are named as in the model's files, such as
`{config.prefix}blocks.0.ffn.key`, by `PeftModel.from_pretrained(model, ".")`.
"""


_PACKAGE = """
So does the `rwkv` package, as .pth:

```python
import os
import torch
from safetensors.torch import load_file

os.environ["RWKV_V7_ON"] = "1"
from rwkv.model import RWKV

torch.save(load_file("merged/model.safetensors"), "merged.pth")
model = RWKV(model="merged", strategy="cpu fp32")
logits, state = model.forward([1, 2, 3], None)  # [vocabulary], after the last token
```
"""


def native_card(base: str, alpha: float, file: str) -> str:
    """Of an adapter in the names of RWKV's own tools."""
    return f"""A LoRA adapter trained by rrd, in the names of RWKV's own tools. Base: {json.dumps(base)}.

To merge it: W + lora_alpha / r * lora_B @ lora_A for each weight W, with lora_alpha = {alpha:g} and r the first
axis of lora_A. Tools that read .pth want it converted:

```python
import torch
from safetensors.torch import load_file

torch.save(load_file("{file}"), "rwkv_lora.pth")
```
"""


def _head(name: str, tags: str) -> str:
    return f"""---
base_model: {name}
library_name: peft
tags: [{tags}]
---
"""
