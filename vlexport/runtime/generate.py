"""The six stages of an answer, each from one value of `stages` to the next."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace

from vlexport.errors import InputError, UnsupportedError, VlexportError
from vlexport.fields import check_fields
from vlexport.positions.rules import PositionOptions
from vlexport.runtime.asking import Asker
from vlexport.runtime.decode import Decoding, prefill
from vlexport.runtime.decoder import DecoderOptions
from vlexport.runtime.encoder import Encoder, EncoderOptions, Shared
from vlexport.runtime.languages import Language, no_language
from vlexport.runtime.prompts import Prompter
from vlexport.runtime.prune import Placer, Pruner, position_rule
from vlexport.runtime.reading import MediaReader
from vlexport.runtime.requests import Request, RequestLimits
from vlexport.runtime.stages import Answer, Asked, Filled, Piece, Placed, Seen

OnPiece = Callable[[int, Piece], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeOptions:
    """What a pipeline holds to: engine calls and cache, the decoder, position rules, and ceilings."""

    encoder: EncoderOptions = field(default_factory=EncoderOptions)
    decoder: DecoderOptions = field(default_factory=DecoderOptions)
    positions: PositionOptions = field(default_factory=PositionOptions)
    limits: RequestLimits = field(default_factory=RequestLimits)

    def __post_init__(self) -> None:
        check_fields(self)


class Speaker:
    """A tower, a pruner and a decoder that answer together."""

    def __init__(self, encoder: Encoder, pruner: Pruner, language: Language, options: RuntimeOptions) -> None:
        tower = encoder.tower
        rule = tower.recipe.language
        if rule is None or len(tower.packing.outputs) > 1:
            raise UnsupportedError(no_language(tower.recipe))
        width = tower.bundle.manifest.outputs[0].shape[-1]
        if language.decoder.width != width:
            raise InputError(
                f"the decoder is {language.decoder.width} wide, the engine's embeddings are {width}. "
                "Pass the checkpoint that the bundle was built from."
            )
        self.encoder = encoder
        self.pruner = pruner
        self.language = language
        reader = MediaReader(tower, encoder.cache)
        prompter = Prompter(
            language.tokenizer, rule.prompt, lambda item: rule.prompt.expand(tower.config, item)
        )
        self.asker = Asker(reader, pruner, prompter, language.decoder, options.limits)
        speed = rule.tokens_per_second(tower.config)
        positions = position_rule(tower.recipe, pruner.merge, speed, options.positions)
        self.placer = Placer(language.decoder, positions, counts_frames=rule.counts_frames)

    def ask(self, request: Request) -> Asked:
        """Stage 1: pixels and words."""
        return self.asker.ask(request)

    def encode(self, asked: Sequence[Asked | VlexportError]) -> list[Seen | VlexportError]:
        """Stage 2: the tower, over the media of all requests at once."""
        good = [one for one in asked if isinstance(one, Asked)]
        outcomes = iter(self.encoder.encode([medium for one in good for medium in one.media]))
        return [
            _seen(one, [next(outcomes) for _ in one.media]) if isinstance(one, Asked) else one
            for one in asked
        ]

    def prune(self, seen: Seen) -> Seen:
        """Stage 3: drop tokens of videos, then write the prompt with what is left of each frame."""
        with seen.asked.watch.timing("prune"):
            kept = tuple(self.pruner.prune(item, seen.asked.rate) for item in seen.encoded)
            return self.asker.reword(replace(seen, encoded=kept))

    def place(self, seen: Seen) -> Placed:
        """Stage 4: embeddings into the prompt, and positions."""
        return self.placer.place(seen)

    def prefill(self, placed: Placed) -> Filled:
        """Stage 5: the decoder reads the prompt."""
        return prefill(self.language.decoder, placed)

    def answer(self, filled: Filled) -> Generator[Piece, None, Answer]:
        """Stage 6: the decoder writes, token by token."""
        return Decoding(self.language, filled).run()

    def decoding(self, number: int, on_piece: OnPiece | None) -> Callable[[Filled], Answer]:
        """Stage 6 to its end, for the request of this number."""

        def run(filled: Filled) -> Answer:
            pieces = self.answer(filled)
            while True:
                try:
                    piece = next(pieces)
                except StopIteration as end:
                    answer: Answer = end.value
                    return answer
                if on_piece is not None:
                    _call(on_piece, number, piece)

        return run


def _call(on_piece: OnPiece, number: int, piece: Piece) -> None:
    try:
        on_piece(number, piece)
    except Exception as error:
        raise InputError(f"on_piece raised {type(error).__name__}: {error}. Mend the callback.") from error


def _seen(asked: Asked, outcomes: Sequence[Shared | VlexportError]) -> Seen | VlexportError:
    for outcome in outcomes:
        if isinstance(outcome, VlexportError):
            return outcome
    shared = [outcome for outcome in outcomes if isinstance(outcome, Shared)]
    asked.watch.seconds["tower"] += sum(each.seconds for each in shared)
    return Seen(asked=asked, encoded=tuple(each.encoded for each in shared))
