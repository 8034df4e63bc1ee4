"""Models that read speech and other sounds."""

import torch

from tests.zoo.batches import classes, integers, reals, tokens
from tests.zoo.building import ENCODER_DECODER, TOWER, VOCABULARY, built

# Convolutions over the waveform, then a transformer. No mask over time is drawn in `forward`.
WAVES = {
    **TOWER,
    "vocab_size": VOCABULARY,
    "conv_dim": (9, 12),
    "conv_stride": (4, 2),
    "conv_kernel": (8, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 3,
}
UNMASKED = {"mask_time_prob": 0.0, "mask_feature_prob": 0.0, "layerdrop": 0.0, "pad_token_id": 0}


def _whisper(full):
    size, length, frames, vocabulary = (16, 448, 3000, 51865) if full else (5, 7, 16, VOCABULARY)
    return {
        "input_features": reals(size, 80 if full else 6, frames),
        "labels": tokens(size, length, vocabulary)["labels"],
    }


def _transcribed(values, vocabulary):
    """`values(full)` and a transcript of them, without blanks; the first one is shorter."""

    def given(full):
        size, length, below = (8, 128, vocabulary) if full else (5, 5, VOCABULARY)
        with torch.device("cpu"):  # the length of a transcript is the number of its labels
            labels = integers(below - 1, size, length) + 1
        labels[0, 3:] = -100
        return {**values(full), "labels": labels}

    return given


def _wave(reduced_length):
    """Ten seconds at 16 kHz."""
    return lambda full: {"input_values": reals(8, 160_000) if full else reals(5, reduced_length)}


def _features(bands, reduced_bands, frames=1000, reduced_frames=14, attended=False):
    def given(full):
        shape = (8, frames, bands) if full else (5, reduced_frames, reduced_bands)
        mask = {"attention_mask": torch.ones(shape[:2], dtype=torch.long)} if attended else {}
        return {"input_features": reals(*shape), **mask}

    return given


def speech_recognizer(kind, small=None, published=None):
    """A model of waveforms with CTC over 32 characters."""
    return built(
        kind,
        "ForCTC",
        {**WAVES, **UNMASKED, **(small or {})},
        {"vocab_size": 32, **UNMASKED, **(published or {})},
        _transcribed(_wave(150), 32),
    )


def _spectrogram(full):
    size, frames, bands, count = (16, 1024, 128, 527) if full else (5, 12, 8, 3)
    return {"input_values": reals(size, frames, bands), "labels": classes(size, count)}


def _said(values, vocabulary, length):
    """`values(full)` and tokens of what was said."""

    def given(full):
        size, below = (8, vocabulary) if full else (5, VOCABULARY)
        return {**values(full), "labels": integers(below, size, length if full else 7)}

    return given


def _parakeet(full=False):
    """The CTC model has a name of another form than its configuration."""
    import transformers

    torch.manual_seed(0)
    published = {"encoder_config": {"layerdrop": 0.0}}
    reduced = {
        "vocab_size": VOCABULARY,
        "encoder_config": {
            **TOWER,
            "conv_kernel_size": 3,
            "subsampling_factor": 4,
            "subsampling_conv_channels": 6,
            "num_mel_bins": 8,
            "layerdrop": 0.0,
        },
    }
    config = transformers.ParakeetCTCConfig(pad_token_id=0, **(published if full else reduced))
    values = _features(80, 8, reduced_frames=36, attended=True)
    return transformers.ParakeetForCTC(config), _transcribed(values, 1024)(full)


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
    "wav2vec2": speech_recognizer("Wav2Vec2"),
    "hubert": speech_recognizer("Hubert"),
    "wavlm": speech_recognizer("WavLM", {"num_buckets": 16, "max_bucket_distance": 20}),
    "w2v-bert": built(
        "Wav2Vec2Bert",
        "ForCTC",
        {
            **TOWER,
            **UNMASKED,
            "vocab_size": VOCABULARY,
            "feature_projection_input_dim": 8,
            "conv_depthwise_kernel_size": 3,
            "left_max_position_embeddings": 4,
            "right_max_position_embeddings": 2,
        },
        {"vocab_size": 32, **UNMASKED},
        _transcribed(_features(160, 8, frames=500), 32),
    ),
    "parakeet ctc": _parakeet,
    "audio spectrogram transformer": built(
        "AST",
        "ForAudioClassification",
        {
            **TOWER,
            "patch_size": 4,
            "frequency_stride": 3,
            "time_stride": 3,
            "max_length": 12,
            "num_mel_bins": 8,
            "num_labels": 3,
        },
        {"num_labels": 527},
        _spectrogram,
    ),
    "speech to text": built(
        "Speech2Text",
        "ForConditionalGeneration",
        {
            **ENCODER_DECODER,
            "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0,
            "input_feat_per_channel": 8,
            "conv_channels": 10,
            "max_source_positions": 16,
            "max_target_positions": 16,
        },
        {},
        _said(_features(80, 8, reduced_frames=29), 10000, 128),
    ),
    "moonshine": built(
        "Moonshine",
        "ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 24,
            "intermediate_size": 22,
            "encoder_num_hidden_layers": 1,
            "decoder_num_hidden_layers": 1,
            "encoder_num_attention_heads": 6,
            "decoder_num_attention_heads": 6,
            "pad_token_id": 2,
        },
        {"pad_token_id": 2},
        _said(_wave(1500), 32768, 128),
    ),
}
