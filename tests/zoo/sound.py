"""Models that read speech and other sounds."""

from tests.zoo.batches import reals, tokens
from tests.zoo.building import ENCODER_DECODER, VOCABULARY, built


def _whisper(full):
    size, length, frames, vocabulary = (16, 448, 3000, 51865) if full else (5, 7, 16, VOCABULARY)
    return {
        "input_features": reals(size, 80 if full else 6, frames),
        "labels": tokens(size, length, vocabulary)["labels"],
    }


SOUND = {
    "whisper": built(
        "Whisper",
        "ForConditionalGeneration",
        {
            **ENCODER_DECODER,
            "num_mel_bins": 6,
            "max_source_positions": 8,
            "max_target_positions": 16,
        },
        {},
        _whisper,
    ),
}
