//! Tests of the `semmoe` command and of the whole repository, in one program to link only once.

mod bad_input;
mod circles;
mod cli;
mod deploy;
mod embeddings;
mod export;
mod imports;
mod keys;
mod layers;
mod load;
mod mistakes;
mod permute;
mod plan;
mod recording;
mod replicas;
mod rooms;
mod serve;
mod solve;
mod stopping;
mod support;
mod up;
mod usage;
