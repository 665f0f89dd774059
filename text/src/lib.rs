//! Tokenizers, chat templates, and the score of a prompt with T.
