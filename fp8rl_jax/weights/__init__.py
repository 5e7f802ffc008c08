"""Policies from and to files: Hugging Face directories, GGUF files and PEFT adapters.

load              a policy and its tokenizer, from and to a Hugging Face directory
resolve           what names a model -> a Hugging Face directory on this machine
gathered          a policy's tensors on the host, one at a time, from its shards
hf_directory      a Hugging Face directory's tensors <-> numpy arrays, every one accounted for
hf_config         config.json <-> PolicyConfig
hf_names          Hugging Face's names of tensors <-> the policy's
layouts           config.json's words for how linears are stored: FP8, MX, NVFP4, INT4
stored_linears    a linear as it is stored -> float32
block_fp8         of these FP8: e4m3 with scales
quantized_export  a linear in a rollout's format -> as it is stored, and config.json's words
peft_format       adapters from and to PEFT's files
gguf, gguf_io     a GGUF file -> a Hugging Face directory; the reader of the format
safetensors_io    safetensors files, one or shards with an index <-> numpy arrays
"""
