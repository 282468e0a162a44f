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
