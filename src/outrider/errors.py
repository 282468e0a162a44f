"""Every error a user can cause, in one tree.

    OutriderError
    ├── UserError                 what was given cannot be used; the CLI exits with 2
    │   ├── ModelError            unknown, missing or unsupported model
    │   ├── TokenizerMismatch     drafts, tokenizer and target do not share a vocabulary
    │   ├── PromptError           empty prompt, ids out of range
    │   │   └── PromptTooLong     a prompt that leaves no room in the context
    │   ├── SamplingError         a sampling parameter out of its range
    │   ├── TableError            a draft table, or the corpus for one, that cannot be used
    │   ├── DataError             training data, features or a checkpoint that cannot be used
    │   └── ConfigError           unknown key or value in a configuration
    ├── TrainingError             a run that cannot go on, or is resumed with another recipe
    ├── SourceError               a draft source raised, or answered what is no draft
    ├── MissingDependency         an optional package is not installed
    └── KVFull                    no free KV page; the scheduler answers it by preemption

Each message names what was given and what was expected. A broken invariant is an
``AssertionError``, never one of these.
"""


class OutriderError(Exception):
    """Base of everything outrider raises on purpose."""


class UserError(OutriderError, ValueError):
    """What the user gave cannot be used."""


class ModelError(UserError):
    """The model is unknown, missing or cannot be run exactly."""


class TokenizerMismatch(UserError):
    """A source of drafts or a tokenizer does not share the vocabulary of the target."""


class PromptError(UserError):
    """The prompt is empty, beyond the context, or holds ids outside the vocabulary."""


class PromptTooLong(PromptError):
    """The prompt leaves no room in context and KV cache for an output."""


class SamplingError(UserError):
    """A sampling parameter is out of its range."""


class TableError(UserError):
    """A draft table is missing, foreign or damaged, or cannot be built or written."""


class DataError(UserError):
    """Training data, features or a checkpoint are missing, foreign or damaged."""


class ConfigError(UserError):
    """A configuration holds an unknown key or an impossible value."""


class TrainingError(OutriderError):
    """A training run cannot go on; the message names the step and its texts."""


class SourceError(OutriderError):
    """A source of drafts raised, or broke its contract; the message names it."""


class MissingDependency(OutriderError, ImportError):
    """An optional package is not installed; the message holds the command that installs it."""


class KVFull(OutriderError):
    """The KV arena has no free page for the tokens asked for."""
