"""What a drafter is: the one configuration all algorithms, file formats and kernels share."""

import sys
from dataclasses import asdict, dataclass, fields
from typing import Any

from outrider.checks import INT32_MAX, boolean, integer, number, shown
from outrider.errors import ConfigError

MARKOV_HEADS = ("vanilla", "gated", "rnn")
MAY_BE_ZERO = {"target_num_layers", "markov_rank"}
SMALL = {"num_layers", "num_draft_tokens", "num_modules", "head_dim"}
MOST = 1024  # of these, so that a damaged file is refused before millions of modules are made


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Shape of one drafter. Layer ids are 0-based and name the layer whose OUTPUT is read.

    Raises:
        ConfigError: fields that do not fit together; the message names them.
    """

    algorithm: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # of the target
    draft_vocab_size: int  # tokens the drafter can name; equal to vocab_size: all
    num_draft_tokens: int  # most tokens per draft that it was trained for
    target_hidden_size: int
    target_num_layers: int  # 0: not known
    target_layer_ids: tuple[int, ...] = ()  # -1 = embedding
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    max_position: int = 8192
    qk_norm: bool = False  # RMSNorm on every query and key head, as in Qwen3
    mask_token_id: int | None = None
    norm_before_residual: bool = False  # eagle3: the residual starts from the normed features
    norm_before_fc: bool = False  # eagle3: features are normed before they are fused
    num_modules: int = 1  # mtp: modules in sequence; 1 is used again and again
    markov_rank: int = 0  # dspark; 0: no sequential head
    markov_head: str = "vanilla"
    confidence_head: bool = False
    confidence_sees_token: bool = True  # the head also reads the embedding of the token before

    def __post_init__(self) -> None:
        self._check_kinds()
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigError(
                f"draft_vocab_size {self.draft_vocab_size} is larger than the target's "
                f"vocabulary of {self.vocab_size}"
            )
        known = self.target_num_layers or max(self.target_layer_ids, default=0) + 1
        wrong = [i for i in self.target_layer_ids if not -1 <= i < known]
        if wrong:
            raise ConfigError(f"target_layer_ids must be from -1 to {known - 1}, got {wrong}")
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(
                f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}"
            )
        if 1 < self.num_modules < self.num_draft_tokens:
            raise ConfigError(
                f"num_modules is {self.num_modules}: expected 1, used again and again, or one for "
                f"each of the {self.num_draft_tokens} draft tokens"
            )
        if self.markov_head not in MARKOV_HEADS:
            raise ConfigError(
                f"markov_head must be one of {list(MARKOV_HEADS)}, got {shown(self.markov_head)}"
            )

    def _check_kinds(self) -> None:
        """Each field by itself: files and recipes may hold anything."""
        for each in fields(self):
            name, value = each.name, getattr(self, each.name)
            if each.type is int:
                most = MOST if name in SMALL else INT32_MAX
                integer(name, value, 0 if name in MAY_BE_ZERO else 1, most)
            elif each.type is float:
                value = number(name, value, 0.0, sys.float_info.max, open_low=True)
                object.__setattr__(self, name, value)
            elif each.type is bool:
                boolean(name, value)
            elif each.type is str and not isinstance(value, str):
                raise ConfigError(f"{name} must be a string, got {shown(value)}")
        for layer in self.target_layer_ids:
            integer("a layer of target_layer_ids", layer, -1)
        if self.mask_token_id is not None:
            integer("mask_token_id", self.mask_token_id, 0)
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even, for rotary positions, got {self.head_dim}")

    @property
    def feature_size(self) -> int:
        """Width of the target features of one token."""
        return len(self.target_layer_ids) * self.target_hidden_size

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "target_layer_ids": list(self.target_layer_ids)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "DrafterConfig":
        """The reverse of `as_json`.

        Raises:
            ConfigError: an unknown or a missing field.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ConfigError(f"unknown fields of a drafter {unknown}, known are {sorted(known)}")
        try:
            return cls(**{**data, "target_layer_ids": tuple(data.get("target_layer_ids", ()))})
        except TypeError as error:
            raise ConfigError(f"the configuration of a drafter is incomplete: {error}") from None
