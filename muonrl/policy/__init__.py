"""The policy as files: tokenizer, chat format and model, all loadable by transformers' Auto classes."""
