"""One run: from a recipe, data and a target to a drafter on disk, with everything it left behind.

run.json      what it is a run of; another recipe or other data is refused
log.jsonl     what was reported, a JSON object per line
state.pt      where it goes on; replaced as a whole
curve.png     the log as a picture, with matplotlib
drafter/      the result
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.checkpoints import OURS, load_drafter, save_drafter
from outrider.checkpoints.build import CALIBRATED, tensors_of
from outrider.checkpoints.files import check_replaced
from outrider.drafters import Drafter
from outrider.errors import DataError
from outrider.target.load import LoadedModel, load_model
from outrider.training.batches import AnchorRule, Batches, Place, Shares, places_of, split
from outrider.training.build import build_drafter
from outrider.training.calibrate import Calibration, calibrate
from outrider.training.checkpoint import STATE, load_state, save_state
from outrider.training.dataset import (
    TARGET_ID,
    Data,
    check_target,
    read_header,
    unlike,
    write_header,
)
from outrider.training.evaluate import HeldOut, Judged, judge, summarise
from outrider.training.features import feature_source, target_names
from outrider.training.hold import held
from outrider.training.log import Log
from outrider.training.plot import draw_curve
from outrider.training.recipe import Recipe
from outrider.training.start import Start
from outrider.training.trainer import Report, Trainer
from outrider.training.world import ALONE, StopSignals, World

KIND = "outrider training run"
DRAFTER = "drafter"  # directory in that of the run


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a run reads, and where it writes."""

    data: Path
    directory: Path
    features: Path | None = None  # None: computed on the way
    model: str | None = None
    device: str = "auto"
    init_from: Path | None = None  # a drafter to start from


@dataclass(frozen=True, slots=True)
class Pace:
    """How often a run tells and saves; it changes nothing in what is trained."""

    report_every: int = 20  # steps
    held_out_every: int = 100  # steps
    save_seconds: float = 300.0


@dataclass(slots=True)
class Moment:
    """What there is to tell after one step."""

    step: int
    report: Report | None = None
    held_out: HeldOut | None = None


@dataclass(slots=True)
class Result:
    """How a run ended; None where no held-out text is long enough."""

    drafter: Path
    held_out: HeldOut | None
    calibration: Calibration | None
    curve: Path | None


def drafter_at(path: Path) -> Path:
    """The drafter of a run, or the path as it is, where it is none.

    Raises:
        DataError: the run has not come to its end.
    """
    if not (path / "run.json").exists():
        return path
    if not (path / DRAFTER).exists():
        raise DataError(
            f"{path} is a run that has not ended, expected one with {DRAFTER}/ in it; the command "
            "that began it goes on"
        )
    return path / DRAFTER


@contextmanager
def drafter_held(path: Path) -> Iterator[Path]:
    """`drafter_at`, kept from other commands: with all of its run, where it is in one.

    Raises:
        DataError: as `drafter_at` and `held`; or there is no directory.
    """
    home = next((each for each in (path, path.parent) if (each / "run.json").exists()), path)
    if not home.is_dir():
        raise DataError(f"no drafter at {path}: expected a directory")
    with held(home):
        yield drafter_at(path)


def target_json(loaded: LoadedModel) -> dict[str, Any]:
    """What a drafter says of its target."""
    return {
        "name": loaded.name,
        "fingerprint": None if loaded.tokenizer is None else loaded.tokenizer.fingerprint,
        "vocab_size": loaded.config["vocab_size"],
        "hidden_size": loaded.config["hidden_size"],
        "num_layers": loaded.config["num_hidden_layers"],
        TARGET_ID: loaded.identity,
    }


class Run:
    """A run, new or gone on with.

    Raises:
        DataError: data, features or the directory cannot be used.
        ConfigError: the recipe does not fit the target or the number of processes.
    """

    def __init__(self, recipe: Recipe, inputs: Inputs, world: World = ALONE) -> None:
        self.recipe, self.inputs, self.world = recipe, inputs, world
        self._earlier: list[str] = []  # data that the drafter it starts from was trained on
        self._data = Data(inputs.data)
        self._loaded = load_model(inputs.model, "auto", inputs.device)
        check_target(self._data, self._loaded)
        self._source, count = feature_source(
            self._loaded, self._data, recipe.drafter.target_layer_ids, inputs.features
        )
        places = places_of(self._data, recipe.training.max_length, count)
        train, self._held = split(places, recipe.held_out, recipe.seed)
        self.num_texts = len(train)
        batches = self._batches(train)
        self.steps_per_epoch = batches.steps_per_epoch
        self.trainer = Trainer(
            self._drafter(), recipe, batches, inputs.directory, world.rank, world.size
        )
        self._open(len(places))
        state = load_state(inputs.directory)
        if state is not None:
            self.trainer.load_state(state)
        self._log = Log(inputs.directory, self.trainer.step, world.is_first)

    @property
    def drafter(self) -> Drafter:
        return self.trainer.drafter

    def steps(self, pace: Pace, stop: StopSignals) -> Iterator[Moment]:
        """Train to the end or until `stop` has heard a signal; the state is saved in both cases.

        Raises:
            TrainingError: as `Trainer.advance`; the state that was saved last stays.
        """
        trainer, saved = self.trainer, time.monotonic()
        while trainer.step < trainer.num_steps:
            trainer.advance()
            moment = Moment(trainer.step)
            is_last = trainer.step == trainer.num_steps
            if trainer.step % pace.report_every == 0 or is_last:
                moment.report = trainer.report()
                self._log.add(**asdict(moment.report))
            if trainer.step % pace.held_out_every == 0 and not is_last and self.world.is_first:
                moment.held_out = self._judged()[0]
                if moment.held_out is not None:
                    self._log.add(step=trainer.step, held_out=moment.held_out.as_json())
            stopped = self.world.any(stop.number is not None, self.drafter.d2t.device)
            if is_last or stopped or time.monotonic() - saved > pace.save_seconds:
                self._save()
                saved = time.monotonic()
            yield moment
            if stopped:
                return

    def finished(self) -> Path | None:
        """The drafter, where the directory holds it already: whole, and of these parameters.

        It may have been calibrated anew since, which is to stay.
        """
        path = self.inputs.directory / DRAFTER
        try:
            loaded = load_drafter(path)
        except DataError:
            return None
        if loaded.format != OURS or "calibration" not in loaded.config["provenance"]:
            return None
        ours, theirs = tensors_of(self.drafter), tensors_of(loaded.drafter)
        fixed = ours.keys() - CALIBRATED
        same = ours.keys() == theirs.keys() and all(ours[n].equal(theirs[n]) for n in fixed)
        return path if same else None

    def finish(self, provenance: dict[str, Any]) -> Result:
        """Judge, calibrate and write the drafter; for the first process alone."""
        held_out, judged = self._judged()
        calibration = None
        if judged is not None and len(self._held) > 1:
            calibration = calibrate(self.drafter, judged, len(self._held))
        directory = self.inputs.directory
        self._log.add(
            step=self.trainer.step,
            final=True,
            held_out=held_out and held_out.as_json(),
            calibration=calibration and calibration.as_json(),
        )
        about = {
            **provenance,
            "recipe": self.recipe.as_json(),
            "data": self._data.header.get("id"),
            "earlier_data": self._earlier,
            "num_texts": self.num_texts,
            "step": self.trainer.step,
            "num_tokens": self.trainer.num_tokens,
            "held_out": held_out and held_out.as_json(),
            "calibration": calibration and calibration.as_json(),
        }
        result = directory / DRAFTER
        save_drafter(self.drafter, result, target=target_json(self._loaded), provenance=about)
        return Result(result, held_out, calibration, draw_curve(directory))

    def _judged(self) -> tuple[HeldOut | None, Judged | None]:
        precision = self.recipe.training.precision
        judged = judge(
            self.drafter, self._data, self._source, self._held, self.recipe.loss, precision
        )
        if judged is None:
            return None, None
        return summarise(judged, self._held, self._data.categories), judged

    def _save(self) -> None:
        if self.world.is_first:
            save_state(self.inputs.directory, self.trainer.state())

    def _open(self, num_texts: int) -> None:
        """Make the directory, or make sure that it is one of the same run."""
        directory, init = self.inputs.directory, self.inputs.init_from
        about = {
            "recipe": self.recipe.as_json(),
            "data": self._data.header.get("id"),
            "num_texts": num_texts,
            **target_names(self._loaded),
            "init_from": init and str(init),
        }
        if (directory / STATE).exists():
            differs = unlike(read_header(directory / "run.json", KIND), about)
            if differs:
                raise DataError(
                    f"{directory} holds another run; give another directory, or delete it: "
                    f"{differs}"
                )
        elif self.world.is_first:
            write_header(directory / "run.json", KIND, about)
        if self.world.is_first:
            check_replaced(directory / DRAFTER)  # hours before it is written

    def _drafter(self) -> Drafter:
        """The drafter as training starts."""
        weights = self._loaded.state_dict()
        mask = self.recipe.drafter.mask_token
        init = self.inputs.init_from
        start = None if init is None else Start(init)
        drafter = build_drafter(
            self.recipe,
            self._data,
            self._loaded.config_object(),
            weights,
            None if mask is None else self._token_id(mask),
            None if start is None else start.token_ids,
        )
        if start is not None:
            start.give(drafter, weights)
            self._earlier = start.seen
        return drafter.to(self._loaded.device)

    def _token_id(self, token: str) -> int | None:
        tokenizer = self._loaded.tokenizer
        found = None if tokenizer is None else tokenizer.token_id(token)
        if found is None:
            raise DataError(f"{self._loaded.name} has no token {token!r}, the recipe's mask_token")
        return found

    def _batches(self, train: list[Place]) -> Batches:
        settings = self.recipe.training
        rule = AnchorRule(
            self.recipe.drafter.num_draft_tokens,
            settings.anchors_per_pack,
            settings.keep_ratio,
            settings.keep_min,
        )
        if settings.packs_per_step < self.world.size:
            raise DataError(
                f"training.packs_per_step is {settings.packs_per_step}, expected at least one for "
                f"each of the {self.world.size} processes"
            )
        return Batches(
            self._data,
            self._source,
            Shares(train, self._shares(), self.recipe.seed),
            rule,
            settings.tokens_per_pack,
            settings.packs_per_step,
            self.recipe.seed,
        )

    def _shares(self) -> dict[int, float]:
        names = self._data.categories
        shares = self.recipe.training.shares
        unknown = sorted(shares.keys() - set(names))
        if unknown:
            raise DataError(
                f"training.shares names {unknown}, expected categories of the data: {names}"
            )
        return {names.index(name): share for name, share in shares.items()}
