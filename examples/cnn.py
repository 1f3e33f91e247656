"""A small residual network that tells squares, discs, crosses and rings apart in noisy images.

    zeroir compile examples/cnn.py -o build/cnn.zir
    zeroir run build/cnn.zir --nproc 2 --steps 100 --eval-every 50

It shows what the GPT has not: running statistics (batch norm), a data set with random transformations
behind a `ResumableLoader`, a loss and an accuracy that `loss` computes, and the batches of an
evaluation. The images are drawn, so there is nothing to download.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import zeroir

CLASSES = 4
SIDE = 24
BATCH = 32
WIDTHS = (16, 32, 64)
SAMPLES = 4096
EVAL_SAMPLES = 128  # of a rank
NOISE = 0.3

Batch = tuple[Tensor, Tensor]


class Shapes(Dataset[Batch]):
    """Grey images with one shape each; image and class depend on the number of the sample alone."""

    def __init__(self, first: int, samples: int, *, is_augmented: bool) -> None:
        self.first = first
        self.samples = samples
        self.is_augmented = is_augmented

    def __len__(self) -> int:
        """Return the number of images."""
        return self.samples

    def __getitem__(self, index: int) -> Batch:
        """Return the image, (1, SIDE, SIDE), and its class, ()."""
        generator = torch.Generator().manual_seed(self.first + index)
        label = index % CLASSES
        size = 4 + 3 * torch.rand((), generator=generator)
        centre = size + (SIDE - 1 - 2 * size) * torch.rand(2, generator=generator)
        y, x = torch.meshgrid(*(torch.arange(SIDE) - place for place in centre), indexing="ij")
        shape = draw(label, y, x, size).float()
        image = shape + NOISE * torch.randn(SIDE, SIDE, generator=generator)
        # The loader seeds torch's global generator for each sample, so a resumed run flips the same images.
        if self.is_augmented and torch.rand(()) < 0.5:
            image = image.flip(1)
        return image[None], torch.tensor(label)


def draw(label: int, y: Tensor, x: Tensor, size: Tensor) -> Tensor:
    """Return the pixels of a shape, by their distances from its centre."""
    match label:
        case 0:
            return torch.maximum(x.abs(), y.abs()) < 0.8 * size  # a square
        case 1:
            return x.square() + y.square() < size.square()  # a disc
        case 2:
            cross = torch.minimum(x.abs(), y.abs()) < 0.3 * size
            return cross & (torch.maximum(x.abs(), y.abs()) < size)
        case _:
            return ((x.square() + y.square()).sqrt() - 0.8 * size).abs() < 0.25 * size  # a ring


class Residual(nn.Module):
    """Two convolutions beside a shortcut, which halves the image where the number of channels changes."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        stride = 1 if channels_in == channels else 2
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Conv2d(channels_in, channels, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, channels_in, height, width) to (batch, channels, height / stride, width / stride)."""
        hidden = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


class Net(nn.Module):
    """A stem, three residual blocks and a linear head over the mean of all places."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, WIDTHS[0], 3, padding=1)
        pairs = zip((WIDTHS[0], *WIDTHS[:-1]), WIDTHS, strict=True)
        self.blocks = nn.Sequential(*(Residual(before, after) for before, after in pairs))
        self.head = nn.Linear(WIDTHS[-1], CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images: from (batch, 1, SIDE, SIDE) to (batch, CLASSES)."""
        logits: Tensor = self.head(self.blocks(F.relu(self.stem(images))).mean(dim=(2, 3)))
        return logits


def model() -> nn.Module:
    """Build the model; its own constructors give the first values."""
    return Net()


def loss(net: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean cross-entropy, and the share of images that are told right as an output of evaluations."""
    images, labels = batch
    logits = net(images)
    return F.cross_entropy(logits, labels), {"right": (logits.argmax(1) == labels).float().mean()}


def batch() -> Batch:
    """One rank's micro-batch by shape and type."""
    return torch.zeros(BATCH, 1, SIDE, SIDE), torch.zeros(BATCH, dtype=torch.int64)


def batches(rank: int, world_size: int, seed: int) -> zeroir.ResumableLoader[Batch]:
    """Return the images to train on, in an order that any number of ranks can resume."""
    images = Shapes(0, SAMPLES, is_augmented=True)
    return zeroir.ResumableLoader(
        images, batch_size=BATCH, rank=rank, world_size=world_size, seed=seed
    )


def eval_batches(rank: int, _world_size: int, _seed: int) -> DataLoader[Batch]:
    """Other images, and the same number of batches on every rank."""
    images = Shapes(SAMPLES + rank * EVAL_SAMPLES, EVAL_SAMPLES, is_augmented=False)
    return DataLoader(images, batch_size=BATCH, drop_last=True)
