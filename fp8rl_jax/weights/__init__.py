"""Policies from and to files: Hugging Face directories, GGUF files and PEFT adapters.

load            a policy and its tokenizer, from and to a Hugging Face directory
resolve         what names a model -> a Hugging Face directory on this machine
hf_directory    a Hugging Face directory's tensors <-> numpy arrays, every one accounted for
hf_config       config.json <-> PolicyConfig
hf_names        Hugging Face's names of tensors <-> the policy's
block_fp8       FP8 checkpoints: linears in e4m3 with scales, ours by block
peft_format     adapters from and to PEFT's files
gguf, gguf_io   a GGUF file -> a Hugging Face directory; the reader of the format
safetensors_io  safetensors files, one or shards with an index <-> numpy arrays
"""
