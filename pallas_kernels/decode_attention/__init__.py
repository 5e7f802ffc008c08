from pallas_kernels.decode_attention.api import (
    KeyValues,
    combine_score_scales,
    decode_attention,
    whole_slots,
)

__all__ = ["KeyValues", "combine_score_scales", "decode_attention", "whole_slots"]
