from pallas_kernels.decode_attention.api import KeyValues, decode_attention, scaled

__all__ = ["KeyValues", "decode_attention", "scaled"]
