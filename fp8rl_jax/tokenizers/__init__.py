"""Text to token ids and back.

tokenizer       what the library knows of a tokenizer, and Hugging Face's tokenizer.json
byte_tokenizer  bytes as tokens, for the built-in policy
special_tokens  which token is the bos, eos, padding token, by the files of a directory
chat_template   the text of a conversation
gguf_tokenizer  the tokenizer of a GGUF file -> tokenizer.json
"""
