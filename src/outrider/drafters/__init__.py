"""Draft networks: small modules that training and drafting share."""

from outrider.checks import shown
from outrider.drafters.base import Drafter
from outrider.drafters.config import DrafterConfig
from outrider.drafters.dflash import DFlash
from outrider.drafters.dspark import DSpark
from outrider.drafters.eagle3 import Eagle3
from outrider.drafters.medusa import Medusa
from outrider.drafters.mtp import MTP
from outrider.drafters.pard import Pard
from outrider.drafters.peagle import PEagle
from outrider.errors import ConfigError

ALGORITHMS: dict[str, type[Drafter]] = {
    "eagle3": Eagle3,
    "peagle": PEagle,
    "dflash": DFlash,
    "dspark": DSpark,
    "mtp": MTP,
    "medusa": Medusa,
    "pard": Pard,
}


def make_drafter(config: DrafterConfig) -> Drafter:
    """A drafter of this configuration with fresh parameters.

    Raises:
        ConfigError: no such algorithm.
    """
    if config.algorithm not in ALGORITHMS:
        raise ConfigError(
            f"algorithm must be one of {sorted(ALGORITHMS)}, got {shown(config.algorithm)}"
        )
    return ALGORITHMS[config.algorithm](config)


def check_layers_read(config: DrafterConfig) -> None:
    """Refuse a drafter that is told to read more or fewer layers of its target than its kind does.

    Raises:
        ConfigError: the message says how many it reads.
    """
    kind, layers = ALGORITHMS.get(config.algorithm), config.target_layer_ids
    if kind is None:
        return  # make_drafter says so
    least, most = kind.layer_ids_range
    if not least <= len(layers) <= most:
        wanted = str(least) if least == most else f"{least} to {most}"
        raise ConfigError(
            f"{config.algorithm} reads {wanted} layers of the target, target_layer_ids "
            f"names {list(layers)}"
        )
