"""Small models with a batch each, as users write them; nothing in them knows of devices.

Sizes are odd on purpose, so that tiles are uneven: a vocabulary of 37, three heads, a batch of
five, seven tokens, and labels that the loss ignores.
"""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, BATCH, LENGTH = 37, 5, 7


def gpt2(*, layers=1, dropout=0.1, hidden=30, heads=3, batch=BATCH, length=LENGTH):
    """Hugging Face's GPT-2: fused QKV, tied embeddings, dropout; its loss is in float32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=length,
        n_layer=layers,
        n_embd=hidden,
        n_head=heads,
        bos_token_id=0,
        eos_token_id=0,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
    )
    return GPT2LMHeadModel(config), _tokens(batch, length)


def llama(*, layers=1, batch=BATCH, length=LENGTH):
    """Hugging Face's Llama: two queries to each of three key-value heads, rotary positions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        num_hidden_layers=layers,
        hidden_size=24,
        intermediate_size=21,
        num_attention_heads=6,
        num_key_value_heads=3,
    )
    return LlamaForCausalLM(config), _tokens(batch, length)


def _tokens(batch, length):
    ids = _integers(VOCABULARY, batch, length)
    labels = ids.clone()
    labels[0, : length - 2] = -100  # the first sample has few labels, so means are uneven
    return {"input_ids": ids, "labels": labels}


# Batches have values also where a model is made on the meta device.


def _integers(below, *shape):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(below, shape, generator=generator, device="cpu")


def _numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), device="cpu")


class OwnLoss(nn.Module):
    """A language model with its loss computed in the precision of its logits."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, labels):
        logits = self.model(input_ids=input_ids).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class VGG(nn.Module):
    """Convolutions, ReLU in place, pools, dropout and linear layers, with its loss."""

    def __init__(self, channels, norm):
        super().__init__()
        first, second = channels
        self.features = nn.Sequential(
            nn.Conv2d(3, first, 3, padding=1),
            *([nn.BatchNorm2d(first)] if norm else []),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 3),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d((2, 2)),
        )
        self.classifier = nn.Sequential(
            nn.Dropout(),
            nn.Linear(4 * second, 15),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(15, 11),
        )

    def forward(self, images, classes):
        scores = self.classifier(torch.flatten(self.features(images), 1))
        return F.cross_entropy(scores, classes)


def cnn(*, channels=(7, 9), norm=False, batch=BATCH):
    torch.manual_seed(0)
    classes = _integers(11, batch)
    classes[1] = -100
    return VGG(channels, norm), {"images": _numbers(batch, 3, 12, 12), "classes": classes}


class MeanSquare(nn.Module):
    """The mean of the squares of what `inner` returns, as a loss."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x).square().mean()


class MLP(nn.Module):
    """Two layers and a mean squared error; keeps a running mean of what it hides."""

    def __init__(self, hidden=11):
        super().__init__()
        self.up = nn.Linear(6, hidden)
        self.down = nn.Linear(hidden, 3, bias=False)
        self.register_buffer("running", torch.zeros(hidden))

    def forward(self, x, y):
        hidden = torch.tanh(self.up(x))
        self.running.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        return F.mse_loss(self.down(hidden), y)


def mlp(*, hidden=11, batch=BATCH):
    torch.manual_seed(0)
    return MLP(hidden), {"x": _numbers(batch, 6), "y": _numbers(batch, 3).sin()}


class Traps(nn.Module):
    """What a naive parallelizer falls into, in one model."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.places = nn.Embedding(LENGTH, 12)
        self.mix = nn.Linear(12, 12)
        self.head = nn.Linear(12, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(12), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.drop = nn.Dropout(0.3)

    def forward(self, ids, padding, labels):
        places = torch.arange(ids.shape[1], device=ids.device)  # made from nothing
        x = self.embed(ids) + self.places(places)
        one, other = x.view(5, 7, 4, 3), x.view(5, 7, 3, 4)  # 12 = 4·3 = 3·4, of one tensor
        x = (one * 2).flatten(2) + (other.softmax(-1) + 1).flatten(2)
        keep = ~padding[:, None, :, None]  # (batch, 1, time, 1)
        heads = self.mix(x).unflatten(-1, (3, 4)).transpose(1, 2)  # (batch, 3, time, 4)
        heads = torch.where(keep, heads, 0.0)
        first, rest = heads.split([1, 2], 1)  # unequal pieces
        x = torch.cat([rest, first], 1).transpose(1, 2).flatten(2) * self.scale
        x = self.drop(torch.stack(x.unbind(1)[::-1], 1))  # time runs backwards
        x = x - x.mean(-1, keepdim=True)
        lengths = keep.sum((1, 2, 3)).to(x.dtype)  # whole numbers, of a mask
        loss = F.cross_entropy(self.head(x).transpose(1, 2), labels, ignore_index=3)
        return loss + (x.square().sum((1, 2)) / lengths).mean()


def traps():
    torch.manual_seed(0)
    ids = _integers(VOCABULARY, BATCH, LENGTH)
    padding = _numbers(BATCH, LENGTH) < -0.5
    return Traps(), {"ids": ids, "padding": padding, "labels": ids.roll(1, 1) % 7}


class NoLoss(nn.Module):
    """Returns a dict, or a tuple, of tensors, one of them of whole numbers."""

    def __init__(self, as_tuple=False):
        super().__init__()
        self.as_tuple = as_tuple
        self.layer = nn.Linear(6, 9)

    def forward(self, x):
        hidden = self.layer(x)
        scores, best = torch.sigmoid(hidden), hidden.argmax(-1)
        return (scores, best) if self.as_tuple else {"scores": scores, "best": best}


def no_loss(*, as_tuple=False, batch=BATCH):
    torch.manual_seed(0)
    return NoLoss(as_tuple), {"x": _numbers(batch, 6)}


class UNet(nn.Module):
    """Two levels down and up again; what the way down finds skips over to the way up.

    In the middle are so many more convolutions.
    """

    def __init__(self, channels, deeper=0):
        super().__init__()
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())
            for i, o in ((3, channels), (channels, channels + 1))
        )
        self.middle = nn.Conv2d(channels + 1, channels + 2, 3, padding=1)
        self.deeper = nn.ModuleList(
            nn.Conv2d(channels + 2, channels + 2, 3, padding=1) for _ in range(deeper)
        )
        self.up = nn.ModuleList(
            nn.Conv2d(i, o, 3, padding=1)
            for i, o in ((2 * channels + 3, channels), (2 * channels, 2))
        )

    def forward(self, images, masks):
        x, skips = images, []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = F.relu(self.middle(x))
        for convolution in self.deeper:
            x = F.relu(convolution(x))
        for up in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = up(torch.cat([x, skips.pop()], 1))
        return F.cross_entropy(x, masks)


def unet(*, channels=5, batch=3, deeper=0):
    torch.manual_seed(0)
    return UNet(channels, deeper), {
        "images": _numbers(batch, 3, 8, 12),
        "masks": _integers(2, batch, 8, 12),
    }


EXAMPLES = {"gpt2": gpt2, "llama": llama, "cnn": cnn, "mlp": mlp}


def double(model, batch):
    """The same model and batch in float64."""
    wide = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    return model.double(), wide


class MadeTensors(nn.Module):
    """Rotates by complex numbers, sorts, and makes tensors in the size of its batch."""

    def __init__(self, width=8):
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, wanted):
        size, length, width = x.shape
        pairs = torch.view_as_complex(self.up(x).reshape(size, length, -1, 2))
        places = torch.arange(length, dtype=x.dtype)[:, None] * torch.arange(width // 2)
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(places), places)).flatten(2)
        hidden = torch.cat([x.new_zeros(size, 1, width), turned], 1)[:, :-1]
        written = x.new_empty(size, length, width)
        written[..., : width // 2] = hidden[..., width // 2 :]
        # Slices that overlap stay assignments (`tracing/rewrites/joined_slices.py`).
        written[..., width // 2 - 1 :] = x.new_full((size, length, width // 2 + 1), 0.5)
        state = torch.zeros(size, width, dtype=x.dtype)
        for step in range(2):
            state = torch.tanh(self.down(state) + written[:, step])
        numbers = torch.arange(size, dtype=x.dtype)[:, None, None] / size
        ranked = hidden.sort(1).values + hidden.topk(width, -1).values * numbers
        mask = torch.ones(size, length, dtype=torch.bool).tril()
        ranked = ranked.masked_fill(~mask[..., None], 0.0) + state[:, None]
        return F.mse_loss(ranked, wanted)


def made_tensors(batch=4, length=5, width=8):
    """A model whose batch comes in parts although tensors of its size are made inside."""
    torch.manual_seed(0)
    sizes = (batch, length, width)
    return MadeTensors(width), {"x": torch.randn(sizes), "wanted": torch.randn(sizes)}


def small_llama(layers, hidden, heads, rows, length):
    """A Llama that returns its loss, and a batch of `rows` of `length` tokens; in float64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, max_position_embeddings=32, num_hidden_layers=layers, hidden_size=hidden,
        intermediate_size=24, num_attention_heads=heads, num_key_value_heads=2,
    )  # fmt: skip
    ids = torch.randint(40, (rows, length), generator=torch.Generator().manual_seed(1))
    return double(OwnLoss(LlamaForCausalLM(config)), {"input_ids": ids, "labels": ids.clone()})
