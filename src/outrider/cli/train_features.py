"""`outrider train features`: keep what the target computes on the texts."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.interrupts import going_on
from outrider.cli.train_options import (
    TargetOptions,
    about,
    bar,
    check_layers,
    layer_numbers,
)
from outrider.errors import DataError

GB = 1e9


def features(
    target: TargetOptions,
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="Directory that `outrider train data` wrote.")
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Directory to write; one that is there goes on.")
    ],
    layers: Annotated[
        str,
        typer.Option(
            help="Layers whose outputs are kept, -1 for the embedding, as 1,8,14,20,27: all that "
            "the recipes read which are to be trained."
        ),
    ],
) -> None:
    """Run the target over all texts once, so that training need not."""
    from outrider.cli.console import messages
    from outrider.training.dataset import Data, check_target
    from outrider.training.features import (
        about_features,
        check_layout,
        feature_reader,
        open_features,
        shards_to_do,
        write_features,
    )
    from outrider.training.hold import held

    numbers = layer_numbers(layers)
    texts = Data(data)
    threads = target.set_threads()
    loaded = target.find()
    check_layout(loaded)
    check_target(texts, loaded)
    check_layers(numbers, loaded)
    width = loaded.config["hidden_size"]
    header = about_features(loaded, numbers) | {"provenance": about(threads)}
    with going_on(), held(output):
        open_features(output, texts, header)
        todo = sum(len(shard.token_ids) for shard in shards_to_do(output, texts))
        _check_room(output, todo, texts.num_tokens, len(numbers), width)
        reader = feature_reader(loaded, numbers)
        with bar("features", texts.num_tokens, texts.num_tokens - todo) as advance:
            for count in write_features(reader, texts, output):
                advance(count)
    messages().print(f"features of {texts.num_tokens:,} tokens: {output}", soft_wrap=True)


def _check_room(directory: Path, todo: int, total: int, num_layers: int, width: int) -> None:
    """Say how much it will be, and refuse what the disk has no room for."""
    from outrider.cli.console import messages
    from outrider.training.features import bytes_per_token

    each = bytes_per_token(num_layers, width)
    free = shutil.disk_usage(directory).free
    messages().print(
        f"{each:,} bytes per token, {total:,} tokens: {each * total / GB:.2f} GB, of which "
        f"{each * todo / GB:.2f} GB are to be written; {free / GB:.1f} GB are free",
        soft_wrap=True,
    )
    if each * todo > free:
        raise DataError(
            f"the disk of {directory} has {free / GB:.2f} GB free, {each * todo / GB:.2f} GB are "
            "needed: name fewer layers, or train without features on disk"
        )
